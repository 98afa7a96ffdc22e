"""The dot products of one tile of tokens on matrix tiles (`tiles_amx.mojo`), while K is laid out for them.

K is the left operand, 16 tokens by 32 elements, the queries the right one, packed once a segment. K could be loaded from
where it lies, 16 slots of a page at a time, but the order of pages is a bad one for the memory: copied, its tokens may lie
anywhere.
"""

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx import tile_dot, tile_load, tile_store, tile_zero
from ....isa.convert import LANES
from ..kv_tile import FloatPointer, HeadLayout, SegmentWorkspace, KVTile
from ..prefetch import Prefetcher, KV_TILE_TOKENS
from .layout import AmxBuffers, LAYOUT_TOKENS, TMM_QUERIES, TMM_KV, TMM_SCORES, Bf16BitsPointer
from .widen import Bf16Chunk, widen_chunk


@always_inline
def score_tile_amx(
    k: PagedKVCache,
    tile: KVTile,
    heads: HeadLayout,
    head: Int,
    buffers: AmxBuffers,
    workspace: SegmentWorkspace,
    mut prefetcher: Prefetcher,
    mut scores: KeyProducts,
):
    """The dot products of one KV head's queries with the tile's tokens; the last chunk's come in the call for the next head."""
    comptime chunk = Bf16Chunk[k.dtype].length
    comptime parts = KV_TILE_TOKENS // LAYOUT_TOKENS
    comptime steps = chunk // LANES
    var chunks = heads.padded_dim // chunk
    var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var one_block = buffers.columns == buffers.stride
    for c in range(chunks):
        # Several blocks of queries take one chunk after the other, each of them all.
        var buffer = (head * chunks + c) % 2 if one_block else c
        comptime for part in range(parts):
            comptime if part * steps % parts == 0:
                if one_block and (head > 0 or c > 0):
                    scores.add[part * steps // parts]()
            prefetcher.run()
            lay_out_keys[part](
                base, tile, c * chunk, heads.head_dim, buffers.keys.unsafe_offset(buffer * KV_TILE_TOKENS * chunk)
            )
        if one_block:
            scores.choose(heads, head, 0, c, buffer, buffers, workspace)
    if not one_block:
        for block in range(0, buffers.stride, buffers.columns):
            for c in range(chunks):
                scores.choose(heads, head, block, c, c, buffers, workspace)
                comptime for step in range(steps):
                    scores.add[step]()
            scores.finish()
    elif head == heads.kv_heads - 1:
        comptime for step in range(steps):
            scores.add[step]()
        scores.finish()


struct KeyProducts[chunk: Int](TrivialRegisterPassable):
    """The dot products of one chunk of K after the other, 16 tokens by 32 elements at a time.

    Every one adds to what the last but one gave, and is waited for some 50 cycles: see `ValueProducts`.
    """

    var keys: Bf16BitsPointer
    """`[KV_TILE_TOKENS, chunk]` bfloat16: the chosen chunk."""
    var queries: Pointer[UInt32, MutUntrackedOrigin]
    """`[chunk / 32, 16, N]` pairs of bfloat16."""
    var first: Bool
    """Whether it is the first of its KV head."""
    var chosen: FloatPointer
    """Where the chosen chunk's scores belong, `[KV_TILE_TOKENS, N]`."""
    var target: FloatPointer
    """Where those in the registers do."""
    var begun: Bool
    """Whether there are such."""
    var columns: Int

    @always_inline
    def __init__(out self, buffers: AmxBuffers):
        self.keys = buffers.keys
        self.queries = buffers.keys.unsafe_bitcast[UInt32]()
        self.first = True
        self.chosen = buffers.scores
        self.target = buffers.scores
        self.begun = False
        self.columns = buffers.columns

    @always_inline
    def choose(
        mut self,
        heads: HeadLayout,
        head: Int,
        block: Int,
        c: Int,
        buffer: Int,
        buffers: AmxBuffers,
        workspace: SegmentWorkspace,
    ):
        """Chunk `c` of a KV head and its queries from `block` on are what comes next, laid out in `buffer`."""
        var query = head * buffers.stride + block
        self.keys = buffers.keys.unsafe_offset(buffer * KV_TILE_TOKENS * Self.chunk)
        self.queries = workspace.q.unsafe_bitcast[UInt32]().unsafe_offset(
            query * (heads.padded_dim // 2) + c * (Self.chunk // 2) * self.columns
        )
        self.first = c == 0
        self.chosen = buffers.scores.unsafe_offset(query * KV_TILE_TOKENS)

    @always_inline
    def add[step: Int](mut self):
        """The products of half `step % 2` of the tokens with elements `step / 2 * 32` and on of the chosen chunk."""
        comptime half = step % 2
        comptime part = step // 2
        comptime if step == 0:
            if self.first:
                self.finish()
                tile_zero[TMM_SCORES]()
                tile_zero[TMM_SCORES + 1]()
                self.target = self.chosen
                self.begun = True
        comptime if half == 0:
            tile_load[TMM_QUERIES](self.queries.unsafe_offset(part * 16 * self.columns), self.columns * 4)
        tile_load[TMM_KV](self.keys.unsafe_offset(half * 16 * Self.chunk + 32 * part), Self.chunk * 2)
        tile_dot[TMM_SCORES + half, TMM_KV, TMM_QUERIES]()

    @always_inline
    def finish(mut self):
        """Stores the scores that are in the registers."""
        if self.begun:
            tile_store[TMM_SCORES](self.target, self.columns * 4)
            tile_store[TMM_SCORES + 1](self.target.unsafe_offset(16 * self.columns), self.columns * 4)
            self.begun = False


@always_inline
def lay_out_keys[
    dtype: DType, //, part: Int
](base: Pointer[Scalar[dtype], _], tile: KVTile, d: Int, dim: Int, keys: Bf16BitsPointer):
    """Copies one chunk of K of part `part` of the tokens, as bfloat16."""
    comptime chunk = Bf16Chunk[dtype].length
    var whole = d + chunk <= dim
    comptime for i in range(LAYOUT_TOKENS):
        comptime token = part * LAYOUT_TOKENS + i
        var source = base.unsafe_offset(tile.k[unsafe_offset=token] + d)
        var wide = Bf16Chunk[dtype]()
        if whole:
            widen_chunk[True](source, chunk, wide)
        else:
            widen_chunk[False](source, dim - d, wide)
        comptime for words in range(chunk // 32):
            keys.unsafe_store(token * chunk + 32 * words, wide.words[words])
