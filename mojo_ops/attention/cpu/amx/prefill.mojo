"""Prefill on matrix tiles: many rows of one request, one KV head a segment.

So many queries share K and V that the arithmetic takes the time, not the memory. A task holds one KV head of up to
`PREFILL_MAX_QUERIES` queries. K and V are copied once for all of them, and every matrix tile that is loaded serves two
products.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.utils import IndexList

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx_tiles import AMX_TILE_ELEMENTS, configure_tiles
from ....isa.convert import ChunkConstants
from ....isa.bf16_lookup import LookupTables
from ....isa.memory import Bf16BitsPointer
from ....isa.transpose import transpose_16x16
from ...logits import Logits
from ...params import AttentionRows
from ..bf16_chunk import Bf16Chunk, query_words, widen_chunk
from ..plan import Segment
from ..prefetch import KV_TILE_TOKENS
from ..prefill.queries import QUERY_COLUMNS, STEP_WORDS, padded_queries
from ..prefill.step import PrefillStep
from ..rotary_keys import KeyRotation
from ..workspace import HeadLayout
from .layout import LAYOUT_TOKENS
from .prefill_products import PairProducts
from .prefill_softmax import scores_to_weights_prefill
from .prefill_workspace import NO_PAIR, PrefillWorkspace, visible_tiles
from .weighted_sums import pair_tokens


def pack_queries_prefill[
    kv_dtype: DType, latent: Bool, dtype: DType
](rows: AttentionRows[dtype, ...], segment: Segment, heads: HeadLayout, mut workspace: PrefillWorkspace):
    """Packs the queries of one KV head of a block as pairs."""
    var before = 0
    comptime if latent:
        before = heads.padded_value
        pack_part_prefill[kv_dtype](rows, segment, heads, rows.q_latent, heads.value_dim, workspace.q)
    var rest = workspace.q.unsafe_offset(before * QUERY_COLUMNS)
    pack_part_prefill[kv_dtype](rows, segment, heads, rows.q, heads.head_dim, rest)


def pack_part_prefill[
    kv_dtype: DType, dtype: DType
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    heads: HeadLayout,
    q: Pointer[Scalar[dtype], MutUntrackedOrigin],
    dim: Int,
    packed: Bf16BitsPointer,
):
    """Packs q `[R, Hq, dim]`, all elements of a query or a part of them."""
    comptime chunk = Bf16Chunk[kv_dtype].length
    var queries = segment.num_rows * heads.group
    var room = padded_queries(queries)
    var all = packed.unsafe_bitcast[UInt32]()
    for block in range(0, room, QUERY_COLUMNS):
        for c in range(ceildiv(dim, chunk)):
            comptime for part in range(chunk // 32):
                var pairs = Array[SIMD[DType.uint32, 16], 16](fill=0)
                comptime for column in range(QUERY_COLUMNS):
                    if block + column < queries:
                        var row, g = divmod(block + column, heads.group)
                        var source = q.unsafe_offset(
                            ((segment.row + row) * rows.num_heads + segment.head * heads.group + g) * dim + c * chunk
                        )
                        pairs[column] = bitcast[DType.uint32, 16](
                            query_words[kv_dtype, part](source.unsafe_bitcast[UInt16](), min(chunk, dim - c * chunk))
                        )
                transpose_16x16(pairs)
                var target = all.unsafe_offset(
                    block * heads.padded_dim // 2 + (c * (chunk // 32) + part) * AMX_TILE_ELEMENTS // 2
                )
                comptime for p in range(16):
                    target.unsafe_store(p * QUERY_COLUMNS, pairs[p])


def attend_prefill_amx[
    dtype: DType, //, latent: Bool, rotates: Bool
](
    rows: AttentionRows[dtype, ...],
    segment: Segment,
    k: PagedKVCache,
    v: type_of(k),
    logits: Logits,
    heads: HeadLayout,
    mut workspace: PrefillWorkspace,
    mut rotation: KeyRotation,
):
    """Computes the states and weighted values of a segment's queries of KV head `segment.head` in `workspace`.

    Pairs of query tiles are a pipeline: the next pair's scores, this pair's softmax, the last pair's weighted sums. So
    no matrix tile is loaded right after it was stored.

    Parameters:
        dtype: The dtype of the queries.
        latent: Whether a key is a token's V and then its K.
        rotates: Whether the keys are rotated here; the queries are already (`../rotary_keys.mojo`).

    Args:
        rows: The rows of the call.
        segment: The segment.
        k: The keys.
        v: The values.
        logits: The options of the call.
        heads: The head sizes.
        workspace: The task's.
        rotation: The task's.
    """
    comptime key_dtype = DType.bfloat16 if rotates else k.dtype
    comptime has_masks = rows.Masks.has_masks
    var request = Int(rows.row_batch[unsafe_offset=segment.row])
    var pairs = padded_queries(segment.num_rows * heads.group) // (2 * QUERY_COLUMNS)
    configure_tiles()
    var key_heads = heads
    comptime if rotates:
        key_heads = rotation.heads_of[key_dtype](heads)
        rotation.place_keys[key_dtype](KV_TILE_TOKENS)
    if not segment.continues:
        pack_queries_prefill[key_dtype, latent](rows, segment, key_heads, workspace)
    workspace.queries.clear(rows, segment, logits, heads)
    var step = PrefillStep(k, v, request, segment, segment.begin, workspace.offset_buffer(), interleaves=False)
    while step.count > 0:
        comptime if has_masks:
            var starts = IndexList[STEP_WORDS](step.tiles[0].first, step.tiles[1].first)
            var ends = IndexList[STEP_WORDS](starts[0] + step.tiles[0].count, starts[1] + step.tiles[1].count)
            if not workspace.queries.read_masks(rows, segment, logits, heads.group, starts, ends):
                step = PrefillStep(k, v, request, segment, step.end, workspace.offset_buffer(), interleaves=False)
                continue
        lay_out_step[latent, rotates](k, v, step, heads, segment.head, workspace, rotation)
        var products = PairProducts(step, key_heads, 0, NO_PAIR, 1, workspace)
        products.finish()
        for pair in range(pairs):
            var calls = 2 * visible_tiles(step, pair, workspace.queries) * KV_TILE_TOKENS // 2
            products = PairProducts(
                step, key_heads, pair + 1 if pair + 1 < pairs else NO_PAIR, pair - 1, max(1, calls), workspace
            )
            comptime for half in range(2):
                scores_to_weights_prefill[has_masks](step, logits, heads, segment.head, pair, half, workspace, products)
            products.finish()
        products = PairProducts(step, key_heads, NO_PAIR, pairs - 1, 1, workspace)
        products.finish()
        step = PrefillStep(k, v, request, segment, step.end, workspace.offset_buffer(), interleaves=False)


def lay_out_step[
    latent: Bool, rotates: Bool
](
    k: PagedKVCache,
    v: type_of(k),
    step: PrefillStep,
    heads: HeadLayout,
    head: Int,
    mut workspace: PrefillWorkspace,
    rotation: KeyRotation,
):
    """Copies K as rows of matrix tiles, and V with its tokens in pairs. Tokens past a tile's end are zeros in V."""
    comptime chunk = Bf16Chunk[v.dtype].length
    var key = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var value = v.blocks.ptr.unsafe_offset(head * heads.v_stride)
    for i in range(step.count):
        comptime if rotates:
            rotation.select_tile(0, step.tiles[i])
        for token in range(KV_TILE_TOKENS):
            var source = key.unsafe_offset(step.tiles[i].k[unsafe_offset=token])
            comptime if rotates:
                var length = rotation.length[DType.bfloat16]()
                rotation.rotate_key[DType.bfloat16](source, ChunkConstants[k.dtype](), 0, token)
                widen_key(
                    rotation.key[DType.bfloat16](token),
                    length,
                    workspace.keys.unsafe_offset((i * KV_TILE_TOKENS + token) * length),
                )
            else:
                var keys = workspace.keys.unsafe_offset((i * KV_TILE_TOKENS + token) * heads.padded_dim)
                comptime if latent:
                    widen_key(value.unsafe_offset(step.tiles[i].v[unsafe_offset=token]), heads.value_dim, keys)
                    keys = keys.unsafe_offset(heads.padded_value)
                widen_key(source, heads.head_dim, keys)
        for c in range(heads.padded_value // chunk):
            var values = workspace.values.unsafe_offset((i * heads.padded_value + c * chunk) * KV_TILE_TOKENS)
            comptime for part in range(KV_TILE_TOKENS // LAYOUT_TOKENS):
                pair_tokens[part](value, step.tiles[i], c * chunk, heads.value_dim, values)


@always_inline
def widen_key[dtype: DType, //](source: Pointer[Scalar[dtype], _], dim: Int, target: Bf16BitsPointer):
    """Copies one head of one token, or a part of it, as bfloat16, padded with zeros."""
    comptime length = Bf16Chunk[dtype].length
    for d in range(0, dim, length):
        var wide = Bf16Chunk[dtype]()
        if d + length <= dim:
            widen_chunk[True](source.unsafe_offset(d), length, LookupTables[dtype](), wide)
        else:
            widen_chunk[False](source.unsafe_offset(d), dim - d, LookupTables[dtype](), wide)
        comptime for part in range(length // 32):
            target.unsafe_store(d + 32 * part, wide.words[part])
