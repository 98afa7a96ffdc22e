"""Copies of rows and pages, ragged rows and the merge of states, as PTX on a model of the hardware (ptx_machine.py).

Found here: a byte that is written where no row or page goes, or not written; a code or scale that is not the oracle's.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpu.model import programs
from gpu.model.generic_kernels import SHORT, THREADS, view_bytes
from gpu.model.ptx_machine import GLOBAL, Machine
from paged_kv import reference
from support.cases import Cache, CacheCase, build
from support.codes import quantised_cache, widened_pages
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.grids import tokens_of

pytestmark = pytest.mark.waits_for(programs.generic["sm_90a"])


ROWS = {"int8": "bfloat16", "int4": "float32"}
"""The variants of append and gather over codes that compile_gpu_kernels.mojo has."""


CACHES = [
    ("float16", 3, 8, "NHD", True),
    ("float16", 3, 7, "NHD", False),
    ("int8", 2, 136, "NHD", True),
    ("int8", 9, 24, "HND", False),
    ("int4", 9, 24, "HND", True),
    ("int4", 2, 136, "NHD", False),
]
"""What a cache holds, its heads and layout, and whether it is aligned: 16 bytes, or 4 codes, go at once where it is."""


def cache_of(kv_format: str, heads: int, dim: int, layout: str) -> Cache:
    case = CacheCase((17, 0, 5), heads, heads, dim, 4, rank=5, layout=layout, dtype=ROWS.get(kv_format, kv_format))
    return quantised_cache(case, kv_format) if kv_format in ROWS else build(case)


@dataclass
class Copies:
    """A kernel over a cache; where it is not aligned, cache and rows begin one byte, or element, later."""

    ptx: dict[Any, str]
    op: str
    cache: Cache
    blocks: np.ndarray
    is_aligned: bool

    def __post_init__(self) -> None:
        case = self.cache.case
        codes = ["codes", SHORT[case.dtype]] if self.blocks.dtype != case.dtype else []
        self.machine = Machine(self.ptx[(self.op, *codes, self.is_aligned)])
        self.at = self.put(self.blocks)
        table = self.cache.lookup_table
        table_at = self.machine.allocate(table)
        self.views = []
        for view in reference.cache_views(self.blocks, self.blocks, case.layout, 0):
            start = self.at + view.ctypes.data - self.blocks.ctypes.data
            shape, strides = (*view.shape[:3], case.head_dim), [stride // view.itemsize for stride in view.strides[:3]]
            self.views.append(view_bytes(start, shape, strides, table_at, table.shape))

    def put(self, array: np.ndarray) -> int:
        before = np.zeros(0 if self.is_aligned else array.itemsize, np.uint8)
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return self.machine.allocate(np.concatenate([before, raw])) + len(before)

    def found(self, address: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(bytes(self.machine.memory), like.dtype, like.size, address - GLOBAL).reshape(like.shape)

    def launch(self, rows: int, *pointers: int) -> None:
        self.machine.launch((rows, 2, 1), THREADS, [*self.views, *(struct.pack("<Q", pointer) for pointer in pointers)])


@pytest.mark.parametrize(("kv_format", "heads", "dim", "layout", "is_aligned"), CACHES)
def test_append(kv_format, heads, dim, layout, is_aligned, ptx):
    """As the oracle to the bit, heads of codes that are not finite, zero, tiny or huge among them; rows that have no
    token slot write nothing, and nothing else is written.
    """
    cache = cache_of(kv_format, heads, dim, layout)
    k, v, batch, positions = tokens_of(cache)
    if kv_format in ROWS:
        k[0, 0, dim - 1], k[1, 1, 0], k[2, 0, 7] = np.nan, np.inf, -np.inf
        k[3, 1], k[4, 1], k[5, 1], k[6, 1, 2], k[7, 1, 3] = 0, 1e-38, 1e-33, -3e38, 3e38
        v[:, :, ::2], v[:, 0, 1] = -np.abs(v[:, :, ::2]), 4.0  # ties of magnitude, where another is -4
        v[::2, 0, 2] = -4.0
    shape, dtype = cache.k_blocks.shape, cache.k_blocks.dtype
    before = np.random.default_rng(2).integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
    expected = before.copy()
    reference.append(k, v, batch, positions, expected, expected, cache.lookup_table, layout=layout, layer=0)
    past = cache.lookup_table.shape[1] * 4
    batch = np.concatenate([batch, [-1, 3, 0, 0]]).astype(np.int32)
    positions = np.concatenate([positions, [0, 0, -1, past]]).astype(np.int32)
    rows = [np.concatenate([tokens, np.ones((4, heads, dim), k.dtype)]) for tokens in (k, v)]
    copies = Copies(ptx, "append", cache, before, is_aligned)
    at = [copies.put(array) for array in rows] + [copies.machine.allocate(array) for array in (batch, positions)]
    copies.launch(len(batch), *at)
    assert_bits_equal(copies.found(copies.at, before), expected, what="the cache after append")


@pytest.mark.parametrize(("kv_format", "heads", "dim", "layout", "is_aligned"), CACHES)
def test_gather(kv_format, heads, dim, layout, is_aligned, ptx):
    """The rows of all tokens, and four that no request has, whose bits are all set."""
    cache = cache_of(kv_format, heads, dim, layout)
    copies = Copies(ptx, "gather", cache, cache.k_blocks, is_aligned)
    like = np.zeros((sum(cache.case.lengths) + 4, heads, dim), cache.case.dtype)
    indptr = np.concatenate([[0], np.cumsum(cache.lengths)]).astype(np.int32)
    at = [copies.put(like), copies.put(like)]
    copies.launch(len(like), *at, copies.machine.allocate(indptr))
    pages = widened_pages(cache) if kv_format in ROWS else cache.pages
    for address, rows in zip(at, reference.gather(*pages, cache.lengths, **cache.storage), strict=False):
        found = copies.found(address, like)
        assert_bits_equal(found[:-4], rows.astype(np.float32).astype(like.dtype), what="gathered rows")
        assert (found[-4:].view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("dims", [(8, 24), (8, 12)])
def test_append_of_two_widths(dims, ptx):
    """A latent cache: slots hold V and then K. Where one of the widths is not 16 bytes, elements go one by one."""
    table = np.array([[3, 1], [0, 2]], np.uint32)
    width = sum(dims)
    blocks = np.full((4, 4, width), np.nan, np.float16)
    rng = np.random.default_rng(8)
    k_rows, v_rows = (rng.standard_normal((3, dim)).astype(np.float16) for dim in dims)
    batch, positions = np.array([1, 0, 1], np.int32), np.array([6, 0, 7], np.int32)
    block = Machine(ptx["append", all(dim % 8 == 0 for dim in dims)])
    at, table_at = block.allocate(blocks), block.allocate(table)
    views = [
        view_bytes(start, (4, 4, 1, dim), [4 * width, width, width], table_at, table.shape)
        for start, dim in ((at + 2 * dims[1], dims[0]), (at, dims[1]))
    ]
    pointers = [struct.pack("<Q", block.allocate(array)) for array in (k_rows, v_rows, batch, positions)]
    block.launch((3, 2, 1), THREADS, [*views, *pointers])
    expected = blocks.copy()
    for row, (b, position) in enumerate(zip(batch, positions, strict=True)):
        expected[table[b, position // 4], position % 4] = np.concatenate([v_rows[row], k_rows[row]])
    found = block.array(at, np.float16, blocks.size).reshape(blocks.shape)
    assert_bits_equal(found, expected, what="the cache")


def test_ragged_rows(ptx):
    block = Machine(ptx["ragged_rows", False])
    batch, positions = (block.allocate(np.full(8, 77, np.int32)) for _ in range(2))
    offsets, lengths = (block.allocate(np.array(x, np.uint32)) for x in ([0, 2, 2, 5], [7, 1, 0]))
    numbers = [struct.pack("<Q", batch), struct.pack("<Q", positions), struct.pack("<i", 7)]
    numbers += [struct.pack("<Q", offsets), struct.pack("<Q", lengths), struct.pack("<i", 3)]
    block.launch((1, 1, 1), THREADS, numbers)
    assert block.array(batch, np.int32, 8).tolist() == [0, 0, 2, 2, 2, -1, -1, 77]
    assert block.array(positions, np.int32, 8).tolist() == [7, 8, 0, 1, 2, 0, 0, 77]


@pytest.mark.parametrize(("dim", "layout"), [(8, "NHD"), (8, "HND"), (7, "NHD")])
def test_copies_of_pages(dim, layout, ptx):
    """Each page goes to its target; pairs with a page outside the pool are skipped, nothing else is written."""
    cache = build(CacheCase((17, 20, 5), 3, 3, dim, 4, layout=layout, rank=5, dtype="float16"))
    block = Machine(ptx["copy_pages", dim == 8])
    at = block.allocate(cache.k_blocks)
    views = []
    for view in reference.cache_views(cache.k_blocks, cache.v_blocks, layout, 0):
        start = at + view.ctypes.data - cache.k_blocks.ctypes.data
        views.append(view_bytes(start, view.shape, [stride // 2 for stride in view.strides[:3]], 0, (0, 0)))
    pages = len(cache.k_blocks)
    order = np.random.default_rng(4).permutation(pages)
    sources = np.array([order[0], order[1], -1, pages, order[2], order[3]], np.int32)
    targets = np.array([order[4], order[5], order[6], order[6], -1, pages], np.int32)
    pointers = [struct.pack("<Q", block.allocate(array)) for array in (sources, targets)]
    block.launch((len(sources), 2, 2), THREADS, [*views, *pointers])
    expected = cache.k_blocks.copy()
    expected[order[4:6]] = expected[order[:2]]
    found = block.array(at, np.float16, expected.size).reshape(expected.shape)
    assert_bits_equal(found, expected, what="the pool")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_states(dtype, ptx):
    """Against float64; a state that has seen no key is ignored, whatever its output holds."""
    rng = np.random.default_rng(6)
    rows, count, heads, dim = 2, 5, 2, 136
    v = rng.standard_normal((rows, count, heads, dim), np.float32).astype(dtype)
    s = rng.uniform(-8, 8, (rows, count, heads)).astype(np.float32)
    s[0, 2] = s[1, :, 1] = -np.inf
    v[0, :, 1] = 3e38  # whose sum float32 has not
    v[0, 2] = np.nan
    s[1, 0, 0] = 300  # next to which the others weigh nothing
    block = Machine(ptx["merge", SHORT[dtype]])
    merged = np.full((rows, heads, dim), np.nan, dtype)
    pointers = [block.allocate(array) for array in (v, s, merged, np.full((rows, heads), np.nan, np.float32))]
    block.launch((rows * heads, 1, 1), THREADS, [struct.pack("<4Q3q", *pointers, count, heads, dim)])
    found = np.frombuffer(block.memory, v.dtype, merged.size, pointers[2] - GLOBAL).reshape(merged.shape)
    lse = block.array(pointers[3], np.float32, rows * heads).reshape(rows, heads)
    weights = np.exp2(s.astype(np.float64) - s.max(axis=1, keepdims=True, initial=-1e6))
    total = weights.sum(axis=1)
    seen = np.where(weights[..., None] == 0, 0, v.astype(np.float64))
    expected = (weights[..., None] * seen).sum(axis=1) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        expected_lse = s.max(axis=1, initial=-1e6) + np.log2(total)
    assert_close(found, expected, rel=1e-2 if dtype == "bfloat16" else 1e-5, what="merged v")
    assert_lse_close(lse, expected_lse, tol=1e-5, what="merged s")
    assert not found[1, 1].any()
    assert np.isneginf(lse[1, 1])
