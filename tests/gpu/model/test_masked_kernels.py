"""Masked attention on any GPU, as PTX on a model of the hardware (ptx_machine.py), compared with float64.

Found here: a bit of a mask that is read in the wrong place, a position or an offset that is lost, a width that is taken
for another's, a hidden token that is loaded. Rows have masks and positions, tokens have offsets, V is as wide as it
likes and o has a dtype of its own. Tokens that no row sees are NaN, as are unused slots and pages.
"""

import math
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from gpu.model import programs
from gpu.model.generic_kernels import MASKED_PARAMS, SHORT, Call, DeviceMemory, attend
from paged_kv import reference
from paged_kv.kv_formats import CODE_DTYPES
from support.cases import CacheCase, build
from support.codes import poisoned_head, quantised_cache, widened_pages
from support.compare import assert_close, assert_lse_close

pytestmark = pytest.mark.waits_for(programs.generic["sm_90a"])


@dataclass(frozen=True)
class Variant:
    """A masked kernel of compile_gpu_kernels.mojo."""

    dtype: str
    kv_dtype: str
    o_dtype: str
    heads: int
    shared: tuple[int, int]
    rel: float


HALF = Variant("bfloat16", "bfloat16", "float32", 8, (32768, 512), 1e-3)
FLOAT8 = Variant("float16", "float8_e4m3fn", "bfloat16", 4, (32768, 128), 1e-2)
SINGLE = Variant("float32", "float32", "float32", 1, (2048, 32), 1e-5)
INT8 = Variant("bfloat16", "int8", "float32", 1, (4096, 64), 1e-3)
INT4 = Variant("float16", "int4", "bfloat16", 4, (32768, 128), 1e-2)
ROTARY_HALF = Variant("bfloat16", "bfloat16", "bfloat16", 4, (16384, 256), 1e-2)
ROTARY_SINGLE = Variant("float32", "float32", "float16", 2, (16384, 64), 2e-3)


@dataclass
class Problem:
    """Rows of one call: for each its request, length, position and, where it has a mask, the tokens it may see."""

    variant: Variant
    lengths: tuple[int, ...]
    group: int
    dims: tuple[int, int]
    rows: list[tuple[int, int, int, list[int] | None]]
    offsets: tuple[int, ...] | None = None
    firsts: tuple[int, ...] | None = None
    """The first token that each row's mask covers."""
    page_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        v = self.variant
        sizes = (self.lengths, self.group, 1, self.dims[0], self.page_size, "HND", 4)
        cases = CacheCase(*sizes), CacheCase(*sizes[:3], self.dims[1], *sizes[4:])
        if self.has_codes:
            self.keys, self.values = (quantised_cache(case, v.kv_dtype) for case in cases)
        else:
            self.keys, self.values = (build(replace(case, dtype=v.kv_dtype)) for case in cases)
        self.table = self.keys.lookup_table
        np.testing.assert_array_equal(self.table, self.values.lookup_table)
        rng = np.random.default_rng(3)
        self.q = rng.standard_normal((len(self.rows), self.group, self.dims[0]), np.float32).astype(v.dtype)
        self.row_batch, self.row_lengths, self.positions = (
            np.array([row[i] for row in self.rows], np.int32) for i in range(3)
        )
        # Bits of rows lie one after the other, from bit 3 on; those around them are set.
        starts, bits = [], [True] * 3
        for i, (_, length, _, seen) in enumerate(self.rows):
            starts.append(-1 if seen is None else len(bits))
            if seen is not None:
                bits += [j in set(seen) for j in range(self.first_masked(i), length)]
        self.mask = np.packbits(bits, bitorder="little")
        self.mask_starts = np.array(starts, np.int64)

    @property
    def has_codes(self) -> bool:
        return self.variant.kv_dtype in CODE_DTYPES

    def first_masked(self, row: int) -> int:
        return self.firsts[row] if self.firsts else 0

    def seen(self, row: int) -> list[int]:
        """The tokens that a row sees, by the definition."""
        b, length, position, mask = self.rows[row]
        if b < 0:
            return []
        offset, window = (self.offsets or [0] * len(self.lengths))[b], self.options.get("window_left", -1)
        tokens = [j for j in range(length) if window < 0 or offset + j >= position - window]
        return [j for j in tokens if mask is None or j < self.first_masked(row) or j in mask]

    def hide(self) -> None:
        """Makes the tokens that no row sees NaN."""
        for b, length in enumerate(self.lengths):
            rows = [set(self.seen(r)) for r in range(len(self.rows)) if self.rows[r][0] == b]
            for j in set(range(length)) - set().union(*rows):
                at = self.table[b, j // self.page_size], slice(None), j % self.page_size
                for blocks, dim in zip((self.keys.k_blocks, self.values.v_blocks), self.dims, strict=True):
                    blocks[at] = poisoned_head((1, dim), self.variant.kv_dtype) if self.has_codes else np.nan

    def run(self, ptx: dict[Any, str]) -> tuple[np.ndarray, np.ndarray]:
        v, options = self.variant, self.options
        memory = DeviceMemory()
        storage = [blocks.swapaxes(1, 2) for blocks in (self.keys.k_blocks, self.values.v_blocks)]
        views = [
            view
            for blocks, dim in zip(storage, self.dims, strict=True)
            for view in memory.views([(blocks, blocks.base)], self.table, dim)
        ]
        arrays = [self.positions, self.offsets, self.mask, self.mask_starts, self.firsts]
        given = [np.zeros(0) if a is None else np.array(a, np.int32) if isinstance(a, tuple) else a for a in arrays]
        row_masks = struct.pack(
            "<5Qq5i4x",
            *(memory.put(a) for a in given),
            *(8 * self.mask.size, self.dims[1], True, self.offsets is not None, True, self.firsts is not None),
        )
        assert 104 + len(row_masks) == MASKED_PARAMS
        o = np.zeros((*self.q.shape[:2], self.dims[1]), v.o_dtype)
        scale = self.dims[0] ** -0.5
        call = Call(self.q, o, self.row_batch, self.row_lengths, self.table, self.page_size, options, scale, row_masks)
        theta = options.get("rope_theta")
        rotary = (0.0, 1.0) if theta is None else (1 / (2 * math.pi), theta ** (-2 / self.dims[0]))
        attention = ptx[("masked", *(["codes"] if self.has_codes else []), *v.shared)]
        texts = ptx["schedule", "masked"], attention, ptx["combine", "masked", SHORT[v.o_dtype]]
        grid = (1, -(-self.group // v.heads))
        o, lse, self.items = attend(texts, memory, call, grid, (views, [struct.pack("<2d", *rotary)]))
        return o, lse

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        k_blocks, v_blocks = self.keys.k_blocks, self.values.v_blocks
        if self.has_codes:
            k_blocks, v_blocks = widened_pages(self.keys)[0], widened_pages(self.values)[1]
        return reference.masked_attention(
            self.q,
            k_blocks,
            v_blocks,
            self.table,
            self.row_batch,
            self.row_lengths,
            row_positions=self.positions,
            token_offsets=None if self.offsets is None else np.array(self.offsets, np.int32),
            mask=self.mask,
            mask_starts=self.mask_starts,
            mask_firsts=None if self.firsts is None else np.array(self.firsts, np.int32),
            layout="HND",
            **self.options,
        )

    def check(self, ptx: dict[Any, str]) -> None:
        self.hide()
        o, lse = self.run(ptx)
        expected, expected_lse = self.expected()
        assert_close(o, expected, rel=self.variant.rel, what=f"o of {self.variant}")
        assert_lse_close(lse, expected_lse, tol=1e-5, what=f"lse of {self.variant}")
        for r in range(len(self.rows)):
            assert np.isneginf(lse[r]).all() == (not self.seen(r))


ALL = {
    "window_left": 250,
    "logits_soft_cap": 20.0,
    "v_scale": -0.5,
    "alibi_slopes": np.linspace(-0.02, 0.02, 4),
    "sinks": np.linspace(-3, 2, 4),
}
EVEN = list(range(0, 400, 2))
PROBLEMS = {
    # One request is split; a row sees all, one every other token, one none; one stands behind its window.
    "splits": Problem(
        HALF, (290, 0, 20), 8, (64, 128), [(0, 290, 289, EVEN), (1, 0, 0, None), (2, 20, 19, []), (2, 20, 3, None)]
    ),
    "part of the group": Problem(HALF, (33,), 11, (128, 24), [(0, 33, 9, [0, 8, 31]), (-1, 33, 9, None)], page_size=5),
    "all options": Problem(
        FLOAT8, (300, 9), 4, (192, 136), [(0, 300, 310, [*range(100, 290)]), (1, 9, 280, None)], (7, 20), options=ALL
    ),
    "heads of one": Problem(
        SINGLE, (5, 40), 1, (8, 128), [(1, 40, 39, [30, 39]), (1, 36, 50, []), (0, 5, 2, [1])], firsts=(30, 20, 0)
    ),
    "int8": Problem(
        INT8, (290, 0, 20), 3, (64, 128), [(0, 290, 289, EVEN), (1, 0, 0, None), (2, 20, 19, []), (2, 20, 3, None)]
    ),
    "int4": Problem(
        INT4, (300, 9), 4, (192, 136), [(0, 300, 310, [*range(100, 290)]), (1, 9, 280, None)], (7, 20), options=ALL
    ),
    # Keys behind the query are rotated the other way; a row of more than there are tokens stands before the first.
    "rotary": Problem(
        ROTARY_HALF,
        (25,),
        5,
        (128, 64),
        [(0, 25, 40, [3, 24]), (0, 20, 70000, None)],
        (50,),
        options={"rope_theta": 500.0},
    ),
    "rotary in float32": Problem(
        ROTARY_SINGLE, (11, 3), 3, (136, 32), [(0, 11, 4, EVEN), (1, 3, -5, None)], options={"rope_theta": 1e4}
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_masked_attention(name, ptx):
    problem = PROBLEMS[name]
    problem.check(ptx)
    assert (problem.items[:, 3] >= 0).any() == (max(problem.lengths) > 2 * 128)


def test_bits_past_the_mask_are_not_seen(ptx):
    rows = [(0, 20, 19, None), (0, 20, 19, [*range(20)])]
    problem = Problem(SINGLE, (20,), 1, (8, 8), rows)
    problem.mask_starts[1] += 5  # so that its mask ends five tokens before the row does, in the last byte's padding
    problem.mask[-1] = 0xFF
    last = 8 * problem.mask.size - int(problem.mask_starts[1])
    assert 0 < last < 20
    o, lse = problem.run(ptx)
    shown = Problem(SINGLE, (20,), 1, (8, 8), [rows[0], (0, 20, 19, [*range(last)])])
    expected, expected_lse = shown.expected()
    assert_close(o, expected, rel=1e-5, what="o")
    assert_lse_close(lse, expected_lse, tol=1e-5, what="lse")
    problem.mask_starts[:] = (2**62, 8 * problem.mask.size)
    o, lse = problem.run(ptx)
    assert not o.any()
    assert np.isneginf(lse).all()


def test_what_is_not_in_the_table_is_nan(ptx):
    rows = [(0, 9, 8, None), (0, 9, 8, [1]), (0, 9, 8, [2]), (0, 49, 8, None), (2, 9, 8, None), (1, 9, 8, None)]
    problem = Problem(SINGLE, (9, 9), 1, (8, 8), rows, (0, -1), firsts=(-1, 0, -1, 0, 0, 0))
    problem.mask_starts[1] = -2
    o, lse = problem.run(ptx)
    assert np.isfinite(o[0]).all()  # it has no mask: where it would begin does not matter
    assert np.isnan(o[1:]).all()
    assert np.isnan(lse[1:]).all()


def test_a_page_that_no_row_sees_is_not_looked_at(ptx):
    rows = [(0, 40, 39, [0, 33]), (0, 40, 39, [0, 20])]
    problem = Problem(SINGLE, (40,), 1, (8, 8), rows)
    expected, expected_lse = problem.expected()
    problem.table[0, 1] = len(problem.keys.k_blocks)
    o, lse = problem.run(ptx)
    assert_close(o[:1], expected[:1], rel=1e-5, what="o of the row that does not see it")
    assert_lse_close(lse[:1], expected_lse[:1], tol=1e-5, what="lse of the row that does not see it")
    assert np.isnan(o[1]).all()
    assert np.isnan(lse[1]).all()
