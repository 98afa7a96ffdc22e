"""The functional cache: what it returns, that it leaves its input alone, and what it refuses."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.arrays.host import as_numpy
from paged_kv.cache import PagedKVCache, allocate_blocks, append_kv, gather_kv, init_paged_kv_cache
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, PoolExhausted, ShapeError
from paged_kv.pool import PagePool
from support.kinds import KINDS, bytes_of, kind_of, library, make
from support.properties import examples


def fields(cache: PagedKVCache) -> list[Any]:
    return [cache.key_pool, cache.value_pool, cache.block_table, cache.seq_lengths]


def poisoned(kind: str, dtype: str, blocks=8, size=4, heads=2, dim=8, batch=3, columns=4) -> PagedKVCache:
    """An empty cache of any kind whose pools hold NaN."""
    pool = np.full((blocks, size, heads, dim), np.nan, dtype)
    table, lengths = np.full((batch, columns), -1, np.int32), np.zeros(batch, np.int32)
    return PagedKVCache(*(make(kind, array) for array in (pool, pool, table, lengths)))


def rows(seed: int, count: int, cache: PagedKVCache, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    shape = (2, count, cache.num_kv_heads, cache.head_dim)
    return tuple(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "kind", "element"),
    [
        ("bfloat16", "numpy", ml_dtypes.bfloat16),
        (np.float32, "numpy", np.float32),
        (ml_dtypes.float8_e4m3fn, "numpy", ml_dtypes.float8_e4m3fn),
        (torch.float16, "torch", np.float16),
        (torch.bfloat16, "torch", ml_dtypes.bfloat16),
        (jnp.bfloat16, "jax", ml_dtypes.bfloat16),
    ],
)
def test_an_empty_cache(dtype, kind, element):
    sizes = {"num_blocks": 6, "block_size": 5, "num_kv_heads": 3, "head_dim": 7}
    cache = init_paged_kv_cache(**sizes, batch_size=2, max_blocks_per_seq=4, dtype=dtype)
    assert {name: getattr(cache, name) for name in sizes} == sizes
    assert [kind_of(array) for array in fields(cache)] == [kind] * 4
    keys, values, table, lengths = (as_numpy(array, "x") for array in fields(cache))
    for pool in (keys, values):
        assert pool.shape == (6, 5, 3, 7)
        assert pool.dtype == element
        assert not pool.astype(np.float32).any()
    assert keys.ctypes.data != values.ctypes.data
    assert (table.dtype, lengths.dtype) == (np.int32, np.int32)
    assert table.tolist() == [[-1] * 4] * 2
    assert lengths.tolist() == [0, 0]
    with pytest.raises(FrozenInstanceError):
        cache.seq_lengths = lengths


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("kind", [*KINDS, "gpu"])
def test_append_then_gather(kind, dtype):
    empty = poisoned(kind, dtype)
    before = bytes_of(fields(empty))
    allocated, consumed = allocate_blocks(
        empty, sequence_idx=1, num_new_tokens=6, free_block_ids=make(kind, np.array([5, 2, 7], np.int32))
    )
    assert consumed == 2
    assert as_numpy(allocated.block_table, "t").tolist() == [[-1] * 4, [5, 2, -1, -1], [-1] * 4]
    assert as_numpy(allocated.seq_lengths, "l").tolist() == [0, 0, 0]
    keys, values = rows(0, 6, empty, dtype)
    appended = append_kv(allocated, 1, make(kind, keys), make(kind, values))
    assert as_numpy(appended.seq_lengths, "l").tolist() == [0, 6, 0]
    pool = as_numpy(appended.key_pool, "k")
    assert pool[5].tobytes() == keys[:4].tobytes()
    assert pool[2, :2].tobytes() == keys[4:].tobytes()
    unused = pool.astype(np.float32)
    assert np.isnan(unused[[0, 1, 3, 4, 6, 7]]).all()
    assert np.isnan(unused[2, 2:]).all()
    k, v, length = gather_kv(appended, 1)
    assert length == 6
    assert type(length) is int
    assert bytes_of([k, v]) == bytes_of([keys, values])
    assert [kind_of(array) for array in [*fields(appended), k, v]] == [library(kind)] * 6
    assert as_numpy(k, "k").dtype == np.dtype(dtype)
    none, nothing, zero = gather_kv(appended, 0)
    assert (as_numpy(none, "k").shape, as_numpy(nothing, "v").shape, zero) == ((0, 2, 8), (0, 2, 8), 0)
    assert as_numpy(none, "k").dtype == np.dtype(dtype)
    assert bytes_of(fields(empty)) == before


@settings(max_examples=examples(150), derandomize=True, deadline=None)
@given(
    st.sampled_from(["numpy", "torch", "max"]),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "float64"]),
    st.integers(1, 7),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=8),
)
def test_any_sequence_of_appends_is_gathered_in_order(kind, dtype, size, dim, steps):
    cache = poisoned(kind, dtype, blocks=80, size=size, dim=dim, columns=80)
    pool, truth = PagePool(80, size), {b: ([], []) for b in range(3)}
    for b in truth:
        pool.start(b)
    for step, (b, count) in enumerate(steps):
        new = pool.reserve(b, count)
        spare = [*new, 99]  # an id past those that are consumed is not looked at
        previous, before = cache, bytes_of(fields(cache))
        cache, consumed = allocate_blocks(
            cache, sequence_idx=b, num_new_tokens=count, free_block_ids=make(kind, np.array(spare, np.int64))
        )
        assert consumed == len(new)
        keys, values = rows(step, count, cache, dtype)
        cache = append_kv(cache, b, make(kind, keys), make(kind, values))
        assert bytes_of(fields(previous)) == before
        truth[b][0].extend(keys)
        truth[b][1].extend(values)
    for b, (keys, values) in truth.items():
        k, v, length = gather_kv(cache, b)
        assert length == len(keys)
        assert as_numpy(k, "k").shape == (length, 2, dim)
        assert bytes_of([k, v]) == [b"".join(row.tobytes() for row in side) for side in (keys, values)]


def test_floats_are_converted_to_the_pools_dtype():
    cache, _ = allocate_blocks(
        poisoned("torch", "bfloat16"), sequence_idx=0, num_new_tokens=1, free_block_ids=torch.tensor([3])
    )
    keys = torch.full((1, 2, 8), 1 + 2**-10)
    k, _, _ = gather_kv(append_kv(cache, 0, keys, keys), 0)
    assert torch.equal(k, keys.bfloat16())


def filled() -> PagedKVCache:
    """Sequence 0 holds 5 tokens, in blocks 6 and 1; sequence 1 has block 2 and no tokens."""
    cache = poisoned("numpy", "float32")
    cache.block_table[0, :2], cache.block_table[1, 0], cache.seq_lengths[0] = (6, 1), 2, 5
    return cache


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


TOKENS = np.ones((3, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"free_block_ids": ids(3)}, PoolExhausted, r"free_block_ids has 1 entries but 2 are needed \(sequence 0\)"),
        ({"free_block_ids": ids(3, 8)}, PageTableError, r"free_block_ids\[1\] is 8, outside the pool's \[0, 8\)"),
        ({"free_block_ids": ids(-1, 3)}, PageTableError, r"free_block_ids\[0\] is -1"),
        ({"free_block_ids": ids(3, 3)}, PageTableError, r"free_block_ids names a block twice in \[3, 3\]"),
        ({"free_block_ids": ids(3, 2)}, PageTableError, r"block 2 would .* sequence 0, but block_table\[1, 0\] .* 1$"),
        ({"free_block_ids": ids(1, 3)}, PageTableError, r"block 1 would .* sequence 0, but block_table\[0, 1\] .* 0$"),
        ({"num_new_tokens": 10**5000}, ContractError, "num_new_tokens: expected at most 2147483647, got"),
        ({"free_block_ids": ids(3, 4)[None]}, ShapeError, "free_block_ids: expected 1 dimensions"),
        ({"free_block_ids": [3, 4]}, ContractTypeError, "free_block_ids: expected an array"),
        ({"num_new_tokens": 12, "free_block_ids": ids(3, 4, 5)}, PageTableError, "num_new_tokens: sequence 0 .* 5 bl"),
        ({"num_new_tokens": -1}, ContractError, "num_new_tokens: expected at least 0, got -1"),
        ({"num_new_tokens": 1.5}, ContractTypeError, "num_new_tokens: expected an integer"),
        ({"sequence_idx": 3}, ContractError, "sequence_idx is 3, the cache has 3 sequences"),
        ({"sequence_idx": -1}, ContractError, "sequence_idx: expected at least 0, got -1"),
        ({"sequence_idx": 10**5000}, ContractError, "sequence_idx: expected at most"),
    ],
)
def test_allocations_that_are_refused(change, error, said):
    cache = filled()
    before = bytes_of(fields(cache))
    with pytest.raises(error, match=said) as caught:
        allocate_blocks(cache, **{"sequence_idx": 0, "num_new_tokens": 8, "free_block_ids": ids(3, 4), **change})
    assert isinstance(caught.value, TypeError if error is ContractTypeError else ValueError)
    assert bytes_of(fields(cache)) == before


@pytest.mark.parametrize(
    ("sequence", "keys", "values", "error", "said"),
    [
        (0, TOKENS, TOKENS[:2], ShapeError, r"keys_new shape \(3, 2, 8\) != values_new shape \(2, 2, 8\)"),
        (0, TOKENS[:, :1], TOKENS[:, :1], ShapeError, r"keys_new: expected \[T, 2, 8\], got shape \(3, 1, 8\)"),
        (0, TOKENS[0], TOKENS[0], ShapeError, r"keys_new: expected \[T, 2, 8\]"),
        (0, np.ones((4, 2, 8), "f4"), np.ones((4, 2, 8), "f4"), PageTableError, r"block_table\[0, 2\] is unallocated"),
        (2, TOKENS, TOKENS, PageTableError, r"block_table\[2, 0\] is unallocated .* allocate_blocks before append_kv"),
        (0, np.ones((20, 2, 8), "f4"), np.ones((20, 2, 8), "f4"), PageTableError, "sequence 0 needs 7 blocks, .* 4"),
        (0, TOKENS.astype(int), TOKENS.astype(int), ContractTypeError, "keys_new: dtype int64 .* float32"),
        (0, TOKENS, TOKENS.astype(int), ContractTypeError, "values_new: dtype int64 .* float32"),
        (0, [1], TOKENS, ContractTypeError, "keys_new: expected an array"),
        (3, TOKENS, TOKENS, ContractError, "sequence_idx is 3"),
    ],
)
def test_appends_that_are_refused(sequence, keys, values, error, said):
    cache = filled()
    before = bytes_of(fields(cache))
    with pytest.raises(error, match=said) as caught:
        append_kv(cache, sequence, keys, values)
    assert isinstance(caught.value, TypeError if error is ContractTypeError else ValueError)
    assert bytes_of(fields(cache)) == before


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"block_table": ids(6, 8)[None]}, PageTableError, r"block_table\[0, 1\] is 8, outside the pool's \[0, 8\)"),
        ({"block_table": ids(6, -1)[None]}, PageTableError, r"block_table\[0, 1\] is unallocated"),
        ({"block_table": ids(6)[None]}, PageTableError, "block_table: sequence 0 needs 2 blocks, its row has 1"),
        ({"block_table": ids(6, 1)}, ShapeError, "block_table: expected 2 dimensions"),
        ({"seq_lengths": ids(-5)}, PageTableError, "seq_lengths: sequence 0 has length -5"),
        ({"seq_lengths": ids(5, 0)}, ShapeError, "seq_lengths has 2 entries, block_table has 1 rows"),
        (
            {"value_pool": np.zeros((8, 4, 2, 4), "f4")},
            ShapeError,
            r"value_pool: expected key_pool's shape .*, got .*4\]",
        ),
        (
            {"value_pool": np.zeros((8, 4, 2, 8), "f2")},
            ContractTypeError,
            "value_pool: expected key_pool's dtype float32, got float16",
        ),
        ({"key_pool": None}, ContractTypeError, "key_pool: expected an array"),
        ({"key_pool": 3}, ContractTypeError, "key_pool: expected an array"),
        ({name: np.zeros((8, 0, 2, 8), "f4") for name in ("key_pool", "value_pool")}, ShapeError, "must hold tokens"),
        (None, ContractTypeError, "cache: expected a PagedKVCache, got None"),
    ],
)
def test_caches_that_contradict_themselves_are_refused(change, error, said):
    cache = None
    if change is not None:
        cache = replace(filled(), **{"block_table": ids(6, 1)[None], "seq_lengths": ids(5), **change})
    with pytest.raises(error, match=said):
        gather_kv(cache, 0)
    with pytest.raises(error):
        append_kv(cache, 0, TOKENS, TOKENS)
    if change is None or "key_pool" in change:
        with pytest.raises(error, match=said):
            allocate_blocks(cache, sequence_idx=0, num_new_tokens=1, free_block_ids=ids(3))


@pytest.mark.parametrize(
    ("row", "length", "said"),
    [
        (
            [6, 2],
            5,
            r"block_table: block 2 would be written for sequence 0, but block_table\[1, 0\] gives it to sequence 1",
        ),
        ([6, 2], 3, r"block_table: block 2 would be written for sequence 0, but block_table\[1, 0\]"),
        (
            [2, 2],
            4,
            r"block_table: block 2 would be written for sequence 0, but block_table\[0, 0\] gives it to seq.* 0",
        ),
        ([6, 6], 3, r"block_table: sequence 0 has block 6 twice"),
    ],
)
def test_a_block_of_another_place_in_the_table_is_not_written(row, length, said):
    cache = filled()
    cache.block_table[0, :2], cache.seq_lengths[0] = row, length
    before = bytes_of(fields(cache))
    with pytest.raises(PageTableError, match=said):
        append_kv(cache, 0, TOKENS[:2], TOKENS[:2])
    assert bytes_of(fields(cache)) == before
    append_kv(cache, 0, TOKENS[:0], TOKENS[:0])  # writes nothing


def test_shared_blocks_may_be_read_and_followed_by_own_ones():
    cache = filled()
    cache.block_table[1, :2], cache.seq_lengths[1] = (6, 3), 4  # the first block of sequence 0, then one of its own
    appended = append_kv(cache, 1, TOKENS, TOKENS)
    assert gather_kv(appended, 0)[0].tobytes() == gather_kv(cache, 0)[0].tobytes()
    assert gather_kv(appended, 1)[0][4:].tobytes() == TOKENS.tobytes()
    with pytest.raises(PageTableError, match="block 6 would be written for sequence 0"):
        append_kv(replace(cache, seq_lengths=ids(3, 4, 0)), 0, TOKENS, TOKENS)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"block_size": 0}, ContractError, "block_size: expected at least 1, got 0"),
        ({"num_blocks": -1}, ContractError, "num_blocks: expected at least 0, got -1"),
        ({"head_dim": 8.0}, ContractTypeError, "head_dim: expected an integer"),
        ({"dtype": None}, ContractTypeError, "dtype: None is none of"),
        ({"num_blocks": 2**31}, ContractError, "num_blocks: expected at most 2147483647, got 2147483648"),
        ({"head_dim": 10**5000}, ContractError, "head_dim: expected at most 2147483647, got .an integer of 16610 bits"),
        (
            {"num_blocks": 2**31 - 1, "block_size": 2**31 - 1},
            ContractError,
            "key_pool: shape .* does not fit in memory",
        ),
        ({"batch_size": 2**20, "max_blocks_per_seq": 2**20}, ContractError, "a table of over 2.28 entries"),
        ({"batch_size": 2**30, "max_blocks_per_seq": 0}, ContractError, "a table of over 2.28 entries"),
    ],
)
def test_sizes_that_are_refused(change, error, said):
    sizes = {"num_blocks": 2, "block_size": 4, "num_kv_heads": 1, "head_dim": 8, "batch_size": 1}
    with pytest.raises(error, match=said):
        init_paged_kv_cache(**{**sizes, "max_blocks_per_seq": 2, "dtype": "float32", **change})
