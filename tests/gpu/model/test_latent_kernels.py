"""Latent attention (MLA) on any GPU, as PTX on a model of the hardware (ptx_machine.py), compared with float64.

Found here: a wrong offset or stride of either part of a slot, a scale that goes to the wrong part, heads of one kernel
that mix. Unused slots and pages are NaN, the page table is shuffled.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gpu.model import programs
from gpu.model.generic_kernels import SHORT, Call, DeviceMemory, attend
from paged_kv.reference import mla_attention
from support.cases import CacheCase, build
from support.compare import assert_bits_equal, assert_close, assert_lse_close

pytestmark = pytest.mark.waits_for(programs.generic["sm_90a"])


@dataclass
class Problem:
    """Rows of one call, `new` of each request, causal among themselves."""

    dtypes: tuple[str, str, str]
    """The dtypes of q, the cache and o."""
    lengths: tuple[int, ...]
    heads: int
    dims: tuple[int, int]
    """Dckv and Dkpe."""
    rel: float
    new: int = 1
    page_size: int = 16
    one_array: bool = False
    """True if a slot holds both parts, in the second of two layers."""
    scales: tuple[float, float, float] = (0.1, 1.0, 1.0)
    """sm_scale, ckv_scale and kpe_scale."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        q_dtype, kv_dtype, _ = self.dtypes
        parts = [
            build(CacheCase(self.lengths, self.heads, 1, dim, self.page_size, rank=4, dtype=kv_dtype, seed=7))
            for dim in self.dims
        ]
        self.table = parts[0].lookup_table
        np.testing.assert_array_equal(self.table, parts[1].lookup_table)
        self.ckv, self.kpe = (part.k_blocks[:, :, 0] for part in parts)
        rows = [(b, length - self.new + 1 + i) for b, length in enumerate(self.lengths) for i in range(self.new)]
        self.row_batch, self.row_lengths = np.array([row for row in rows if row[1] >= 0], np.int32).T.copy()
        rng = np.random.default_rng(2)
        shape = len(self.row_batch), self.heads
        self.q_nope, self.q_pe = (rng.standard_normal((*shape, dim), np.float32).astype(q_dtype) for dim in self.dims)

    def run(self, ptx: dict[Any, str]) -> tuple[np.ndarray, np.ndarray]:
        q_dtype, _, o_dtype = self.dtypes
        memory = DeviceMemory()
        storage = [(self.ckv[:, :, None], self.ckv), (self.kpe[:, :, None], self.kpe)]
        if self.one_array:
            slots = np.concatenate([self.ckv, self.kpe], axis=-1)
            blocks = np.stack([np.full_like(slots, np.nan), slots], axis=1)  # [pages, layers, page_size, Dckv + Dkpe]
            layer = blocks[:, 1, :, None]
            storage = [(part, blocks) for part in (layer[..., : self.dims[0]], layer[..., self.dims[0] :])]
        sm_scale, ckv_scale, kpe_scale = self.scales
        rotary = struct.pack("<Qif", memory.put(self.q_pe), self.dims[1], ckv_scale / kpe_scale)
        call = Call(
            self.q_nope,
            np.zeros(self.q_nope.shape, o_dtype),
            self.row_batch,
            self.row_lengths,
            self.table,
            self.page_size,
            {**self.options, "v_scale": ckv_scale},
            sm_scale * kpe_scale,
        )
        heads, shared = (4, 32768) if self.dims[1] <= 128 else (2, 16384)
        texts = ptx["schedule", "plain"], ptx["latent", SHORT[q_dtype], shared], ptx["combine", "plain", SHORT[o_dtype]]
        views = memory.views(storage, self.table)
        o, lse, self.items = attend(texts, memory, call, (-(-self.heads // heads), 1), ([rotary, *views], []))
        return o, lse

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        sm_scale, ckv_scale, kpe_scale = self.scales
        rows = self.row_batch, self.row_lengths
        arrays = self.q_nope, self.q_pe, self.ckv, self.kpe, self.table
        return mla_attention(
            *arrays, *rows, sm_scale=sm_scale, ckv_scale=ckv_scale, kpe_scale=kpe_scale, **self.options
        )


BF16, FLOAT8, F32 = ("bfloat16",) * 3, ("float16", "float8_e4m3fn", "float16"), ("float32",) * 3
PROBLEMS = {
    "split": Problem(BF16, (270, 0, 9), 4, (512, 64), 1e-2, options={"sinks": np.linspace(-2, 3, 4)}),
    "float8": Problem(FLOAT8, (40, 3), 4, (128, 64), 2e-3, new=3, one_array=True, scales=(0.1, 0.5, 2.0)),
    "float32": Problem(F32, (9, 17), 5, (264, 128), 1e-5, page_size=5, scales=(0.05, 3.0, 0.25)),
    "wide rotary part": Problem(("bfloat16", "bfloat16", "float32"), (20,), 3, (16, 512), 1e-5, page_size=1),
    "wide rotary part in float32": Problem(F32, (8, 4), 1, (512, 136), 1e-5, new=2, one_array=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_latent_attention(name, ptx):
    problem = PROBLEMS[name]
    o, lse = problem.run(ptx)
    expected, expected_lse = problem.expected()
    assert_close(o, expected, rel=problem.rel, what=f"o of {name}")
    assert_lse_close(lse, expected_lse, tol=1e-5, what=f"lse of {name}")
    assert (problem.items[:, 3] >= 0).any() == (max(problem.lengths) > 2 * 128)


def test_what_is_not_in_the_table_or_the_pool_is_nan(ptx):
    problem = Problem(F32, (9, 17, 12, 12, 12, 12), 1, (16, 8), 1e-5)
    good, good_lse = problem.run(ptx)
    problem.table[1, 1] = len(problem.ckv)
    problem.row_batch[3:] = (-1, 6, 0)
    problem.row_lengths[5] = 16 * problem.table.shape[1] + 1
    o, lse = problem.run(ptx)
    assert_bits_equal(o[[0, 2]], good[[0, 2]], what="o of the other rows")
    assert_bits_equal(lse[[0, 2]], good_lse[[0, 2]], what="lse of the other rows")
    assert not o[3].any()
    assert np.isneginf(lse[3]).all()
    assert np.isnan(o[[1, 4, 5]]).all()
    assert np.isnan(lse[[1, 4, 5]]).all()
