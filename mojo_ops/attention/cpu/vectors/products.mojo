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
from ....isa.registers import HAS_32_REGISTERS, REGISTER_LANES, RegisterVector
from ..bf16_chunk import Bf16Chunk, widen_chunk
from ..kv_tile import KVTile
from ..prefetch import IntPointer, KV_TILE_TOKENS, Prefetcher, STREAMS
from ..workspace import HeadLayout, ROUNDED_FLOATS, SegmentWorkspace
from .code_sums import code_prefetch_calls, round_weights, sum_codes
from .queries import num_query_blocks, query_block

comptime REGISTER_SUMS = 16 if HAS_32_REGISTERS else 8
"""Registers that hold sums."""
comptime PREFETCHING_BLOCKS = 4
"""Query blocks that prefetch. With more blocks the arithmetic takes longer than the memory."""


def score_prefetch_calls[kv_dtype: DType](heads: HeadLayout, queries: Int) -> Int:
    """Return how often `score_tile` calls `prefetcher.run` for a whole tile."""
    var calls = 0
    var m = 0
    for _ in range(min(PREFETCHING_BLOCKS, num_query_blocks(queries))):
        var count = query_block(m, queries)[1]
        calls += ceildiv(heads.head_dim, chunk_of(kv_dtype)) * KV_TILE_TOKENS // min(4, tokens_at_once(count))
        m += count
    return calls


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
        comptime parts = chunk_of(kv_dtype) // REGISTER_LANES
        var vectors = vectors_at_once(count)
        var slice = max(vectors, parts) * REGISTER_LANES
        var slices = heads.head_dim // slice + ceildiv(heads.head_dim % slice, chunk_of(kv_dtype))
        calls += slices * ceildiv(parts, vectors) * KV_TILE_TOKENS
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
        var sums = Array[RegisterVector, REGISTER_SUMS](fill=0)
        var d = 0
        while d < whole:
            dot_chunk[count, True](k, constants, offsets, first, d, chunk, q, fetch, sums, prefetcher)
            d += chunk
        if whole < heads.head_dim:
            dot_chunk[count, False](
                k, constants, offsets, first, whole, heads.head_dim - whole, q, fetch, sums, prefetcher
            )
        var totals = SIMD[DType.float32, REGISTER_SUMS](0)
        comptime for i in range(0, REGISTER_SUMS, REGISTER_LANES):
            var some = Array[RegisterVector, REGISTER_LANES](fill=0)
            comptime for lane in range(REGISTER_LANES):
                some[lane] = sums[i + lane]
            totals = totals.insert[offset=i](reduce_each[REGISTER_LANES](some))
        comptime for m in range(count):
            target.unsafe_store(m * KV_TILE_TOKENS + first, totals.slice[tokens, offset=m * tokens]())


def tokens_at_once(count: Int) -> Int:
    """Tokens whose dot products with `count` queries are computed together."""
    return min(STREAMS, REGISTER_SUMS // count)


def vectors_at_once(count: Int) -> Int:
    """Registers of head_dim whose weighted sums for `count` queries are computed together."""
    return min(8, REGISTER_SUMS // count)


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
    mut sums: Array[RegisterVector, REGISTER_SUMS],
    mut prefetcher: Prefetcher,
):
    """Adds the products of one chunk to `sums[m * tokens + i]`, of query `m` and token `token + i`."""
    comptime tokens = tokens_at_once(count)
    comptime chunk = chunk_of(kv_dtype)
    var qs = q.unsafe_offset(d * count)
    # Before the chunk is loaded: LLVM moves products behind a branch, and what was loaded for them fills the registers.
    if fetch:
        comptime for _ in range(max(1, tokens // 4)):
            prefetcher.run()
    comptime for i in range(tokens):
        var source = k.unsafe_offset(offsets[unsafe_offset=token + i] + units_of(kv_dtype, d))
        comptime if query_dtype == DType.bfloat16:
            var x = Bf16Chunk[kv_dtype]()
            widen_chunk[full](source, length, constants.tables, x)
            comptime for m in range(count):
                comptime for part in range(chunk // BF16_DOT_ELEMENTS):
                    var pairs = qs.unsafe_bitcast[BFloat16]().unsafe_load[width=BF16_DOT_ELEMENTS](
                        m * chunk + part * BF16_DOT_ELEMENTS
                    )
                    var of_key = bitcast[DType.bfloat16, BF16_DOT_ELEMENTS](x.words[part])
                    sums[m * tokens + i] = rebind[RegisterVector](
                        bf16_dot(rebind[FloatVector](sums[m * tokens + i]), of_key, pairs)
                    )
        else:
            var x = load_chunk[full](source, length, constants)
            comptime for m in range(count):
                comptime for at in range(0, chunk, REGISTER_LANES):
                    sums[m * tokens + i] = x.slice[REGISTER_LANES, offset=at]().fma(
                        qs.unsafe_bitcast[Float32]().unsafe_load[width=REGISTER_LANES](m * chunk + at),
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
            sum_block[count](
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
    kv_dtype: DType, //, count: Int
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
    """Adds the weighted V for `count` queries, some registers of head_dim at a time: whole chunks, or parts of one.

    Their sums stay in registers for all tokens.
    """
    comptime chunk = chunk_of(kv_dtype)
    comptime parts = chunk // REGISTER_LANES
    comptime vectors = vectors_at_once(count)
    comptime chunks = max(1, vectors // parts)
    var d = 0
    comptime if chunks > 1:
        while d + chunks * chunk <= heads.head_dim:
            sum_slice[count, chunks, parts, 0, True](
                v, constants, tile, begin, end, d, chunk, heads.padded_dim, weights, acc, fetch, prefetcher
            )
            d += chunks * chunk
    while d < heads.head_dim:
        var length = min(chunk, heads.head_dim - d)
        comptime for part in range(0, parts // 2, max(1, min(vectors, parts) // 2)):
            if length == chunk:
                sum_slice[count, 1, min(vectors, parts), part, True](
                    v, constants, tile, begin, end, d, chunk, heads.padded_dim, weights, acc, fetch, prefetcher
                )
            else:
                sum_slice[count, 1, min(vectors, parts), part, False](
                    v, constants, tile, begin, end, d, length, heads.padded_dim, weights, acc, fetch, prefetcher
                )
        d += chunk


@always_inline
def sum_slice[
    kv_dtype: DType, //, count: Int, chunks: Int, vectors: Int, first: Int, full: Bool
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
    """Adds the weighted V of `vectors` registers of each of `chunks` chunks.

    Half of them are a chunk's registers from `first` on, half those from its middle plus `first` on: they are converted
    from the same memory where a type has its even elements before its odd ones.
    """
    comptime chunk = chunk_of(kv_dtype)
    comptime parts = chunk // REGISTER_LANES
    var sums = Array[RegisterVector, count * chunks * vectors](fill=0)
    comptime for m in range(count):
        comptime for i in range(chunks * vectors):
            comptime at = slice_offset(i, vectors, first, parts)
            sums[m * chunks * vectors + i] = acc.unsafe_load[width=REGISTER_LANES](m * padded_dim + d + at)
    for token in range(begin, end):
        var source = v.unsafe_offset(tile.v[unsafe_offset=token] + units_of(kv_dtype, d))
        if fetch:
            prefetcher.run()
        comptime for c in range(chunks):
            var x = load_chunk[full](source.unsafe_offset(units_of(kv_dtype, c * chunk)), length, constants)
            comptime for m in range(count):
                var w = RegisterVector(weights[unsafe_offset=m * KV_TILE_TOKENS + token])
                comptime for i in range(c * vectors, (c + 1) * vectors):
                    comptime at = slice_offset(i, vectors, first, parts) - c * chunk
                    comptime sum = m * chunks * vectors + i
                    sums[sum] = x.slice[REGISTER_LANES, offset=at]().fma(w, sums[sum])
    comptime for m in range(count):
        comptime for i in range(chunks * vectors):
            comptime at = slice_offset(i, vectors, first, parts)
            acc.unsafe_store(m * padded_dim + d + at, sums[m * chunks * vectors + i])


def slice_offset(i: Int, vectors: Int, first: Int, parts: Int) -> Int:
    """The lane at which register `i` of a slice begins, counted from its first chunk."""
    var chunk, place = divmod(i, vectors)
    var half, at = divmod(place, vectors // 2)
    return (chunk * parts + half * (parts // 2) + first + at) * REGISTER_LANES
