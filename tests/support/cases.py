"""Grids and builders for the op tests: caches whose page tables are shuffled and whose unused memory is poisoned.

A built cache holds NaN wherever no token lives: in the unused slots of last pages, in pages no request owns and in the
layers not under test. Page table entries past a request's used pages hold `UNUSED_PAGE`. An op that looks at any of
these shows it in its result. The letters in shapes are those of `paged_kv.reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  (teaches NumPy the names bfloat16, float8_e4m3fn and float8_e5m2)
import numpy as np

UNUSED_PAGE = 0xFFFFFFFF
SPARE_PAGES = 3

PAGE_SIZES = (1, 5, 16, 64, 128)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
DTYPES = ("float32", "float16", "bfloat16")
STORAGES = ((4, "NHD"), (4, "HND"), (5, "NHD"), (5, "HND"), (6, "NHD"))  # (rank, layout)


def edge_lengths(page_size: int) -> tuple[int, ...]:
    """No token, one token, and the edges of the first and second page with their neighbours, ascending."""
    edges = (0, 1, page_size, 2 * page_size)
    return tuple(sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1)}))


def ragged_lengths(page_size: int) -> tuple[tuple[int, ...], ...]:
    """Batches that mix empty, short and long requests in every order, and an empty batch."""
    return (
        (),
        (0, 0, 0),
        (1, 0, 3 * page_size + 1, 0),
        (0, 5 * page_size, 1, page_size - 1),
        (2 * page_size + 1, 7, 13, 4 * page_size - 1, page_size),
    )


@dataclass(frozen=True)
class CacheCase:
    """A cache to build: `lengths[b]` tokens for request b, and how they are stored.

    `layers` counts only at rank 6, whose last layer is the one under test. `dtype` is NumPy's name or ml_dtypes'.
    """

    lengths: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    layout: str = "NHD"
    rank: int = 4
    layers: int = 3
    dtype: str = "float32"
    seed: int = 0

    @property
    def layer(self) -> int:
        """The layer under test: the one place where taking layer 0 by mistake shows."""
        return self.layers - 1 if self.rank == 6 else 0

    def __str__(self) -> str:
        """A test id: `L0.1.17-q4.kv2.d32-p16-NHD4-float32`."""
        lengths = ".".join(map(str, self.lengths)) or "none"
        heads = f"q{self.num_q_heads}.kv{self.num_kv_heads}.d{self.head_dim}"
        return f"L{lengths}-{heads}-p{self.page_size}-{self.layout}{self.rank}-{self.dtype}"


@dataclass(frozen=True)
class Cache:
    """A built case: what an op is called with, and the truth it was built from.

    `k_blocks` and `v_blocks` are arranged as `paged_kv.reference` says: two arrays at rank 4, one and the same above.
    """

    case: CacheCase
    q: np.ndarray  # [B, Hq, D], one decode row a request
    k_blocks: np.ndarray
    v_blocks: np.ndarray
    lookup_table: np.ndarray  # [B, max_pages] uint32
    keys: tuple[np.ndarray, ...]  # B times [L, Hk, D]: the tokens in order, kept apart from the pages
    values: tuple[np.ndarray, ...]

    @property
    def storage(self) -> dict[str, str | int]:
        """The keyword arguments that say how the blocks are to be read."""
        return {"layout": self.case.layout, "layer": self.case.layer}

    @property
    def pages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three arguments every op takes: k_blocks, v_blocks, lookup_table."""
        return self.k_blocks, self.v_blocks, self.lookup_table

    @property
    def lengths(self) -> np.ndarray:
        """`[B]` int32."""
        return np.array(self.case.lengths, np.int32)

    @property
    def decode_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """`row_batch` and `row_lengths`, `[B]` int32, of the decode step that `q` is for."""
        return np.arange(len(self.case.lengths), dtype=np.int32), self.lengths


def build(case: CacheCase) -> Cache:
    """Builds the case with standard normal q, K and V; the same case always gives the same bits."""
    rng = np.random.default_rng(case.seed)
    used_pages = [-(-length // case.page_size) for length in case.lengths]
    num_pages = sum(used_pages) + SPARE_PAGES
    k_blocks, v_blocks = _poisoned_blocks(case, num_pages)
    lookup_table = np.full((len(case.lengths), max(used_pages, default=0) + 1), UNUSED_PAGE, np.uint32)
    shuffled = iter(rng.permutation(num_pages))
    keys, values = [], []
    for b, length in enumerate(case.lengths):
        lookup_table[b, : used_pages[b]] = [next(shuffled) for _ in range(used_pages[b])]
        keys.append(normal(rng, (length, case.num_kv_heads, case.head_dim), case.dtype))
        values.append(normal(rng, (length, case.num_kv_heads, case.head_dim), case.dtype))
        for j in range(length):
            at = lookup_table[b, j // case.page_size], j % case.page_size
            k_blocks[token_index(case, 0, *at)] = keys[b][j]
            v_blocks[token_index(case, 1, *at)] = values[b][j]
    q = normal(rng, (len(case.lengths), case.num_q_heads, case.head_dim), case.dtype)
    return Cache(case, q, k_blocks, v_blocks, lookup_table, tuple(keys), tuple(values))


def csr(cache: Cache, dtype: str = "int32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The page table as CSR: indptr, indices and last_page_len."""
    size, lengths = cache.case.page_size, cache.lengths.astype(np.int64)
    counts = -(-lengths // size)
    indices = cache.lookup_table[np.arange(cache.lookup_table.shape[1]) < counts[:, None]]
    last = np.where(lengths > 0, (lengths - 1) % size + 1, 0)
    return np.concatenate([[0], np.cumsum(counts)]).astype(dtype), indices.astype(dtype), last.astype(dtype)


def permuted(cache: Cache, rng: np.random.Generator) -> Cache:
    """The same tokens in another permutation of the pool's pages: results must be equal to the bit."""
    new_page = rng.permutation(len(cache.k_blocks))
    k_blocks = np.empty_like(cache.k_blocks)
    k_blocks[new_page] = cache.k_blocks
    v_blocks = k_blocks
    if cache.v_blocks is not cache.k_blocks:
        v_blocks = np.empty_like(cache.v_blocks)
        v_blocks[new_page] = cache.v_blocks
    lookup_table = cache.lookup_table.copy()
    used = lookup_table != UNUSED_PAGE
    lookup_table[used] = new_page[lookup_table[used]]
    return replace(cache, k_blocks=k_blocks, v_blocks=v_blocks, lookup_table=lookup_table)


def emptied(cache: Cache) -> Cache:
    """The same page table over blocks that hold nothing but NaN: what an append starts from."""
    k_blocks, v_blocks = _poisoned_blocks(cache.case, len(cache.k_blocks))
    return replace(cache, k_blocks=k_blocks, v_blocks=v_blocks)


def causal_rows(cache: Cache, new_tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of a prefill whose new tokens are the last `new_tokens[b]` of each request.

    Returns q `[R, Hq, D]` in the case's dtype, and `row_batch` and `row_lengths`, `[R]` int32.
    """
    rows = [
        (b, length - new + i + 1)
        for b, (length, new) in enumerate(zip(cache.case.lengths, new_tokens, strict=True))
        for i in range(new)
    ]
    row_batch, row_lengths = np.array(rows, np.int32).reshape(-1, 2).T
    q_shape = (len(rows), cache.case.num_q_heads, cache.case.head_dim)
    return normal(np.random.default_rng(cache.case.seed + 1), q_shape, cache.case.dtype), row_batch, row_lengths


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normal values, rounded to `dtype`."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def token_index(case: CacheCase, side: int, page: int, slot: int) -> tuple[int | slice, ...]:
    """Return where one token's `[Hk, D]` lies in the blocks, written out per layout; `side` is 0 for K and 1 for V."""
    heads = slice(None)
    return {
        (4, "NHD"): (page, slot),
        (4, "HND"): (page, heads, slot),
        (5, "NHD"): (page, side, slot),
        (5, "HND"): (page, side, heads, slot),
        (6, "NHD"): (page, side, case.layer, slot),
    }[case.rank, case.layout]


def _poisoned_blocks(case: CacheCase, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V blocks of `num_pages` pages, all NaN."""
    rows, heads = case.page_size, case.num_kv_heads
    page = (rows, heads, case.head_dim) if case.layout == "NHD" else (heads, rows, case.head_dim)
    combined = {4: (), 5: (2,), 6: (2, case.layers)}[case.rank]
    k_blocks = np.full((num_pages, *combined, *page), np.nan, case.dtype)
    return k_blocks, k_blocks.copy() if case.rank == 4 else k_blocks
