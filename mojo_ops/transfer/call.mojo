"""Appends, gathers and the rows of a step as numbers: what an op hands to a library of kernels, and a program
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
from .ragged_rows import fill_ragged_rows


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
