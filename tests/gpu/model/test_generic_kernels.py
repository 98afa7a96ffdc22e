"""Attention on any GPU, as PTX on a model of the hardware (ptx_machine.py), compared with float64.

Found here: a wrong index or stride of a page, layout, group or team; an option that is lost; a format that is widened
wrongly; items of the schedule that overlap or miss tokens; a state that is merged with another's factor.

Schedule, attention and combine run one after the other over one memory, as they do on a stream. Unused slots and pages
are NaN, the page table is shuffled, threads run in random order.
"""

import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gpu.model import generic_kernels, programs
from gpu.model.generic_kernels import SHORT, DeviceMemory, attend
from paged_kv import reference
from paged_kv.kv_formats import CODE_DTYPES
from support.cases import Cache, CacheCase, build
from support.codes import quantised_cache, widened_pages
from support.compare import assert_bits_equal, assert_close, assert_lse_close

pytestmark = pytest.mark.waits_for(programs.generic["sm_90a"])


@dataclass(frozen=True)
class Variant:
    """An attention kernel of compile_gpu_kernels.mojo."""

    dtype: str
    kv_dtype: str
    dim: int
    heads: int
    shared: tuple[int, int]
    rel: float


VARIANTS = [
    Variant("bfloat16", "bfloat16", 128, 8, (32768, 512), 1e-2),
    Variant("float16", "float8_e5m2", 64, 4, (16384, 512), 2e-3),
    Variant("bfloat16", "float8_e4m3fn", 256, 8, (32768, 256), 1e-2),
    Variant("float32", "float32", 512, 4, (32768, 128), 1e-5),
]
CODES = [
    Variant("float32", "int8", 64, 8, (32768, 1024), 1e-5),
    Variant("bfloat16", "int8", 128, 1, (4096, 64), 1e-2),
    Variant("float16", "int8", 256, 1, (4096, 32), 2e-3),
    Variant("float32", "int4", 64, 1, (4096, 128), 1e-5),
    Variant("bfloat16", "int4", 256, 4, (16384, 128), 1e-2),
    Variant("float16", "int4", 512, 1, (8192, 32), 2e-3),
]
ROTARY = [
    Variant("bfloat16", "bfloat16", 128, 4, (16384, 256), 1e-2),
    Variant("float32", "float32", 512, 2, (16384, 64), 1e-5),
]


@dataclass
class Call:
    """One call of attention on the model."""

    variant: Variant
    lengths: tuple[int, ...]
    group: int
    page_size: int = 16
    layout: str = "NHD"
    options: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    dim: int = 0
    """head_dim, where it is not the greatest that the kernel takes."""

    @property
    def has_codes(self) -> bool:
        return self.variant.kv_dtype in CODE_DTYPES

    def build(self) -> tuple[Cache, np.ndarray]:
        case = CacheCase(
            self.lengths,
            2 * self.group,
            2,
            self.dim or self.variant.dim,
            self.page_size,
            self.layout,
            5,
            dtype="float32" if self.has_codes else self.variant.kv_dtype,
        )
        cache = quantised_cache(case, self.variant.kv_dtype) if self.has_codes else build(case)
        if self.variant.kv_dtype == "int8":
            cache.k_blocks[..., 3] = -128  # which no append makes
        q = np.random.default_rng(1).standard_normal(cache.q.shape, np.float32)
        return cache, q.astype(self.variant.dtype)

    def run(
        self, ptx: dict[Any, str], cache: Cache, q: np.ndarray, row_batch: np.ndarray, row_lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        case, options = cache.case, self.options
        memory = DeviceMemory()
        storage = zip(reference.cache_views(*cache.pages[:2], case.layout, 0), cache.pages[:2], strict=True)
        views = memory.views(list(storage), cache.lookup_table, case.head_dim)
        theta, scale = options.get("rope_theta"), options.get("rope_scale", 1.0)
        rotary = (0.0, 1.0) if theta is None else (1 / (2 * math.pi * scale), theta ** (-2 / case.head_dim))
        call = generic_kernels.Call(
            q,
            q,
            row_batch,
            row_lengths,
            cache.lookup_table,
            case.page_size,
            options,
            case.head_dim**-0.5,
            batch_invariant=self.batch_invariant,
        )
        attention = ptx[(*(["codes"] if self.has_codes else []), *self.variant.shared)]
        texts = ptx["schedule", "plain"], attention, ptx["combine", "plain", SHORT[self.variant.dtype]]
        grid = (case.num_kv_heads, -(-self.group // self.variant.heads))
        o, lse, self.items = attend(texts, memory, call, grid, (views, [struct.pack("<2d", *rotary)]))
        return o, lse

    def check(self, ptx: dict[Any, str]) -> None:
        """Decode rows among a row of padding and three that the table does not have."""
        cache, q = self.build()
        count = len(q)
        row_batch = np.array([*range(count), -1, count, 0, 0], np.int32)
        row_lengths = np.array([*self.lengths, 9, 1, -1, cache.lookup_table.shape[1] * self.page_size + 1], np.int32)
        padded = np.concatenate([q, np.full((4, *q.shape[1:]), np.nan, q.dtype)])
        o, lse = self.run(ptx, cache, padded, row_batch, row_lengths)
        pages = widened_pages(cache) if self.has_codes else cache.pages
        expected = reference.attention(q, *pages, *cache.decode_rows, **cache.storage, **self.options)
        assert_close(o[:count], expected[0], rel=self.variant.rel, what=f"o of {self}")
        assert_lse_close(lse[:count], expected[1], tol=1e-5, what=f"lse of {self}")
        assert not o[count].any()
        assert np.isneginf(lse[count]).all()
        assert np.isnan(o[count + 1 :].astype(np.float32)).all()
        assert np.isnan(lse[count + 1 :]).all()


ALL = {
    "window_left": 260,
    "logits_soft_cap": 20.0,
    "v_scale": -0.5,
    "alibi_slopes": np.linspace(-0.02, 0.02, 8),
    "sinks": np.linspace(-3, 2, 8),
}
CALLS = [
    Call(VARIANTS[0], (1, 270), 8, page_size=5, layout="HND"),
    Call(VARIANTS[0], (0, 33), 11),
    Call(VARIANTS[1], (300, 40), 4, options=ALL),
    Call(VARIANTS[1], (1030,), 3, batch_invariant=True),
    Call(VARIANTS[2], (9, 0), 6, page_size=1),
    Call(VARIANTS[3], (20,), 4, options=ALL),
    Call(CODES[0], (1, 33), 8, page_size=5, layout="HND"),
    Call(CODES[1], (300, 9), 2, options=ALL | {name: ALL[name][:4] for name in ("alibi_slopes", "sinks")}),
    Call(CODES[2], (0, 33), 2, page_size=1, dim=200),
    Call(CODES[3], (40,), 1, dim=24),
    Call(CODES[4], (40, 9), 6, page_size=7, layout="HND", dim=136),
    Call(CODES[5], (20,), 4, options=ALL),
    Call(ROTARY[0], (12,), 5, page_size=8, options={"rope_theta": 1e4, "window_left": 9}),
    Call(ROTARY[0], (250,), 1, dim=24, options={"rope_theta": 500.0, "rope_scale": 4.0, "window_left": 20}),
    Call(ROTARY[1], (11,), 3, dim=136, options={"rope_theta": 1e4, "rope_scale": 0.1}),
]


@pytest.mark.parametrize(
    "call", CALLS, ids=lambda call: f"{call.variant.kv_dtype}-{call.variant.dim}-{call.lengths}-{call.group}"
)
def test_attention(call, ptx):
    call.check(ptx)
    assert (call.items[:, 3] >= 0).any() == (max(call.lengths) > 2 * 128)


@pytest.mark.parametrize("count", [2, 17, 70])
def test_a_row_of_many_partial_results(count, ptx):
    """More of them than loads are under way, and than a warp has lanes; some saw no token; dims beyond the threads."""
    rng = np.random.default_rng(count)
    heads, dim, first = 2, 200, 3
    acc = rng.standard_normal((first + count, heads, dim), np.float32)
    greatest, total = (rng.uniform(1, 9, (first + count, heads)).astype(np.float32) for _ in range(2))
    empty = rng.random(greatest.shape) < 0.2
    empty[first + 1] = [True, False]
    acc[empty], greatest[empty], total[empty] = 0, -np.inf, 0
    acc[:first] = np.nan
    q = np.zeros((1, heads, dim), np.float32)
    zero = np.zeros(1, np.int32)
    call = generic_kernels.Call(q, q, zero, zero, np.zeros((1, 1), np.uint32), 1, {"v_scale": 0.5}, 1.0)
    o, lse = generic_kernels.merge(ptx["combine", "plain", "f32"], call, acc, greatest, total, first)
    factors = np.exp2(greatest[first:].astype(np.float64) - 9)
    totals = (factors * total[first:]).sum(0)
    expected = 0.5 * (factors[..., None] * acc[first:].astype(np.float64)).sum(0) / totals[:, None]
    assert_close(o[0], expected, rel=1e-6, what="o")
    assert_lse_close(lse[0], 9 + np.log2(totals), tol=1e-6, what="lse")


def test_a_page_outside_the_pool_makes_its_row_nan(ptx):
    call = Call(VARIANTS[1], (70, 30), 2)
    cache, q = call.build()
    good, good_lse = call.run(ptx, cache, q, *cache.decode_rows)
    cache.lookup_table[0, 3] = len(cache.k_blocks)
    o, lse = call.run(ptx, cache, q, *cache.decode_rows)
    assert np.isnan(o[0].astype(np.float32)).all()
    assert np.isnan(lse[0]).all()
    assert_bits_equal(o[1], good[1], what="o of the other row")
    assert_bits_equal(lse[1], good_lse[1], what="lse of the other row")


def test_a_head_of_nan_makes_the_rows_that_see_it_nan(ptx):
    """Its codes are 0 and its scale is NaN: of K and of V alone, of one KV head."""
    variant = CODES[1]
    call = Call(variant, (33, 20, 9), 2)
    cache, q = call.build()
    for side, head, b in ((0, 0, 0), (1, 1, 1)):
        stored = cache.k_blocks[cache.lookup_table[b, 0], side, 7, head]
        stored[:] = reference.quantised(np.full(variant.dim, np.nan), variant.kv_dtype)
    row_batch, row_lengths = np.array([0, 0, 1, 1, 2], np.int32), np.array([33, 7, 20, 7, 9], np.int32)
    o, lse = call.run(ptx, cache, q[row_batch], row_batch, row_lengths)
    is_nan = np.isnan(o.astype(np.float32)).any(-1)
    assert is_nan.tolist() == [[True, True, False, False], [False] * 4, [False, False, True, True], *[[False] * 4] * 2]
    assert np.isnan(lse[0]).tolist() == is_nan[0].tolist()
    assert np.isfinite(lse[1:]).all()
