"""The functional paged cache: a frozen value, and functions that return a new one.

Letters in shapes: B sequences, T tokens. Pools, tables and lengths may be arrays of any kind (`paged_kv.arrays`), and
each result has the kind of what it stands for. Pools and new tokens may lie on a GPU (torch and MAX arrays); the table
and the lengths are books, which every function reads, so they lie on the host. The input cache is never changed. That
costs `append_kv` a copy of both pools, where an array library with a compiler may write in place: to decode at speed,
use `paged_kv.page`, which writes into the caller's pages. Names and meaning are those of the JAX caches with this
interface; what they refuse is a ValueError here too, and so are the tables that they would follow to a wrong block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from paged_kv.arguments import integer
from paged_kv.arrays import devices as places
from paged_kv.arrays import gpu
from paged_kv.arrays.host import as_indices, as_numpy, check_storage, dtype_of, kind_of_dtype, like, sample_array
from paged_kv.calls.kv_copy import read_rows, read_rows_on, write_rows, write_rows_on
from paged_kv.calls.page_table import Indices, PageTable
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, PoolExhausted, ShapeError


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Storage of K and V, and which sequence owns which blocks of it."""

    key_pool: Any
    """`[num_blocks, block_size, num_kv_heads, head_dim]`"""
    value_pool: Any
    """The same shape and dtype."""
    block_table: Any
    """`[B, max_blocks_per_seq]` int32: logical block to physical block, -1 where there is none."""
    seq_lengths: Any
    """`[B]` int32: the tokens each sequence holds."""

    @property
    def num_blocks(self) -> int:
        return int(self.key_pool.shape[0])

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return int(self.key_pool.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.key_pool.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.key_pool.shape[3])


def init_paged_kv_cache(
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    batch_size: int,
    max_blocks_per_seq: int,
    dtype: Any,
    device: Any = None,
) -> PagedKVCache:
    """An empty cache: pools of zeros, a table of -1, lengths of 0.

    `dtype` is a name, or a dtype of NumPy, torch, JAX or MAX: a torch dtype makes torch arrays, `jax.numpy.float32` and
    the like JAX arrays, all others NumPy arrays. `device` is None, the CPU, or a GPU as torch names it ("cuda:1"): the
    pools are then torch tensors there, the table and the lengths torch tensors on the host.

    Raises:
        ContractError, ContractTypeError: a size is no integer or too small, or the dtype or the device is unknown.
        ToolchainError: MAX does not see that GPU, or torch is missing.
    """
    shape = (
        integer("num_blocks", num_blocks, 0),
        integer("block_size", block_size, 1),
        integer("num_kv_heads", num_kv_heads, 1),
        integer("head_dim", head_dim, 1),
    )
    batch, max_blocks = integer("batch_size", batch_size, 0), integer("max_blocks_per_seq", max_blocks_per_seq, 0)
    place = None if device is None else places.place_named(device)
    element, sample = dtype_of(dtype, "dtype"), sample_array(kind_of_dtype(dtype) if place is None else "torch")
    pools = [like(sample, np.zeros(shape, element)) if place is None else place.zeros(shape, element) for _ in range(2)]
    return PagedKVCache(
        pools[0],
        pools[1],
        like(sample, np.full((batch, max_blocks), -1, np.int32)),
        like(sample, np.zeros(batch, np.int32)),
    )


def allocate_blocks(
    cache: PagedKVCache, *, sequence_idx: int, num_new_tokens: int, free_block_ids: Any
) -> tuple[PagedKVCache, int]:
    """Gives a sequence the blocks that `num_new_tokens` more tokens need, the first ones of `free_block_ids` `[F]`.

    They follow the blocks that the tokens fill: a second call before the append replaces what the first one gave.

    Returns:
        The new cache, which shares its pools with `cache`, and how many ids were consumed.

    Raises:
        PoolExhausted: `free_block_ids` is shorter than the number of blocks needed.
        PageTableError: a consumed id is outside the pool or consumed twice, or the table's row is too short.
        ContractError, ContractTypeError, ShapeError: an argument of a wrong value, type or rank.
    """
    table, lengths, sequence = _books(cache, sequence_idx)
    added = integer("num_new_tokens", num_new_tokens, 0)
    free = as_indices(free_block_ids, "free_block_ids")
    first = -(-int(lengths[sequence]) // cache.block_size)
    count = -(-(int(lengths[sequence]) + added) // cache.block_size) - first
    if count > len(free):
        raise PoolExhausted(f"free_block_ids has {len(free)} entries but {count} are needed (sequence {sequence})")
    if first + count > table.shape[1]:
        raise PageTableError(
            f"num_new_tokens: sequence {sequence} would need {first + count} blocks,"
            f" block_table has {table.shape[1]} columns"
        )
    taken = free[:count]
    for i, block in enumerate(taken.tolist()):
        if not 0 <= block < cache.num_blocks:
            raise PageTableError(f"free_block_ids[{i}] is {block}, outside the pool's [0, {cache.num_blocks})")
    if len(set(taken.tolist())) != count:
        raise PageTableError(f"free_block_ids names a block twice in {taken.tolist()} (sequence {sequence})")
    grown = as_numpy(cache.block_table, "block_table").copy()
    grown[sequence, first : first + count] = taken
    return replace(cache, block_table=like(cache.block_table, grown)), count


def append_kv(cache: PagedKVCache, sequence_idx: int, keys_new: Any, values_new: Any) -> PagedKVCache:
    """Appends tokens to one sequence, whose blocks were allocated before.

    `keys_new` and `values_new` are `[T, num_kv_heads, head_dim]`; floats are converted to the pool's dtype.

    Returns:
        A new cache with copies of both pools, and T more tokens in the sequence.

    Raises:
        ShapeError: shapes disagree with each other or with the pools.
        PageTableError: a block that is needed is unallocated, outside the pool or there twice.
        ContractError, ContractTypeError: an argument of a wrong value, type or dtype.
    """
    table, lengths, sequence = _books(cache, sequence_idx)
    place = places.place_of(
        key_pool=cache.key_pool, value_pool=cache.value_pool, keys_new=keys_new, values_new=values_new
    )
    pools = _pools(cache, place)
    read = as_numpy if place is None else gpu.to_tensor
    keys, values = read(keys_new, "keys_new"), read(values_new, "values_new")
    if keys.shape != values.shape:
        raise ShapeError(f"keys_new shape {tuple(keys.shape)} != values_new shape {tuple(values.shape)}")
    if keys.ndim != 3 or keys.shape[1:] != pools[0].shape[2:]:
        shape = tuple(keys.shape)
        raise ShapeError(f"keys_new must be [T, {cache.num_kv_heads}, {cache.head_dim}], its shape is {shape}")
    rows = [_converted(a, pools[0], n) for a, n in ((keys, "keys_new"), (values, "values_new"))]
    start, count, size = int(lengths[sequence]), len(keys), cache.block_size
    blocks = _blocks(table[sequence], sequence, start // size, start + count, cache)
    books = PageTable(np.array([0, len(blocks)], np.int32), blocks, np.array([size], np.int32), size)
    pages, slots = books.slots(np.zeros(count, np.int32), np.arange(start, start + count, dtype=np.int32))
    if place is None:
        copies = [pool.copy() for pool in pools]
        write_rows(rows[0], rows[1], copies[0], copies[1], pages, slots)
        grown = [like(pool, copy) for pool, copy in zip((cache.key_pool, cache.value_pool), copies, strict=True)]
    else:
        copies = [pool.clone(memory_format=import_module("torch").contiguous_format) for pool in pools]
        write_rows_on(place, rows[0], rows[1], copies[0], copies[1], pages, slots)
        grown = [
            gpu.like_of(place, pool, copy)
            for pool, copy in zip((cache.key_pool, cache.value_pool), copies, strict=True)
        ]
    longer = as_numpy(cache.seq_lengths, "seq_lengths").copy()
    longer[sequence] += count
    return PagedKVCache(grown[0], grown[1], cache.block_table, like(cache.seq_lengths, longer))


def gather_kv(cache: PagedKVCache, sequence_idx: int) -> tuple[Any, Any, int]:
    """One sequence's tokens, made contiguous.

    Returns:
        `(keys, values, seq_len)`: `[seq_len, num_kv_heads, head_dim]` twice, of the pools' kind and dtype.

    Raises:
        PageTableError: a block that the length covers is unallocated or outside the pool.
        ContractError, ContractTypeError, ShapeError: an argument of a wrong value, type or rank.
    """
    table, lengths, sequence = _books(cache, sequence_idx)
    place = places.place_of(key_pool=cache.key_pool, value_pool=cache.value_pool)
    pools, length = _pools(cache, place), int(lengths[sequence])
    blocks = _blocks(table[sequence], sequence, 0, length, cache)
    wanted = (blocks.view(np.uint32)[None], lengths[sequence : sequence + 1])
    if place is None:
        keys, values = read_rows(*pools, *wanted)
        return like(cache.key_pool, keys), like(cache.value_pool, values), length
    keys, values = read_rows_on(place, *pools, *wanted)
    return gpu.like_of(place, cache.key_pool, keys), gpu.like_of(place, cache.value_pool, values), length


def _books(cache: PagedKVCache, sequence_idx: int) -> tuple[Indices, Indices, int]:
    """The table, the lengths and the sequence, checked against each other."""
    for name, array in (("block_table", cache.block_table), ("seq_lengths", cache.seq_lengths)):
        if places.device_index(array) is not None:
            raise ContractTypeError(f"{name} is on a GPU: it is read by every call ({name}.cpu())")
    table, lengths = as_indices(cache.block_table, "block_table", 2), as_indices(cache.seq_lengths, "seq_lengths")
    if len(lengths) != len(table):
        raise ShapeError(f"seq_lengths has {len(lengths)} entries, block_table has {len(table)} rows")
    sequence = integer("sequence_idx", sequence_idx, 0)
    if sequence >= len(table):
        raise ContractError(f"sequence_idx is {sequence}, the cache has {len(table)} sequences")
    if lengths[sequence] < 0:
        raise PageTableError(f"seq_lengths: sequence {sequence} has length {lengths[sequence]}")
    return table, lengths, sequence


def _pools(cache: PagedKVCache, place: places.Place | None) -> tuple[Any, Any]:
    """Both pools, on a GPU as tensors, which must be of one shape and dtype."""
    if place is None:
        keys, values = as_numpy(cache.key_pool, "key_pool"), as_numpy(cache.value_pool, "value_pool")
        check_storage(keys, "key_pool", 4, writable=False)
        check_storage(values, "value_pool", 4, writable=False)
    else:
        keys, values = gpu.to_tensor(cache.key_pool, "key_pool"), gpu.to_tensor(cache.value_pool, "value_pool")
        gpu.check_storage(keys, "key_pool", 4)
        gpu.check_storage(values, "value_pool", 4)
    if values.shape != keys.shape:
        raise ShapeError(f"value_pool: shape {tuple(values.shape)} differs from key_pool's {tuple(keys.shape)}")
    if values.dtype != keys.dtype:
        raise ContractTypeError(f"value_pool: dtype {values.dtype} differs from key_pool's {keys.dtype}")
    return keys, values


def _blocks(row: Indices, sequence: int, first: int, num_tokens: int, cache: PagedKVCache) -> Indices:
    """The blocks of a sequence's first `num_tokens` tokens; those from logical block `first` on are checked."""
    needed = -(-num_tokens // cache.block_size)
    if needed > len(row):
        raise PageTableError(f"block_table: sequence {sequence} needs {needed} blocks, its row has {len(row)}")
    for logical in range(first, needed):
        block = int(row[logical])
        if block < 0:
            raise PageTableError(
                f"block_table[{sequence}, {logical}] is unallocated ({block}); call allocate_blocks before append_kv"
            )
        if block >= cache.num_blocks:
            raise PageTableError(
                f"block_table[{sequence}, {logical}] is {block}, outside the pool's [0, {cache.num_blocks})"
            )
    return row[:needed]


def _converted(rows: Any, pool: Any, name: str) -> Any:
    """Rows in the pool's dtype: a float becomes another float, nothing else changes."""
    found, dtype = dtype_of(rows.dtype, name), dtype_of(pool.dtype, "key_pool")
    if found != dtype and not (_is_float(found) and _is_float(dtype)):
        raise ContractTypeError(f"{name}: dtype {found} cannot be stored in a pool of {dtype}")
    return rows.astype(dtype, copy=False) if isinstance(rows, np.ndarray) else rows.to(pool.dtype)


def _is_float(dtype: np.dtype) -> bool:
    return "float" in dtype.name
