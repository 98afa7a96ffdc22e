"""One KV tile and all queries of a block of rows, in vector arithmetic: scores and weighted sums.

A vector holds the scores of one query. A K or V vector serves up to four queries, a query block, for each load. The
next unit is prefetched between the steps.
"""

from std.math import ceildiv
from std.memory import bitcast

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.codes import is_codes, scale_of, units_of
from ....isa.bf16_dot import BF16_DOT_ELEMENTS, bf16_dot
from ....isa.convert import ChunkConstants, FloatVector, LANES, chunk_of, load_chunk, reduce_each
from ....isa.memory import FloatPointer
from ..bf16_chunk import Bf16Chunk, widen_chunk
from ..kv_tile import KVTile
from ..prefetch import IntPointer, KV_TILE_TOKENS, Prefetcher, STREAMS
from ..workspace import HeadLayout, ROUNDED_FLOATS, SegmentWorkspace
from .code_sums import code_prefetch_calls, round_weights, sum_codes
from .queries import num_query_blocks, query_block

comptime SLICE_ELEMENTS = 64
"""Elements of head_dim whose sums stay in registers, for four queries; twice as many for fewer queries."""
comptime PREFETCHING_BLOCKS = 4
"""Query blocks that prefetch. With more blocks the arithmetic takes longer than the memory."""


def score_prefetch_calls[kv_dtype: DType](heads: HeadLayout, queries: Int) -> Int:
    """Return how often `score_tile` calls `prefetcher.run` for a whole tile."""
    return (
        min(PREFETCHING_BLOCKS, num_query_blocks(queries))
        * ceildiv(heads.head_dim, chunk_of(kv_dtype))
        * (KV_TILE_TOKENS // 4)
    )


def sum_prefetch_calls[kv_dtype: DType, integers: Bool](heads: HeadLayout, queries: Int) -> Int:
    """Return how often `sum_tile` calls `prefetcher.run` for a whole tile."""
    var calls = 0
    var m = 0
    for _ in range(min(PREFETCHING_BLOCKS, num_query_blocks(queries))):
        var count = query_block(m, queries)[1]
        comptime if integers:
            calls += code_prefetch_calls(heads.head_dim, count)
            m += count
            continue
        var slice = SLICE_ELEMENTS * (1 if count == 4 else 2)
        calls += (heads.head_dim // slice + ceildiv(heads.head_dim % slice, chunk_of(kv_dtype))) * KV_TILE_TOKENS
        m += count
    return calls


@always_inline
def score_tile[
    key_dtype: DType, //, query_dtype: DType
](
    keys: Pointer[Scalar[key_dtype], _],
    constants: ChunkConstants[key_dtype],
    offsets: IntPointer,
    heads: HeadLayout,
    head: Int,
    weights_index: Int,
    begin: Int,
    end: Int,
    queries: Int,
    mut workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
):
    """Computes the dot products of one KV head's queries with entries `begin` to `end - 1` of a tile, multiples of 8.

    The key of entry `i` is at element `offsets[i]` of `keys`. The products go to index `weights_index` of
    `workspace.weights`. Those with codes are multiplied by their scales.
    """
    var q = workspace.q.unsafe_bitcast[Scalar[query_dtype]]().unsafe_offset(head * queries * heads.padded_dim)
    var scores = workspace.weights.unsafe_offset(weights_index * queries * KV_TILE_TOKENS)
    var m = 0
    var fetch = PREFETCHING_BLOCKS
    comptime for count in [4, 2, 1]:
        while m + count <= queries:
            var at = q.unsafe_offset(m * heads.padded_dim)
            score_block[count](
                keys,
                constants,
                offsets,
                begin,
                end,
                heads,
                at,
                scores.unsafe_offset(m * KV_TILE_TOKENS),
                fetch > 0,
                prefetcher,
            )
            fetch -= 1
            m += count
    comptime if is_codes(key_dtype):
        scale_entries(keys, offsets, heads.head_dim, begin, end, queries, scores)


@always_inline
def scale_entries[
    dtype: DType, //
](
    heads: Pointer[Scalar[dtype], _],
    offsets: IntPointer,
    head_dim: Int,
    begin: Int,
    end: Int,
    queries: Int,
    numbers: FloatPointer,
):
    """Multiplies column `i` of `[queries, KV_TILE_TOKENS]` by the scale of the codes at `offsets[i]`, from `begin` to
    `end`, multiples of 8."""
    for first in range(begin, end, STREAMS):
        var scales = SIMD[DType.float32, STREAMS](0)
        comptime for i in range(STREAMS):
            # Volatile: LLVM would gather them with one instruction, which is slower than eight loads.
            scales[i] = scale_of[volatile=True](heads.unsafe_offset(offsets[unsafe_offset=first + i]), head_dim)
        for m in range(queries):
            var at = m * KV_TILE_TOKENS + first
            numbers.unsafe_store(at, numbers.unsafe_load[width=STREAMS](at) * scales)


@always_inline
def score_block[
    kv_dtype: DType, query_dtype: DType, //, count: Int
](
    k: Pointer[Scalar[kv_dtype], _],
    constants: ChunkConstants[kv_dtype],
    offsets: IntPointer,
    begin: Int,
    end: Int,
    heads: HeadLayout,
    q: Pointer[Scalar[query_dtype], MutUntrackedOrigin],
    target: FloatPointer,
    fetch: Bool,
    mut prefetcher: Prefetcher,
):
    """Computes the dot products of `count` queries with some tokens. Up to 16 sums at a time stay in registers."""
    comptime tokens = tokens_at_once(count)
    comptime chunk = chunk_of(kv_dtype)
    var whole = heads.head_dim // chunk * chunk
    for first in range(begin, end, tokens):
        var sums = Array[FloatVector, LANES](fill=0)
        var d = 0
        while d < whole:
            dot_chunk[count, True](k, constants, offsets, first, d, chunk, q, fetch, sums, prefetcher)
            d += chunk
        if whole < heads.head_dim:
            dot_chunk[count, False](
                k, constants, offsets, first, whole, heads.head_dim - whole, q, fetch, sums, prefetcher
            )
        var totals = reduce_each(sums)
        comptime for m in range(count):
            target.unsafe_store(m * KV_TILE_TOKENS + first, totals.slice[tokens, offset=m * tokens]())


def tokens_at_once(count: Int) -> Int:
    """Tokens whose dot products with `count` queries are computed together."""
    return min(STREAMS, LANES // count)


@always_inline
def dot_chunk[
    kv_dtype: DType, query_dtype: DType, //, count: Int, full: Bool
](
    k: Pointer[Scalar[kv_dtype], _],
    constants: ChunkConstants[kv_dtype],
    offsets: IntPointer,
    token: Int,
    d: Int,
    length: Int,
    q: Pointer[Scalar[query_dtype], MutUntrackedOrigin],
    fetch: Bool,
    mut sums: Array[FloatVector, LANES],
    mut prefetcher: Prefetcher,
):
    """Adds the products of one chunk to `sums[m * tokens + i]`, of query `m` and token `token + i`."""
    comptime tokens = tokens_at_once(count)
    comptime parts = chunk_of(kv_dtype) // LANES
    var qs = q.unsafe_offset(d * count)
    # Before the chunk is loaded: LLVM moves products behind a branch, and what was loaded for them fills the registers.
    if fetch:
        comptime for _ in range(tokens // 4):
            prefetcher.run()
    comptime for i in range(tokens):
        var source = k.unsafe_offset(offsets[unsafe_offset=token + i] + units_of(kv_dtype, d))
        comptime if query_dtype == DType.bfloat16:
            var x = Bf16Chunk[kv_dtype]()
            widen_chunk[full](source, length, constants.tables, x)
            comptime for m in range(count):
                comptime for part in range(parts // 2):
                    sums[m * tokens + i] = bf16_dot(
                        sums[m * tokens + i],
                        bitcast[DType.bfloat16, BF16_DOT_ELEMENTS](x.words[part]),
                        qs.unsafe_bitcast[BFloat16]().unsafe_load[width=BF16_DOT_ELEMENTS](
                            (m * parts // 2 + part) * BF16_DOT_ELEMENTS
                        ),
                    )
        else:
            var x = load_chunk[full](source, length, constants)
            comptime for m in range(count):
                comptime for part in range(parts):
                    sums[m * tokens + i] = x.slice[LANES, offset=part * LANES]().fma(
                        qs.unsafe_bitcast[Float32]().unsafe_load[width=LANES]((m * parts + part) * LANES),
                        sums[m * tokens + i],
                    )


@always_inline
def sum_tile[
    integers: Bool
](
    v: PagedKVCache,
    constants: ChunkConstants[v.dtype],
    tile: KVTile,
    heads: HeadLayout,
    head: Int,
    weights_index: Int,
    begin: Int,
    end: Int,
    queries: Int,
    mut workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
):
    """Adds the weighted V of one KV head to `workspace.acc`, of the tile's tokens among entries `begin` to `end - 1`.

    The weights are at index `weights_index` of `workspace.weights`; those of codes are multiplied by their scales there.

    Parameters:
        integers: Whether products are those of integers (`code_sums.mojo`), where all weights are finite.
    """
    var base = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var acc = workspace.acc.unsafe_offset(head * queries * heads.padded_dim)
    var weights = workspace.weights.unsafe_offset(weights_index * queries * KV_TILE_TOKENS)
    var last = min(end, tile.count)
    comptime if is_codes(v.dtype):
        scale_entries(base, tile.v, heads.value_dim, begin, end, queries, weights)
    var m = 0
    var fetch = PREFETCHING_BLOCKS
    comptime if integers:
        if round_weights[v.dtype](weights, queries, begin, last, workspace.rounded):
            comptime for count in [4, 2, 1]:
                while m + count <= queries:
                    sum_codes[count](
                        base,
                        tile.v,
                        begin,
                        last,
                        heads.head_dim,
                        heads.padded_dim,
                        workspace.rounded.unsafe_offset(m * ROUNDED_FLOATS),
                        acc.unsafe_offset(m * heads.padded_dim),
                        fetch > 0,
                        prefetcher,
                    )
                    fetch -= 1
                    m += count
            return
        fetch = 0  # the calls of `run` were counted for the loop above
    comptime for count in [4, 2, 1]:
        while m + count <= queries:
            var at = acc.unsafe_offset(m * heads.padded_dim)
            sum_block[count, SLICE_ELEMENTS * (1 if count == 4 else 2) // chunk_of(v.dtype)](
                base,
                constants,
                tile,
                begin,
                last,
                heads,
                weights.unsafe_offset(m * KV_TILE_TOKENS),
                at,
                fetch > 0,
                prefetcher,
            )
            fetch -= 1
            m += count


@always_inline
def sum_block[
    kv_dtype: DType, //, count: Int, chunks: Int
](
    v: Pointer[Scalar[kv_dtype], _],
    constants: ChunkConstants[kv_dtype],
    tile: KVTile,
    begin: Int,
    end: Int,
    heads: HeadLayout,
    weights: FloatPointer,
    acc: FloatPointer,
    fetch: Bool,
    mut prefetcher: Prefetcher,
):
    """Adds the weighted V for `count` queries, in slices of `chunks` chunks of head_dim.

    The sums of a slice stay in registers for all tokens.
    """
    comptime chunk = chunk_of(kv_dtype)
    var d = 0
    while d + chunks * chunk <= heads.head_dim:
        sum_slice[count, chunks, True](
            v, constants, tile, begin, end, d, chunk, heads.padded_dim, weights, acc, fetch, prefetcher
        )
        d += chunks * chunk
    while d + chunk <= heads.head_dim:
        sum_slice[count, 1, True](
            v, constants, tile, begin, end, d, chunk, heads.padded_dim, weights, acc, fetch, prefetcher
        )
        d += chunk
    if d < heads.head_dim:
        sum_slice[count, 1, False](
            v, constants, tile, begin, end, d, heads.head_dim - d, heads.padded_dim, weights, acc, fetch, prefetcher
        )


@always_inline
def sum_slice[
    kv_dtype: DType, //, count: Int, chunks: Int, full: Bool
](
    v: Pointer[Scalar[kv_dtype], _],
    constants: ChunkConstants[kv_dtype],
    tile: KVTile,
    begin: Int,
    end: Int,
    d: Int,
    length: Int,
    padded_dim: Int,
    weights: FloatPointer,
    acc: FloatPointer,
    fetch: Bool,
    mut prefetcher: Prefetcher,
):
    comptime chunk = chunk_of(kv_dtype)
    comptime parts = chunks * chunk // LANES
    var sums = Array[FloatVector, count * parts](fill=0)
    comptime for m in range(count):
        comptime for part in range(parts):
            sums[m * parts + part] = acc.unsafe_load[width=LANES](m * padded_dim + d + part * LANES)
    for i in range(begin, end):
        var source = v.unsafe_offset(tile.v[unsafe_offset=i] + units_of(kv_dtype, d))
        if fetch:
            prefetcher.run()
        comptime for c in range(chunks):
            var x = load_chunk[full](source.unsafe_offset(units_of(kv_dtype, c * chunk)), length, constants)
            comptime for m in range(count):
                var w = FloatVector(weights[unsafe_offset=m * KV_TILE_TOKENS + i])
                comptime for half in range(chunk // LANES):
                    comptime at = m * parts + c * (chunk // LANES) + half
                    sums[at] = x.slice[LANES, offset=half * LANES]().fma(w, sums[at])
    comptime for m in range(count):
        comptime for part in range(parts):
            acc.unsafe_store(m * padded_dim + d + part * LANES, sums[m * parts + part])
