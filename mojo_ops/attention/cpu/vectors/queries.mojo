"""The queries of a segment as scores in vectors read them: in query blocks, up to four queries that share each load."""

from ....isa.bf16_dot import BF16_DOT_ELEMENTS, USES_BF16_DOT
from ....isa.bf16_lookup import is_looked_up
from ....isa.convert import chunk_of, to_chunk_order
from ...params import AttentionRows
from ..bf16_chunk import query_words
from ..plan import Segment
from ..workspace import HeadLayout, SegmentWorkspace


def pack_queries[
    kv_dtype: DType, dtype: DType
](rows: AttentionRows[dtype, ...], segment: Segment, heads: HeadLayout, mut workspace: SegmentWorkspace):
    """Packs the queries of a segment as `packed_query_dtype` into `workspace.q`, and clears their states and weighted
    values.

    They are `[Hk, M, P]`, but within a query block `[P / chunk, queries, chunk]`, as `score_block` reads them.
    """
    comptime chunk = chunk_of(kv_dtype)
    comptime query_dtype = packed_query_dtype(dtype, kv_dtype)
    var packed = workspace.q.unsafe_bitcast[Scalar[query_dtype]]()
    var queries = segment.num_rows * heads.group
    for head in range(heads.kv_heads):
        for m in range(queries):
            var row, g = divmod(m, heads.group)
            var source = rows.q.unsafe_offset(
                ((segment.row + row) * rows.num_heads + head * heads.group + g) * heads.head_dim
            )
            var first, count = query_block(m, queries)
            var target = packed.unsafe_offset((head * queries + first) * heads.padded_dim + (m - first) * chunk)
            var at = (head * queries + m) * heads.padded_dim
            for d in range(0, heads.padded_dim, chunk):
                comptime if query_dtype == DType.bfloat16:
                    comptime for part in range(chunk // BF16_DOT_ELEMENTS):
                        var words = query_words[kv_dtype, part](
                            source.unsafe_offset(d).unsafe_bitcast[UInt16](), min(chunk, heads.head_dim - d)
                        )
                        target.unsafe_bitcast[UInt16]().unsafe_store(d * count + part * BF16_DOT_ELEMENTS, words)
                else:
                    var x = SIMD[DType.float32, chunk](0)
                    comptime for i in range(chunk // 8):
                        if d + 8 * i < heads.head_dim:
                            x = x.insert[offset=8 * i](source.unsafe_load[width=8](d + 8 * i).cast[DType.float32]())
                    target.unsafe_bitcast[Float32]().unsafe_store(d * count, to_chunk_order[kv_dtype](x))
                workspace.acc.unsafe_store(at + d, SIMD[DType.float32, chunk](0))
            workspace.clear(head * queries + m)


def packed_query_dtype(dtype: DType, kv_dtype: DType) -> DType:
    """Bfloat16 where scores are dot products of bfloat16 pairs (`isa/bf16_dot.mojo`), else float32.

    Keys of float8 and of codes become bfloat16 by look-up, which is exact, so the products are as exact either way.
    """
    comptime dots = USES_BF16_DOT
    var keys = kv_dtype == DType.bfloat16 or is_looked_up(kv_dtype)
    return DType.bfloat16 if dots and dtype == DType.bfloat16 and keys else DType.float32


def query_block(query: Int, queries: Int) -> Tuple[Int, Int]:
    """The first query of the query block that holds `query`, and its size: blocks of 4, one of 2, one of 1."""
    var fours = queries // 4 * 4
    if query < fours:
        return (query // 4 * 4, 4)
    if query < fours + queries % 4 // 2 * 2:
        return (fours, 2)
    return (queries - 1, 1)


def num_query_blocks(queries: Int) -> Int:
    return queries // 4 + queries % 4 // 2 + queries % 2
