"""The dot products of one tile of tokens on matrix tiles (`tiles_amx.mojo`), while K is laid out for them.

K is the left operand, 16 tokens by 32 elements, the queries the right one, packed once a segment. K could be loaded from
where it lies, 16 slots of a page at a time, but the order of pages is a bad one for the memory: copied, its tokens may lie
anywhere.
"""

from ....cache.paged_kv_cache import PagedKVCache
from ....isa.amx import tile_dot, tile_load, tile_store, tile_zero
from ....isa.convert import HALF
from ..kv_tile import Floats, Heads, Scratch, Tile
from ..prefetch import Ahead, TILE
from .layout import Engine, PART, QUERIES, ROWS, SCORES, Words16
from .widen import Widened, widen_chunk


@always_inline
def score_tile_amx(
    k: PagedKVCache,
    tile: Tile,
    heads: Heads,
    head: Int,
    engine: Engine,
    scratch: Scratch,
    mut ahead: Ahead,
    mut scores: Scores,
):
    """The dot products of one KV head's queries with the tile's tokens; the last chunk's come in the call for the next head."""
    comptime chunk = Widened[k.dtype].length
    comptime parts = TILE // PART
    comptime steps = chunk // HALF
    var chunks = heads.padded // chunk
    var base = k.blocks.ptr.unsafe_offset(head * heads.k_stride)
    var one_block = engine.columns == engine.stride
    for c in range(chunks):
        # Several blocks of queries take one chunk after the other, each of them all.
        var place = (head * chunks + c) % 2 if one_block else c
        comptime for part in range(parts):
            comptime if part * steps % parts == 0:
                if one_block and (head > 0 or c > 0):
                    scores.add[part * steps // parts]()
            ahead.run()
            lay_out_keys[part](base, tile, c * chunk, heads.dim, engine.keys.unsafe_offset(place * TILE * chunk))
        if one_block:
            scores.choose(heads, head, 0, c, place, engine, scratch)
    if not one_block:
        for block in range(0, engine.stride, engine.columns):
            for c in range(chunks):
                scores.choose(heads, head, block, c, c, engine, scratch)
                comptime for step in range(steps):
                    scores.add[step]()
            scores.finish()
    elif head == heads.kv_heads - 1:
        comptime for step in range(steps):
            scores.add[step]()
        scores.finish()


struct Scores[chunk: Int](TrivialRegisterPassable):
    """The dot products of one chunk of K after the other, 16 tokens by 32 elements at a time.

    Every one adds to what the last but one gave, and is waited for some 50 cycles: see `Sums`.
    """

    var keys: Words16
    """`[TILE, chunk]` bfloat16: the chosen chunk."""
    var queries: Pointer[UInt32, MutUntrackedOrigin]
    """`[chunk / 32, 16, N]` pairs of bfloat16."""
    var first: Bool
    """Whether it is the first of its KV head."""
    var chosen: Floats
    """Where the chosen chunk's scores belong, `[TILE, N]`."""
    var target: Floats
    """Where those in the registers do."""
    var begun: Bool
    """Whether there are such."""
    var columns: Int

    @always_inline
    def __init__(out self, engine: Engine):
        self.keys = engine.keys
        self.queries = engine.keys.unsafe_bitcast[UInt32]()
        self.first = True
        self.chosen = engine.scores
        self.target = engine.scores
        self.begun = False
        self.columns = engine.columns

    @always_inline
    def choose(mut self, heads: Heads, head: Int, block: Int, c: Int, place: Int, engine: Engine, scratch: Scratch):
        """Chunk `c` of a KV head and its queries from `block` on are what comes next, laid out in `place`."""
        var query = head * engine.stride + block
        self.keys = engine.keys.unsafe_offset(place * TILE * Self.chunk)
        self.queries = scratch.q.unsafe_bitcast[UInt32]().unsafe_offset(
            query * (heads.padded // 2) + c * (Self.chunk // 2) * self.columns
        )
        self.first = c == 0
        self.chosen = engine.scores.unsafe_offset(query * TILE)

    @always_inline
    def add[step: Int](mut self):
        """The products of half `step % 2` of the tokens with elements `step / 2 * 32` and on of the chosen chunk."""
        comptime half = step % 2
        comptime part = step // 2
        comptime if step == 0:
            if self.first:
                self.finish()
                tile_zero[SCORES]()
                tile_zero[SCORES + 1]()
                self.target = self.chosen
                self.begun = True
        comptime if half == 0:
            tile_load[QUERIES](self.queries.unsafe_offset(part * 16 * self.columns), self.columns * 4)
        tile_load[ROWS](self.keys.unsafe_offset(half * 16 * Self.chunk + 32 * part), Self.chunk * 2)
        tile_dot[SCORES + half, ROWS, QUERIES]()

    @always_inline
    def finish(mut self):
        """Stores the scores that are in the registers."""
        if self.begun:
            tile_store[SCORES](self.target, self.columns * 4)
            tile_store[SCORES + 1](self.target.unsafe_offset(16 * self.columns), self.columns * 4)
            self.begun = False


@always_inline
def lay_out_keys[
    dtype: DType, //, part: Int
](base: Pointer[Scalar[dtype], _], tile: Tile, d: Int, dim: Int, keys: Words16):
    """Copies one chunk of K of part `part` of the tokens, as bfloat16."""
    comptime chunk = Widened[dtype].length
    var whole = d + chunk <= dim
    comptime for i in range(PART):
        comptime token = part * PART + i
        var source = base.unsafe_offset(tile.k[unsafe_offset=token] + d)
        var wide = Widened[dtype]()
        if whole:
            widen_chunk[True](source, chunk, wide)
        else:
            widen_chunk[False](source, dim - d, wide)
        comptime for words in range(chunk // 32):
            keys.unsafe_store(token * chunk + 32 * words, wide.words[words])
