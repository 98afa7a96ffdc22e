"""The operands of prefill in vectors: queries once a segment, K and V once a step.

K is copied as it is broadcast, a cache line of each token side by side; V as float32. In latent attention the first part
of a key is the token's V, which is read once.
"""

from std.math import ceildiv
from std.memory import bitcast

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.codes import is_codes, scale_of, units_of
from ....isa.convert import ChunkConstants, LANES, chunk_of, load_chunk, to_chunk_order
from ....isa.memory import FloatPointer
from ....isa.transpose import transpose_16x16
from ...params import AttentionRows
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS
from ..prefill.queries import QUERY_COLUMNS
from ..prefill.step import PrefillStep, STEP_TOKENS
from ..rotary_keys import KeyRotation
from ..workspace import HeadLayout
from .prefill_products import WordVector
from .prefill_workspace import (
    KEY_TOKENS,
    LINE_WORDS,
    VALUE_COLUMNS,
    VectorPrefillWorkspace,
    WordPointer,
    takes_pairs,
)


def pack_queries[
    kv_dtype: DType, latent: Bool, dtype: DType
](rows: AttentionRows[dtype, ...], segment: Segment, heads: HeadLayout, mut workspace: VectorPrefillWorkspace):
    """Packs the queries of one KV head of a block as words, a query in each lane."""
    comptime lines = chunk_lines[takes_pairs(dtype, kv_dtype)](kv_dtype)
    var before = 0
    comptime if latent:
        before = heads.padded_value // chunk_of(kv_dtype)
        pack_part[kv_dtype](rows, segment, heads, rows.q_latent, heads.value_dim, workspace.q)
    var rest = workspace.q.unsafe_offset(before * lines * LINE_WORDS * LANES)
    pack_part[kv_dtype](rows, segment, heads, rows.q, heads.head_dim, rest)


def pack_part[
    kv_dtype: DType, dtype: DType
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    heads: HeadLayout,
    q: Pointer[Scalar[dtype], MutUntrackedOrigin],
    dim: Int,
    packed: WordPointer,
):
    """Packs q `[R, Hq, dim]`, all elements of a query or a part of them."""
    comptime chunk = chunk_of(kv_dtype)
    comptime pairs = takes_pairs(dtype, kv_dtype)
    comptime lines = chunk_lines[pairs](kv_dtype)
    var queries = segment.num_rows * heads.group
    var words = head_words[pairs](heads.padded_dim)
    for m in range(0, queries, QUERY_COLUMNS):
        for c in range(ceildiv(dim, chunk)):
            var columns = Array[WordVector, QUERY_COLUMNS * lines](fill=0)
            for column in range(min(QUERY_COLUMNS, queries - m)):
                var row, g = divmod(m + column, heads.group)
                var source = q.unsafe_offset(
                    ((segment.row + row) * rows.num_heads + segment.head * heads.group + g) * dim
                )
                var x = SIMD[DType.float32, chunk](0)
                comptime for i in range(chunk // 8):
                    if c * chunk + 8 * i < dim:
                        x = x.insert[offset=8 * i](source.unsafe_load[width=8](c * chunk + 8 * i).cast[DType.float32]())
                x = to_chunk_order[kv_dtype](x)
                comptime for line in range(lines):
                    columns[line * QUERY_COLUMNS + column] = words_of[pairs, line](x)
            comptime for line in range(lines):
                var square = Array[WordVector, LINE_WORDS](fill=0)
                comptime for i in range(QUERY_COLUMNS):
                    square[i] = columns[line * QUERY_COLUMNS + i]
                transpose_16x16(square)
                var target = packed.unsafe_offset(m * words + (c * lines + line) * LINE_WORDS * LANES)
                comptime for word in range(LINE_WORDS):
                    target.unsafe_store(word * LANES, square[word])


def chunk_lines[pairs: Bool](dtype: DType) -> Int:
    """Cache lines of words that a chunk takes."""
    return chunk_of(dtype) // (2 * LINE_WORDS if pairs else LINE_WORDS)


def head_words[pairs: Bool](padded_dim: Int) -> Int:
    """Words of a head."""
    return padded_dim // 2 if pairs else padded_dim


@always_inline
def words_of[pairs: Bool, line: Int](x: SIMD[DType.float32, _]) -> WordVector:
    """The words of one cache line of a chunk. What pairs with what does not matter: queries and keys do alike.

    bfloat16 elements as `load_chunk` separates them become the pairs that are stored, and the compiler drops both steps.
    """
    comptime if pairs:
        var low = bitcast[DType.uint32, LANES](x.slice[LANES, offset=2 * line * LANES]())
        var high = bitcast[DType.uint32, LANES](x.slice[LANES, offset=(2 * line + 1) * LANES]())
        return low >> 16 | high & 0xFFFF0000
    else:
        return bitcast[DType.uint32, LANES](x.slice[LANES, offset=line * LANES]())


def lay_out_step[
    pairs: Bool, latent: Bool, rotates: Bool
](
    k: PagedKVCache,
    v: type_of(k),
    step: PrefillStep,
    heads: HeadLayout,
    head: Int,
    mut workspace: VectorPrefillWorkspace,
    rotation: KeyRotation,
):
    """Copies K as words and V as float32, each token of the step once."""
    var key = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var value = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    var constants = ChunkConstants[k.dtype]()
    # A latent key has the codes of two heads, each with a scale: there they are multiplied as they are copied.
    comptime codes = is_codes(k.dtype) and not latent
    for i in range(step.count):
        var tile = step.tiles[i]
        var first = i * KV_TILE_TOKENS
        comptime if rotates:
            rotation.select_tile(0, tile)
            for t in range(tile.count):
                rotation.rotate_key[DType.float32](key.unsafe_offset(tile.k[unsafe_offset=t]), constants, 0, t)
        for t in range(tile.count):
            var keys = workspace.keys.unsafe_offset((first + t) * LINE_WORDS)
            var values = workspace.values.unsafe_offset((first + t) * VALUE_COLUMNS)
            var token = value.unsafe_offset(tile.v[unsafe_offset=t])
            lay_out_head[pairs, latent, True, latent](token, constants, heads.value_dim, keys, values)
            comptime if codes:
                workspace.value_scales[unsafe_offset=first + t] = scale_of(token, heads.value_dim)
                workspace.key_scales[unsafe_offset=first + t] = 1
            comptime if latent:
                keys = keys.unsafe_offset(head_words[pairs](heads.padded_value) * KEY_TOKENS)
            comptime if rotates:
                var rotated = rotation.key[DType.float32](t)
                lay_out_head[pairs, True, False, False](
                    rotated, ChunkConstants[DType.float32](), heads.padded_dim, keys, values
                )
            else:
                token = key.unsafe_offset(tile.k[unsafe_offset=t])
                lay_out_head[pairs, True, False, latent](token, constants, heads.head_dim, keys, values)
                comptime if codes:
                    workspace.key_scales[unsafe_offset=first + t] = scale_of(token, heads.head_dim)


@always_inline
def lay_out_head[
    dtype: DType, //, pairs: Bool, to_keys: Bool, to_values: Bool, scaled: Bool
](
    source: Pointer[Scalar[dtype], _],
    constants: ChunkConstants[dtype],
    dim: Int,
    keys: WordPointer,
    values: FloatPointer,
):
    """Copies one head of one token, or a part of it, to where keys lie, to where values lie, or to both.

    Parameters:
        dtype: The stored dtype.
        pairs: Whether a word is a pair of bfloat16, else a float32.
        to_keys: Whether it is a key.
        to_values: Whether it is a value.
        scaled: Whether codes are multiplied by their scale.

    Args:
        source: The head.
        constants: Those of `load_chunk`.
        dim: Its elements.
        keys: The token's place in the first line of keys.
        values: Its place in the first columns of values.
    """
    comptime chunk = chunk_of(dtype)
    comptime lines = chunk_lines[pairs](dtype)
    var scale = Float32(1)
    comptime if is_codes(dtype) and scaled:
        scale = scale_of(source, dim)
    for c in range(ceildiv(dim, chunk)):
        var x: SIMD[DType.float32, chunk]
        var d = c * chunk
        if d + chunk <= dim:
            x = load_chunk[True](source.unsafe_offset(units_of(dtype, d)), chunk, constants)
        else:
            x = load_chunk[False](source.unsafe_offset(units_of(dtype, d)), dim - d, constants)
        comptime if is_codes(dtype) and scaled:
            x *= scale
        comptime if to_keys:
            comptime for line in range(lines):
                keys.unsafe_store((c * lines + line) * KEY_TOKENS * LINE_WORDS, words_of[pairs, line](x))
        comptime if to_values:
            comptime for i in range(0, chunk, LANES):
                comptime column = i // VALUE_COLUMNS * STEP_TOKENS * VALUE_COLUMNS + i % VALUE_COLUMNS
                values.unsafe_store(d * STEP_TOKENS + column, x.slice[LANES, offset=i]())
