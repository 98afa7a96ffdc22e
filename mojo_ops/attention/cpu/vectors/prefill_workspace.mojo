"""The working memory of prefill in vectors (`prefill.mojo`), and how many sums the registers of the target hold."""

from std.math import align_up

from ....cache.pointers import untracked
from ....isa.bf16_dot import USES_BF16_DOT
from ....isa.convert import LANES, is_float8
from ....isa.memory import FloatPointer, align_to_line
from ....isa.registers import HAS_32_REGISTERS, REGISTER_LANES
from ..prefetch import IntPointer
from ..prefill.queries import PrefillQueries, QUERY_COLUMNS, padded_queries
from ..prefill.step import STEP_OFFSETS, STEP_TOKENS
from ..workspace import HeadLayout

comptime VECTOR_PREFILL_MIN_QUERIES = 32
"""Queries a KV head of a prefill block, at least."""
comptime WordPointer = Pointer[UInt32, MutUntrackedOrigin]
"""32-bit words: a float32, or a pair of bfloat16."""
comptime LINE_WORDS = 16
"""Words of a cache line."""
comptime VALUE_COLUMNS = 32
"""Elements of head_dim of V that lie side by side, two vectors: what all chunks are multiples of."""

comptime REGISTERS_EACH = LANES // REGISTER_LANES
"""Registers of a vector of 16 lanes."""
comptime MAX_SUMS = (24 if HAS_32_REGISTERS else 12) // REGISTERS_EACH
"""Vectors of sums that stay in registers."""
comptime TILES_AT_ONCE = 2 if REGISTERS_EACH == 1 else 1
"""Query tiles whose dot products are computed together."""
comptime LANES_AT_ONCE = 4 if REGISTERS_EACH == 1 else 2
"""Partial sums of a dot product that are computed together."""
comptime SUM_VECTORS = 4 if REGISTERS_EACH == 1 else 1
"""Vectors of head_dim whose weighted sums are computed together."""


def score_tokens(tiles: Int) -> Int:
    """Tokens whose dot products with `tiles` query tiles are computed together."""
    return (16 if REGISTERS_EACH == 1 else MAX_SUMS) // (tiles * LANES_AT_ONCE)


comptime KEY_TOKENS = max(align_up(STEP_TOKENS, score_tokens(1)), align_up(STEP_TOKENS, score_tokens(TILES_AT_ONCE)))
"""Tokens that keys and scores have memory for."""
comptime TILE_SCORES = KEY_TOKENS * QUERY_COLUMNS


def takes_pairs(dtype: DType, kv_dtype: DType) -> Bool:
    """Return whether dot products are those of bfloat16 pairs, which is exact: else they are float32 products."""
    return USES_BF16_DOT and dtype == DType.bfloat16 and (kv_dtype == DType.bfloat16 or is_float8(kv_dtype))


struct VectorPrefillWorkspace(Movable):
    """Working memory of one task for one KV head of a prefill block. Q is `padded_queries`, P and Pv the padded
    head_dim of keys and of V.

    A word is one element of head_dim, or a pair where `takes_pairs`; a head has P or P / 2 words, W.
    """

    var memory: List[Float32]
    var offsets: List[Int]
    """Token offsets of two steps, then the row addresses of a `Prefetcher`."""
    var queries: PrefillQueries
    var q: WordPointer
    """`[Q / 16, W, 16]`."""
    var keys: WordPointer
    """`[W / 16, KEY_TOKENS, 16]`: a cache line of each token side by side."""
    var values: FloatPointer
    """`[Pv / 32, STEP_TOKENS, 32]` float32, in the element order of `load_chunk`."""
    var scores: FloatPointer
    """`[TILES_AT_ONCE, KEY_TOKENS, 16]`."""
    var weights: FloatPointer
    """`[STEP_TOKENS, 16]`."""
    var key_scales: FloatPointer
    """`[STEP_TOKENS]`: what each token's codes of K are multiplied by."""
    var value_scales: FloatPointer
    """`[STEP_TOKENS]`: the same of V."""

    def __init__(out self, queries: Int, heads: HeadLayout, ranges: Int):
        """For up to `queries` queries; without any, no memory but a few numbers.

        Args:
            queries: The queries of a KV head of a block.
            heads: The head sizes.
            ranges: What a `Prefetcher` reads of a token, in ranges of one length.
        """
        var room = padded_queries(queries)
        var padded_dim = heads.padded_dim
        var keys = KEY_TOKENS * padded_dim if room > 0 else 0
        var values = STEP_TOKENS * heads.padded_value if room > 0 else 0
        self.memory = List[Float32](
            unsafe_uninit_length=room * padded_dim
            + keys
            + values
            + (TILES_AT_ONCE * KEY_TOKENS + STEP_TOKENS) * QUERY_COLUMNS
            + 2 * STEP_TOKENS
            + PrefillQueries.num_floats(queries, heads.padded_value)
            + 16
        )
        self.offsets = List[Int](length=2 * STEP_OFFSETS + ranges * STEP_TOKENS, fill=0)
        var at = align_to_line(untracked(self.memory.unsafe_ptr()))
        self.q = at.unsafe_bitcast[UInt32]()
        at = at.unsafe_offset(room * padded_dim)
        self.keys = at.unsafe_bitcast[UInt32]()
        self.values = at.unsafe_offset(keys)
        self.scores = self.values.unsafe_offset(values)
        self.weights = self.scores.unsafe_offset(TILES_AT_ONCE * TILE_SCORES)
        self.key_scales = self.weights.unsafe_offset(STEP_TOKENS * QUERY_COLUMNS)
        self.value_scales = self.key_scales.unsafe_offset(STEP_TOKENS)
        self.queries = PrefillQueries(queries, heads.padded_value, self.value_scales.unsafe_offset(STEP_TOKENS))

    def offset_buffer(self, index: Int) -> IntPointer:
        """The offsets of step buffer `index`, 0 or 1; at 2 the memory for a `Prefetcher`'s row addresses."""
        return untracked(self.offsets.unsafe_ptr()).unsafe_offset(STEP_OFFSETS * index)
