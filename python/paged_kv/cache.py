"""The functional paged cache: a frozen value, and functions that return a new one.

Letters in shapes: B sequences, T tokens. Pools, tables and lengths may be arrays of any kind, and each result has the
kind of what it stands for. Pools and new tokens may lie on a GPU (torch and MAX arrays); every function reads the table
and the lengths, so they lie on the host. The input cache is never changed. That
costs `append_kv` a copy of both pools, where an array library with a compiler may write in place: to decode at speed,
use `paged_kv.page`, which writes into the caller's pages. Names and meaning are those of the JAX caches with this
interface; what they refuse is a ValueError here too, and so are the tables that they would follow to a wrong block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer, shown
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import cache_dtype_of, is_float, kind_of_dtype
from paged_kv.arrays.host import as_indices, as_numpy, like, sample_array
from paged_kv.arrays.pages import Pages, check_alike, check_storage
from paged_kv.arrays.types import ArrayDevice, DTypeLike, ShapedArray, SupportsDLPack
from paged_kv.calls.append import new_cache
from paged_kv.calls.kv_copy import Slots, read_rows, write_rows
from paged_kv.calls.offsets import Indices
from paged_kv.calls.table import Table
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, PoolExhausted, ShapeError
from paged_kv.kv_formats import CODE_DTYPES, FORMATS, KVFormat
from paged_kv.options import stored_elements

_MAX_TABLE_ENTRIES = 2**28
"""The most entries of a block table that `init_paged_kv_cache` makes, 1 GiB of int32: it is filled with -1 at once."""


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Storage of K and V, and which sequence owns which blocks of it."""

    key_pool: ShapedArray
    """`[num_blocks, block_size, num_kv_heads, head_dim]`, or of codes as long as `options.stored_head` says."""
    value_pool: ShapedArray
    """The same shape and dtype."""
    block_table: SupportsDLPack
    """`[B, max_blocks_per_seq]` int32: logical block to physical block, -1 where there is none."""
    seq_lengths: SupportsDLPack
    """`[B]` int32: the tokens each sequence holds."""
    kv_format: KVFormat | None = None
    """The format of pools of codes with a scale a token and head: "int8" in int8 arrays, "int4" in uint8."""

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
        """Elements of a head, whatever they take in the pools."""
        return stored_elements(self.kv_format or "", int(self.key_pool.shape[3]), "key_pool")


def init_paged_kv_cache(
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    batch_size: int,
    max_blocks_per_seq: int,
    dtype: DTypeLike,
    device: Any = None,
) -> PagedKVCache:
    """An empty cache: pools of zeros, a table of -1, lengths of 0.

    `dtype` is a name, or a dtype of NumPy, torch, JAX or MAX: a torch dtype makes torch arrays, `jax.numpy.float32` and
    the like JAX arrays, all others NumPy arrays. `device` is None, the CPU, or a GPU as torch names it ("cuda:1"): the
    pools are then torch tensors there, the table and the lengths torch tensors on the host. int8 and int4, as names or
    as dtypes, make pools of codes with a scale a token and KV head, in arrays of int8 and uint8: append takes floats,
    gather gives float32. All other integers are stored as they are.

    Raises:
        ContractError, ContractTypeError: a size is no integer, too small or above 2^31 - 1, the table has over 2^28
            entries, the pools do not fit in memory, or the dtype or the device is unknown.
        ShapeError: codes of a head_dim that is no multiple of 8, or of int4 below 16.
        ToolchainError: MAX does not see that GPU, or torch is missing.

    Examples:
        >>> import numpy as np
        >>> cache = init_paged_kv_cache(
        ...     num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, batch_size=2,
        ...     max_blocks_per_seq=3, dtype=np.float32,
        ... )
        >>> cache.key_pool.shape, cache.block_table.tolist(), cache.seq_lengths.tolist()
        ((8, 4, 2, 8), [[-1, -1, -1], [-1, -1, -1]], [0, 0])
    """
    shape = (
        integer("num_blocks", num_blocks, 0, LARGEST_INDEX),
        integer("block_size", block_size, 1, LARGEST_INDEX),
        integer("num_kv_heads", num_kv_heads, 1, LARGEST_INDEX),
        integer("head_dim", head_dim, 1, LARGEST_INDEX),
    )
    batch = integer("batch_size", batch_size, 0, LARGEST_INDEX)
    max_blocks = integer("max_blocks_per_seq", max_blocks_per_seq, 0, LARGEST_INDEX)
    if batch * max_blocks > _MAX_TABLE_ENTRIES or batch > _MAX_TABLE_ENTRIES:
        raise ContractError(
            f"batch_size: {batch} sequences of max_blocks_per_seq = {max_blocks} make a table of over 2^28 entries"
        )
    at = devices.device_named(device)
    element, kind = cache_dtype_of(dtype, "dtype"), kind_of_dtype(dtype)
    kind = kind if kind in at.kinds else at.kinds[0]
    sample = sample_array(kind)
    return PagedKVCache(
        new_cache(at, "key_pool", shape, element, kind),
        new_cache(at, "value_pool", shape, element, kind),
        like(sample, np.full((batch, max_blocks), -1, np.int32)),
        like(sample, np.zeros(batch, np.int32)),
        next((name for name in CODE_DTYPES if name == element.name), None),
    )


def allocate_blocks(
    cache: PagedKVCache, *, sequence_idx: int, num_new_tokens: int, free_block_ids: SupportsDLPack
) -> tuple[PagedKVCache, int]:
    """Gives a sequence the blocks that `num_new_tokens` more tokens need, the first ones of `free_block_ids` `[F]`.

    They follow the blocks that the tokens fill: a second call before the append replaces what the first one gave. A
    block that the table has for another sequence, or elsewhere for this one, is not free and is refused.

    Returns:
        The new cache, which shares its pools with `cache`, and how many ids were consumed.

    Raises:
        PoolExhausted: `free_block_ids` is shorter than the number of blocks needed.
        PageTableError: a consumed id is outside the pool, owned or consumed twice, or the table's row is too short.
        ContractError, ContractTypeError, ShapeError: an argument of a wrong value, type or rank.

    Examples:
        >>> import numpy as np
        >>> empty = init_paged_kv_cache(
        ...     num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, batch_size=2,
        ...     max_blocks_per_seq=3, dtype=np.float32,
        ... )
        >>> cache, used = allocate_blocks(empty, sequence_idx=1, num_new_tokens=5, free_block_ids=np.array([6, 3, 7]))
        >>> used, cache.block_table.tolist()
        (2, [[-1, -1, -1], [6, 3, -1]])
    """
    _pools(cache)
    table, lengths, sequence = _checked_table(cache, sequence_idx)
    added = integer("num_new_tokens", num_new_tokens, 0, LARGEST_INDEX)
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
        raise PageTableError(f"free_block_ids names a block twice in {shown(taken.tolist())} (sequence {sequence})")
    _refuse_owned(table, sequence, slice(first, first + count), taken, "free_block_ids")
    grown = as_numpy(cache.block_table, "block_table").copy()
    grown[sequence, first : first + count] = taken
    return replace(cache, block_table=like(cache.block_table, grown)), count


def append_kv(
    cache: PagedKVCache, sequence_idx: int, keys_new: SupportsDLPack, values_new: SupportsDLPack
) -> PagedKVCache:
    """Appends tokens to one sequence, whose blocks were allocated before.

    `keys_new` and `values_new` are `[T, num_kv_heads, head_dim]`; floats are converted to the pool's dtype as torch
    does it: past the largest number of float8_e4m3fn they become that number, of any other dtype infinity. Sequences
    may share blocks that are only read; a block that is written must be this sequence's alone.

    Returns:
        A new cache with copies of both pools, and T more tokens in the sequence.

    Raises:
        ShapeError: shapes disagree with each other or with the pools.
        PageTableError: a block that is needed is unallocated, outside the pool, there twice, or another sequence's.
        ContractError, ContractTypeError: an argument of a wrong value, type or dtype.

    Examples:
        >>> import numpy as np
        >>> cache = init_paged_kv_cache(
        ...     num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, batch_size=2,
        ...     max_blocks_per_seq=3, dtype=np.float32,
        ... )
        >>> cache, _ = allocate_blocks(cache, sequence_idx=0, num_new_tokens=5, free_block_ids=np.array([6, 3]))
        >>> rows = np.ones((5, 2, 8), np.float32)
        >>> longer = append_kv(cache, 0, rows, rows)
        >>> longer.seq_lengths.tolist(), cache.seq_lengths.tolist()
        ([5, 0], [0, 0])
    """
    pools = _pools(cache, keys_new=keys_new, values_new=values_new)
    device = pools.device
    table, lengths, sequence = _checked_table(cache, sequence_idx)
    keys, values = device.view(keys_new, "keys_new"), device.view(values_new, "values_new")
    if keys.shape != values.shape:
        raise ShapeError(f"keys_new shape {tuple(keys.shape)} != values_new shape {tuple(values.shape)}")
    if keys.ndim != 3 or tuple(keys.shape[1:]) != (cache.num_kv_heads, cache.head_dim):
        shape = tuple(keys.shape)
        raise ShapeError(f"keys_new: expected [T, {cache.num_kv_heads}, {cache.head_dim}], got shape {shape}")
    target = pools.dtype if cache.kv_format is None else np.dtype(np.float32)
    rows = [_converted(device, view, target, n) for view, n in ((keys, "keys_new"), (values, "values_new"))]
    start, count, size = int(lengths[sequence]), len(keys), cache.block_size
    blocks = _blocks(table[sequence], sequence, start // size, start + count, cache)
    pages = Table.padded(blocks[None], np.array([start + count], np.int32), size)
    slots = pages.slots(np.zeros(count, np.int32), np.arange(start, start + count, dtype=np.int32))
    written = slice(start // size, len(blocks)) if count else slice(0)
    _refuse_owned(table, sequence, written, blocks[written], "block_table")
    copies = Pages(device.clone(pools.k), device.clone(pools.v), device)
    write_rows(copies, rows[0], rows[1], Slots(*slots))
    key_pool, value_pool = device.like(cache.key_pool, copies.k), device.like(cache.value_pool, copies.v)
    longer = as_numpy(cache.seq_lengths, "seq_lengths").copy()
    longer[sequence] += count
    longer_lengths = like(cache.seq_lengths, longer)
    return replace(cache, key_pool=key_pool, value_pool=value_pool, seq_lengths=longer_lengths)


def gather_kv(cache: PagedKVCache, sequence_idx: int) -> tuple[Any, Any, int]:
    """One sequence's tokens, made contiguous.

    Returns:
        `(keys, values, seq_len)`: `[seq_len, num_kv_heads, head_dim]` twice, of the pools' kind and dtype; of codes
        the numbers that they stand for, float32.

    Raises:
        PageTableError: a block that the length covers is unallocated or outside the pool.
        ContractError, ContractTypeError, ShapeError: an argument of a wrong value, type or rank.

    Examples:
        >>> import numpy as np
        >>> cache = init_paged_kv_cache(
        ...     num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, batch_size=1,
        ...     max_blocks_per_seq=3, dtype=np.float32,
        ... )
        >>> cache, _ = allocate_blocks(cache, sequence_idx=0, num_new_tokens=5, free_block_ids=np.array([6, 3]))
        >>> k, v = np.ones((5, 2, 8), np.float32), np.zeros((5, 2, 8), np.float32)
        >>> keys, values, length = gather_kv(append_kv(cache, 0, k, v), 0)
        >>> bool((keys == k).all()), bool((values == v).all()), length
        (True, True, 5)
    """
    pools = _pools(cache)
    table, lengths, sequence = _checked_table(cache, sequence_idx)
    length = int(lengths[sequence])
    blocks = _blocks(table[sequence], sequence, 0, length, cache)
    count = np.array([len(blocks)], np.int32)
    pages = Table(blocks[None], count, lengths[sequence : sequence + 1], cache.block_size)  # as checked, read at once
    keys, values = read_rows(pools, pages, cache.kv_format)
    like_pool = pools.device.like
    return like_pool(cache.key_pool, keys), like_pool(cache.value_pool, values), length


def _checked_table(cache: PagedKVCache, sequence_idx: int) -> tuple[Indices, Indices, int]:
    """The table, the lengths and the sequence, checked against each other."""
    for name, array in (("block_table", cache.block_table), ("seq_lengths", cache.seq_lengths)):
        devices.require_host(array, name, "it is read by every call")
    table, lengths = as_indices(cache.block_table, "block_table", 2), as_indices(cache.seq_lengths, "seq_lengths")
    if len(lengths) != len(table):
        raise ShapeError(f"seq_lengths has {len(lengths)} entries, block_table has {len(table)} rows")
    sequence = integer("sequence_idx", sequence_idx, 0, LARGEST_INDEX)
    if sequence >= len(table):
        raise ContractError(f"sequence_idx is {sequence}, the cache has {len(table)} sequences")
    if lengths[sequence] < 0:
        raise PageTableError(f"seq_lengths: sequence {sequence} has length {lengths[sequence]}")
    return table, lengths, sequence


def _pools(cache: PagedKVCache, **rows: Any) -> Pages:
    """Both pools, which must be of one shape and dtype, on the device of `rows` too."""
    if not isinstance(cache, PagedKVCache):
        raise ContractTypeError(f"cache: expected a PagedKVCache, got {shown(cache)}")
    device = devices.device_of(key_pool=cache.key_pool, value_pool=cache.value_pool, **rows)
    keys, values = device.view(cache.key_pool, "key_pool"), device.view(cache.value_pool, "value_pool")
    check_storage(device, keys, "key_pool", 4)
    check_storage(device, values, "value_pool", 4)
    check_alike(values, keys, "value_pool", "key_pool's")
    if cache.kv_format is not None:
        dtype = device.dtype(keys).name
        if FORMATS.get(dtype) != cache.kv_format:
            raise ContractTypeError(f"kv_format: {shown(cache.kv_format)} codes do not lie in arrays of {dtype}")
        stored_elements(cache.kv_format, keys.shape[3], "key_pool")
    if not keys.shape[1]:
        raise ShapeError(f"key_pool: blocks must hold tokens, its shape is {tuple(keys.shape)}")
    return Pages(keys, values, device)


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


def _refuse_owned(table: Indices, sequence: int, columns: slice, blocks: Indices, name: str) -> None:
    """Refuses `blocks`, to stand in some columns of a sequence's row, that the table has in any other place.

    Raises:
        PageTableError: names the block and both sequences; it calls the blocks `name`.
    """
    once, counts = np.unique(blocks, return_counts=True)
    if len(once) < len(blocks):
        raise PageTableError(f"{name}: sequence {sequence} has block {once[counts.argmax()]} twice")
    shared = np.isin(table, blocks)
    shared[sequence, columns] = False
    if shared.any():
        owner, column = (int(i) for i in np.argwhere(shared)[0])
        raise PageTableError(
            f"{name}: block {table[owner, column]} would be written for sequence {sequence}, but"
            f" block_table[{owner}, {column}] gives it to sequence {owner}"
        )


def _converted(device: ArrayDevice, rows: Any, dtype: np.dtype[Any], name: str) -> Any:
    """Rows in the pool's dtype, or as floats for codes: a float becomes another float, nothing else changes."""
    source = device.dtype(rows)
    if source != dtype and not (is_float(source) and is_float(dtype)):
        raise ContractTypeError(f"{name}: dtype {source} cannot be stored in a pool of {dtype}")
    return device.astype(rows, dtype)
