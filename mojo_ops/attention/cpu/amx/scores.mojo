"""The dot products of one KV tile on matrix tiles, computed while its K is copied.

K is the left operand, 16 tokens by 32 elements. The queries are the right one, packed once a segment. K could be loaded
from its page, 16 slots at a time, but then a KV tile would be two pages, which gives less memory bandwidth than eight
(README.md, "The order of memory"). Once copied, the tokens of a matrix tile may come from any pages.
"""

from ....isa.amx import tile_dot, tile_load, tile_store, tile_zero
from ....isa.convert import LANES
from ....isa.bf16_lookup import LookupTables
from ....isa.memory import Bf16BitsPointer, FloatPointer
from ..bf16_chunk import Bf16Chunk, widen_chunk
from ..prefetch import IntPointer, KV_TILE_TOKENS, Prefetcher
from ..workspace import HeadLayout, SegmentWorkspace
from .layout import AmxBuffers, LAYOUT_TOKENS, TMM_KV, TMM_QUERIES, TMM_SCORES


@always_inline
def score_tile_amx[
    key_dtype: DType, //
](
    keys: Pointer[Scalar[key_dtype], _],
    offsets: IntPointer,
    heads: HeadLayout,
    head: Int,
    buffers: AmxBuffers,
    workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
    mut scores: KeyProducts,
):
    """Computes the dot products of one KV head's queries with a tile's tokens, whose keys are at `offsets` of `keys`.

    The last chunk's products are computed in the call for the next head, or at the end of the call for the last head.
    """
    comptime chunk = Bf16Chunk[key_dtype].length
    comptime parts = KV_TILE_TOKENS // LAYOUT_TOKENS
    comptime steps = chunk // LANES
    var chunks = heads.padded_dim // chunk
    var one_tile = buffers.columns == buffers.stride
    for c in range(chunks):
        # Where the queries fill several matrix tiles, all chunks are copied before the first product.
        var buffer = (head * chunks + c) % 2 if one_tile else c
        comptime for part in range(parts):
            comptime if part * steps % parts == 0:
                if one_tile and (head > 0 or c > 0):
                    scores.add[part * steps // parts]()
            prefetcher.run()
            lay_out_keys[part](
                keys, offsets, c * chunk, heads.head_dim, buffers.keys.unsafe_offset(buffer * KV_TILE_TOKENS * chunk)
            )
        if one_tile:
            scores.select_chunk(heads, head, 0, c, buffer, buffers, workspace)
    if not one_tile:
        for block in range(0, buffers.stride, buffers.columns):
            for c in range(chunks):
                scores.select_chunk(heads, head, block, c, c, buffers, workspace)
                comptime for step in range(steps):
                    scores.add[step]()
            scores.flush()
    elif head == heads.kv_heads - 1:
        comptime for step in range(steps):
            scores.add[step]()
        scores.flush()


struct KeyProducts[chunk: Int](TrivialRegisterPassable):
    """The dot products of one chunk of K after the other, 16 tokens by 32 elements at a time.

    A product adds to the sums of the product before the last one. Its latency is some 50 cycles (see `ValueProducts`).
    """

    var keys: Bf16BitsPointer
    """`[KV_TILE_TOKENS, chunk]` bfloat16: the selected chunk."""
    var queries: Pointer[UInt32, MutUntrackedOrigin]
    """`[chunk / 32, 16, N]` pairs of bfloat16: the selected queries."""
    var first: Bool
    """True if the selected chunk is the first of its KV head."""
    var selected: FloatPointer
    """`[KV_TILE_TOKENS, N]`: the scores of the selected chunk."""
    var target: FloatPointer
    """`[KV_TILE_TOKENS, N]`: the scores that the registers hold."""
    var begun: Bool
    """True if the registers hold scores."""
    var columns: Int

    @always_inline
    def __init__(out self, buffers: AmxBuffers):
        self.keys = buffers.keys
        self.queries = buffers.keys.unsafe_bitcast[UInt32]()
        self.first = True
        self.selected = buffers.scores
        self.target = buffers.scores
        self.begun = False
        self.columns = buffers.columns

    @always_inline
    def select_chunk(
        mut self,
        heads: HeadLayout,
        head: Int,
        block: Int,
        c: Int,
        buffer: Int,
        buffers: AmxBuffers,
        workspace: SegmentWorkspace,
    ):
        """Selects chunk `c` of a KV head, which is copied in `buffer`, and its queries from `block` on."""
        var query = head * buffers.stride + block
        self.keys = buffers.keys.unsafe_offset(buffer * KV_TILE_TOKENS * Self.chunk)
        self.queries = workspace.q.unsafe_bitcast[UInt32]().unsafe_offset(
            query * (heads.padded_dim // 2) + c * (Self.chunk // 2) * self.columns
        )
        self.first = c == 0
        self.selected = buffers.scores.unsafe_offset(query * KV_TILE_TOKENS)

    @always_inline
    def add[step: Int](mut self):
        """Adds the products of half `step % 2` of the tokens, 32 elements from `step / 2 * 32` of the chunk on."""
        comptime half = step % 2
        comptime part = step // 2
        comptime if step == 0:
            if self.first:
                self.flush()
                tile_zero[TMM_SCORES]()
                tile_zero[TMM_SCORES + 1]()
                self.target = self.selected
                self.begun = True
        comptime if half == 0:
            tile_load[TMM_QUERIES](self.queries.unsafe_offset(part * 16 * self.columns), self.columns * 4)
        tile_load[TMM_KV](self.keys.unsafe_offset(half * 16 * Self.chunk + 32 * part), Self.chunk * 2)
        tile_dot[TMM_SCORES + half, TMM_KV, TMM_QUERIES]()

    @always_inline
    def flush(mut self):
        """Stores the scores that the registers hold."""
        if self.begun:
            tile_store[TMM_SCORES](self.target, self.columns * 4)
            tile_store[TMM_SCORES + 1](self.target.unsafe_offset(16 * self.columns), self.columns * 4)
            self.begun = False


@always_inline
def lay_out_keys[
    dtype: DType, //, part: Int
](base: Pointer[Scalar[dtype], _], offsets: IntPointer, d: Int, dim: Int, keys: Bf16BitsPointer):
    """Copies one chunk of K as bfloat16, of tokens `part * LAYOUT_TOKENS` and on."""
    comptime chunk = Bf16Chunk[dtype].length
    var whole = d + chunk <= dim
    comptime for i in range(LAYOUT_TOKENS):
        comptime token = part * LAYOUT_TOKENS + i
        var source = base.unsafe_offset(offsets[unsafe_offset=token] + d)
        var wide = Bf16Chunk[dtype]()
        if whole:
            widen_chunk[True](source, chunk, LookupTables[dtype](), wide)
        else:
            widen_chunk[False](source, dim - d, LookupTables[dtype](), wide)
        comptime for words in range(chunk // 32):
            keys.unsafe_store(token * chunk + 32 * words, wide.words[words])
