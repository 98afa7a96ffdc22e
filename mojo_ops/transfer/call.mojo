"""Appends, gathers, moves and the rows of tokens as numbers: what an op hands to a library of kernels, and a program
that calls one by itself.
"""

from std.utils import IndexList

from ..cache.operands import CacheMemory, KVCachePair
from ..cache.pointers import constant_at, memory_at
from ..isa.codes import is_codes
from ..isa.threads import Workers
from .append import AppendRows, append_rows
from .checks import check_append, check_gather, check_offsets
from .gather import gather_rows
from .move_tokens import TokenMoves, move_tokens
from .ragged_rows import fill_ragged_rows
from .tree_rows import TreeRows, fill_tree_rows


@fieldwise_init
struct TokenRows(TrivialRegisterPassable):
    """K and v `[N, Hk, D]` beside a cache, whose D may differ."""

    var k: Int
    var v: Int
    var count: Int
    var k_heads: Int
    var k_dim: Int
    var v_heads: Int
    var v_dim: Int

    def check(self, pair: KVCachePair) raises:
        """Refuses rows that do not fit the cache."""
        pair.check_token_rows(
            IndexList[3](self.count, self.k_heads, self.k_dim), IndexList[3](self.count, self.v_heads, self.v_dim)
        )


@fieldwise_init
struct AppendCall(TrivialRegisterPassable):
    """The operands of `paged_kv_append`."""

    var rows: TokenRows
    var batch_indices: Int
    """The address of `[N]` int32."""
    var positions: Int
    var cache: CacheMemory
    var workers: Workers

    def run[dtype: DType, kv_dtype: DType](self) raises:
        """Writes the rows on the CPU: those of the cache's dtype are copied, others are quantised."""
        var pair = KVCachePair[kv_dtype, codes=dtype != kv_dtype].of_memory(self.cache)
        self.rows.check(pair)
        var rows = AppendRows(
            constant_at[DType.int32](self.batch_indices), constant_at[DType.int32](self.positions), self.rows.count
        )
        check_append(pair.table, rows.batch_indices, rows.positions, rows.count)
        append_rows(pair.k, pair.v, memory_at[dtype](self.rows.k), memory_at[dtype](self.rows.v), rows, self.workers)


@fieldwise_init
struct GatherCall(TrivialRegisterPassable):
    """The operands of `paged_kv_gather`."""

    var rows: TokenRows
    var indptr: Int
    """The address of `[batch + 1]` int32."""
    var cache: CacheMemory
    var workers: Workers

    def run[dtype: DType, kv_dtype: DType](self) raises:
        """Reads the rows on the CPU: codes become the numbers that they stand for."""
        var pair = KVCachePair[kv_dtype, codes=dtype != kv_dtype].of_memory(self.cache)
        self.rows.check(pair)
        var indptr = constant_at[DType.int32](self.indptr)
        check_gather(pair.table, indptr, self.rows.count)
        gather_rows(
            pair.k,
            pair.v,
            memory_at[dtype](self.rows.k),
            memory_at[dtype](self.rows.v),
            indptr,
            pair.table.batch,
            self.workers,
        )


@fieldwise_init
struct RaggedRowsCall(TrivialRegisterPassable):
    """`fill_ragged_rows`."""

    var batch_indices: Int
    var positions: Int
    var rows: Int
    var row_offsets: Int
    var cache_lengths: Int
    var batch: Int
    var workers: Workers

    def run(self) raises:
        var offsets = constant_at[DType.uint32](self.row_offsets)
        check_offsets(offsets, self.batch, self.rows)
        fill_ragged_rows(
            memory_at[DType.int32](self.batch_indices),
            memory_at[DType.int32](self.positions),
            self.rows,
            offsets,
            constant_at[DType.uint32](self.cache_lengths),
            self.batch,
        )


@fieldwise_init
struct TreeRowsCall(TrivialRegisterPassable):
    """`fill_tree_rows`: the results and operands of `paged_kv_tree_rows`."""

    var batch_indices: Int
    var slots: Int
    var positions: Int
    var mask: Int
    var mask_starts: Int
    var mask_firsts: Int
    var rows: Int
    var mask_bytes: Int
    var parents: Int
    var row_offsets: Int
    var cache_lengths: Int
    var batch: Int
    var window_left: Int
    var workers: Workers

    def run(self) raises:
        var offsets = constant_at[DType.uint32](self.row_offsets)
        check_offsets(offsets, self.batch, self.rows)
        fill_tree_rows(
            TreeRows(
                memory_at[DType.int32](self.batch_indices),
                memory_at[DType.int32](self.slots),
                memory_at[DType.int32](self.positions),
                memory_at[DType.int32](self.mask_firsts),
                memory_at[DType.int64](self.mask_starts),
                memory_at[DType.uint8](self.mask),
                Int64(self.rows),
                Int64(self.mask_bytes),
            ),
            constant_at[DType.int32](self.parents),
            offsets,
            constant_at[DType.uint32](self.cache_lengths),
            self.batch,
            self.window_left,
        )


@fieldwise_init
struct MoveTokensCall(TrivialRegisterPassable):
    """`move_tokens` in a cache of `layers` layers, whose view is that of the first one."""

    var batch_indices: Int
    var sources: Int
    var targets: Int
    """`[N]` int32, as the two before it."""
    var count: Int
    var layers: Int
    var cache: CacheMemory
    var workers: Workers

    def run[dtype: DType](self) raises:
        var pair = KVCachePair[dtype].of_memory(self.cache)
        var moves = TokenMoves(
            constant_at[DType.int32](self.batch_indices),
            constant_at[DType.int32](self.sources),
            constant_at[DType.int32](self.targets),
            self.count,
        )
        moves.check(pair.table)
        var layer_stride = pair.k.slots() * pair.k.num_heads() * pair.k.head_dim()
        move_tokens(pair.k, pair.v, self.layers, layer_stride, moves, self.workers)
