"""The Hopper kernel for many rows as PTX on a model of the hardware (ptx_machine.py), compared with float64.

Schedule, attention and combine run one after the other over one memory, as they do on a stream. Unused slots and pages
are NaN, the page table is shuffled, threads run in random order.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from paged_kv import reference
from support import gpu_programs, many_rows
from support.cases import Cache, CacheCase, build
from support.compare import assert_close, assert_lse_close

pytestmark = pytest.mark.waits_for(gpu_programs.many_rows)

REL = {"bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(scope="module")
def ptx() -> dict[Any, str]:
    return many_rows.kernels()


@dataclass
class Call:
    """One call: the last rows of each request, in the order of the requests."""

    requests: tuple[tuple[int, int], ...]  # tokens of a request, of which so many are new: its rows
    dim: int = 64
    dtype: str = "bfloat16"
    group: int = 4
    kv_heads: int = 1
    page_size: int = 16
    layout: str = "NHD"
    options: dict[str, Any] = field(default_factory=dict)
    wanted_items: int = 3
    splits: bool = False
    """Whether a tile is expected to be split."""

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Request and length of each row."""
        found = [(b, tokens - new + 1 + i) for b, (tokens, new) in enumerate(self.requests) for i in range(new)]
        return tuple(np.array(found, np.int32).reshape(-1, 2).T)

    def build(self) -> Cache:
        lengths = tuple(tokens for tokens, _ in self.requests)
        heads = self.group * self.kv_heads
        return build(CacheCase(lengths, heads, self.kv_heads, self.dim, self.page_size, self.layout, dtype=self.dtype))

    def queries(self, rows: int) -> np.ndarray:
        q = np.random.default_rng(1).standard_normal((rows, self.group * self.kv_heads, self.dim), np.float32)
        return q.astype(self.dtype)

    def run(
        self, ptx: dict[Any, str], cache: Cache, rows: tuple[np.ndarray, np.ndarray], seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        self.items, o, lse = many_rows.attend(
            ptx, cache, self.queries(len(rows[0])), *rows, self.options, self.wanted_items, seed
        )
        return o, lse

    def check(self, ptx: dict[Any, str], seed: int = 0) -> None:
        cache, rows = self.build(), self.rows()
        o, lse = self.run(ptx, cache, rows, seed)
        q = self.queries(len(rows[0]))
        expected = reference.attention(q, *cache.pages, *rows, **cache.storage, **self.options)
        assert_close(o, expected[0], rel=REL[self.dtype], what=f"o of {self}")
        assert_lse_close(lse, expected[1], tol=1e-4, what=f"lse of {self}")
        assert (self.items[:, 4] >= 0).any() == self.splits


def options(heads: int) -> dict[str, Any]:
    return {
        "window_left": 75,
        "logits_soft_cap": 8.0,
        "v_scale": -0.5,
        "alibi_slopes": np.linspace(-0.02, 0.02, heads),
        "sinks": np.linspace(-3, 2, heads),
    }


CALLS = [
    # Prefill: one tile and a part of one, in both warpgroups; the edges of tiles and pages.
    Call(((40, 40),)),
    Call(((129, 129),), group=1),
    Call(((64, 64), (1, 1), (65, 2)), page_size=8),
    Call(((70, 33), (33, 33)), group=5, kv_heads=2, layout="HND"),
    # A few new tokens after many, split over blocks.
    Call(((700, 4),), group=2, splits=True),
    Call(((390, 3), (20, 2)), group=8, kv_heads=2, page_size=64, wanted_items=1),
    Call(((150, 5),), group=16, page_size=48),
    # Dtypes and widths.
    Call(((90, 20),), dim=128),
    Call(((90, 20),), page_size=32),
    Call(((90, 20),), dtype="float16", page_size=128),
    Call(((70, 9),), dim=128, dtype="float16", page_size=24),
    # Windows that end inside, before and after a tile, alone and with every other option.
    Call(((200, 90),), group=2, options={"window_left": 0}),
    Call(((200, 90),), group=2, options={"window_left": 64}),
    Call(((400, 64),), group=2, options={"window_left": 200}, splits=True),
    Call(((150, 40),), group=4, options=options(4)),
    Call(((600, 3),), group=4, options=options(4) | {"window_left": 400}, splits=True),
    Call(((100, 10),), dim=128, dtype="float16", options=options(4)),
    Call(((40, 20),), options={"sm_scale": -0.3, "q_scale": 2.0, "k_scale": 0.5}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.dtype}-{call.dim}-{call.requests}-{call.group}")
def test_attention(call, ptx):
    call.check(ptx)


def test_rows_outside_the_table(ptx):
    """Padding and rows of no tokens are 0, rows that the table does not have NaN; the others are as they are alone."""
    call = Call(((50, 6), (30, 1)))
    cache, (row_batch, row_lengths) = call.build(), call.rows()
    capacity = cache.lookup_table.shape[1] * call.page_size
    others = [(-1, 9), (-1, 0), (2, 1), (0, -1), (0, 0), (0, 1), (0, capacity + 1), (-2, 5)]
    more_batch, more_lengths = np.array(others, np.int32).T
    rows = np.concatenate([row_batch, more_batch]), np.concatenate([row_lengths, more_lengths])
    o, lse = call.run(ptx, cache, rows)
    alone, alone_lse = call.run(ptx, cache, (row_batch, row_lengths))
    count = len(row_batch)
    np.testing.assert_array_equal(o[:count], alone)
    np.testing.assert_array_equal(lse[:count], alone_lse)
    o, lse = o[count:].astype(np.float32), lse[count:]
    for i, (request, length) in enumerate(others):
        if request == -1 or (request == 0 and length == 0):
            assert not o[i].any(), (request, length)
            assert np.isneginf(lse[i]).all(), (request, length)
        elif (request, length) == (0, 1):
            assert np.isfinite(o[i]).all()
        else:
            assert np.isnan(o[i]).all(), (request, length)
            assert np.isnan(lse[i]).all(), (request, length)


@pytest.mark.parametrize("wanted_items", [1, 9])
def test_a_page_outside_the_pool_makes_those_rows_nan_that_see_it(ptx, wanted_items):
    call = Call(((340, 45),), group=2, page_size=8, wanted_items=wanted_items)
    cache, rows = call.build(), call.rows()
    good, good_lse = call.run(ptx, cache, rows)
    cache.lookup_table[0, 39] = len(cache.k_blocks)  # tokens 312 to 319
    o, lse = call.run(ptx, cache, rows)
    sees = rows[1] > 312
    assert sees.any()
    assert not sees.all()
    assert np.isnan(o[sees].astype(np.float32)).all()
    assert np.isnan(lse[sees]).all()
    np.testing.assert_array_equal(o[~sees], good[~sees])
    np.testing.assert_array_equal(lse[~sees], good_lse[~sees])


@pytest.mark.parametrize("window", [-1, 30])
@pytest.mark.parametrize("group", [1, 8])
def test_no_row_takes_what_it_does_not_see(ptx, group, window):
    """Inf and NaN in K and V of some tokens: rows before them, and those whose window is past them, are as without."""
    call = Call(((110, 75),), group=group, options={"window_left": window})
    cache, rows = call.build(), call.rows()
    for token, dim, value in [(20, 0, np.nan), (55, 3, np.inf), (70, 63, -np.inf), (70, 5, np.nan), (109, 9, np.inf)]:
        at = cache.lookup_table[0, token // 16], token % 16, 0, dim
        cache.v_blocks[at] = value
    cache.k_blocks[cache.lookup_table[0, 95 // 16], 95 % 16] = np.nan
    o, lse = call.run(ptx, cache, rows)
    with np.errstate(invalid="ignore"):
        expected = reference.attention(call.queries(75), *cache.pages, *rows, **call.options)
    assert np.isfinite(o.astype(np.float32)).any(axis=(1, 2))[rows[1] <= 95].all()
    assert_close(o, expected[0], rel=REL[call.dtype], what="o")
    assert_lse_close(lse, expected[1], tol=1e-4, what="lse")


def test_any_order_of_threads(ptx):
    any_order(Call(((300, 20),), group=8, kv_heads=2, splits=True), ptx, 4)


def test_more_items_than_blocks(ptx):
    """Blocks that serve several items: the ring goes on where the last item left it."""
    call = Call(((80, 3), (150, 3), (1, 1), (200, 2), (64, 1)), group=2, kv_heads=2)
    many_rows.most_blocks, before = 3, many_rows.most_blocks
    try:
        call.check(ptx)
    finally:
        many_rows.most_blocks = before


FAULTS = {
    "a proxy fence": (r"fence\.proxy\.async\.shared::cta;", "", "without a fence"),
    "the release of a stage": (r"mbarrier\.arrive\.shared\.b64[^;]*;", "", "deadlock"),
    "the wait for a stage": (r"mbarrier\.try_wait[^;]*;", "", None),
    "the fence of registers": (r"wgmma\.fence\.sync\.aligned;", "", "without a wgmma.fence"),
    "the wait for products": (r"wgmma\.wait_group\.sync\.aligned 0;", "", "under way"),
    "the barriers of all consumers": (r"bar\.sync\s+1, 256;", "", None),
    "a half of P": (r"(cvt\.rn\.bf16x2\.f32\s+%r\d+, )(%r\d+), (%r\d+);", r"\1\3, \2;", "o of"),
}
"""What is missing: the part of the text, what stands there instead, and what the model says, where that is sure."""


@pytest.mark.parametrize("missing", FAULTS)
def test_a_kernel_fails_without(ptx, missing):
    """A kernel without one of these fails, so that the tests above can fail."""
    pattern, by, message = FAULTS[missing]
    text, count = re.subn(pattern, by, ptx["attention", 64, "bfloat16"])
    assert count > 0
    faulty = {**ptx, ("attention", 64, "bfloat16"): text}
    with pytest.raises(AssertionError, match=message):
        any_order(Call(((500, 37),), group=2, wanted_items=1), faulty, 3)


def any_order(call: Call, ptx: dict[Any, str], orders: int) -> None:
    for seed in range(orders):
        call.check(ptx, seed)
