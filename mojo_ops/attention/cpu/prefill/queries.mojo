"""The queries of a prefill segment: what each sees, its running softmax state and its weighted values."""

from std.bit import count_leading_zeros, count_trailing_zeros
from std.math import ceildiv
from std.utils import IndexList

from ....isa.convert import FloatVector, LANES
from ....isa.memory import FloatPointer
from ...logits import Logits
from ...params import AttentionRows
from ...row_masks import MASK_TOKENS, bits_between
from ...softmax import AttentionState, MINUS_INFINITY
from ..plan import Segment
from ..workspace import HeadLayout, RunningStates

comptime Int32Pointer = Pointer[Int32, MutUntrackedOrigin]
comptime WordPointer = Pointer[UInt32, MutUntrackedOrigin]
comptime STEP_WORDS = 2
"""Words of `MASK_TOKENS` bits that hold what a query sees of a step."""
comptime QUERY_COLUMNS = 16
"""Queries of a query tile, one in each lane."""
comptime PREFILL_MAX_QUERIES = 256
"""Queries a KV head of a block, at most: the weighted values of more would not stay in the cache."""
comptime LATENT_MAX_QUERIES = 128
"""The same in latent attention, whose heads are wider."""


def padded_queries(queries: Int) -> Int:
    """`queries` rounded up to whole pairs of query tiles."""
    return ceildiv(queries, 2 * QUERY_COLUMNS) * 2 * QUERY_COLUMNS


struct PrefillQueries(RunningStates, TrivialRegisterPassable):
    """The queries of one KV head of a block, in query tiles. Q is `padded_queries`, Pv the padded head_dim of V."""

    var own_acc: FloatPointer
    """`[Q, Pv]`: memory for the weighted values of a block that is not split."""
    var acc: FloatPointer
    """`[Q, Pv]`: weighted values, in `own_acc` or in a split result."""
    var greatest: FloatPointer
    """`[Q]`: each query's lagging maximum, which its weights are relative to."""
    var totals: FloatPointer
    """`[Q]`: the sum of each query's weights."""
    var first: Int32Pointer
    """`[Q]`: the first token that a query sees."""
    var last: Int32Pointer
    """`[Q]`: the token after the last one that a query sees."""
    var seen: WordPointer
    """`[STEP_WORDS, Q]`: where there are masks, bit `i` of word `w` says whether a query sees token `i` of the `w`-th
    `MASK_TOKENS` tokens of the step."""
    var room: Int
    """Q: the queries that there is memory for."""
    var token_offset: Int
    """The position of the request's token 0."""

    @staticmethod
    def num_floats(queries: Int, padded_value: Int) -> Int:
        """The memory of so many queries in float32 numbers, whole cache lines."""
        return padded_queries(queries) * (padded_value + 4 + STEP_WORDS)

    def __init__(out self, queries: Int, padded_value: Int, memory: FloatPointer):
        """For up to `queries` queries, in `num_floats` numbers of `memory`, which begins a cache line."""
        var room = padded_queries(queries)
        self.own_acc = memory
        self.acc = memory
        self.greatest = memory.unsafe_offset(room * padded_value)
        self.totals = self.greatest.unsafe_offset(room)
        self.first = self.greatest.unsafe_offset(2 * room).unsafe_bitcast[Int32]()
        self.last = self.greatest.unsafe_offset(3 * room).unsafe_bitcast[Int32]()
        self.seen = self.greatest.unsafe_offset(4 * room).unsafe_bitcast[UInt32]()
        self.room = room
        self.token_offset = 0

    def clear(mut self, rows: AttentionRows, segment: Segment, logits: Logits, heads: HeadLayout):
        """Makes the states of a segment's queries empty, and writes which tokens they see."""
        var queries = segment.num_rows * heads.group
        var room = padded_queries(queries)
        self.token_offset = rows.masks.offset(Int(rows.row_batch[unsafe_offset=segment.row]))
        for m in range(room):
            # A query of padding sees what the last query sees, so that it alone does not cause masking.
            var row = segment.row + min(m, queries - 1) // heads.group
            var length = Int(rows.row_lengths[unsafe_offset=row])
            self.first[unsafe_offset=m] = Int32(rows.first_token(row, logits))
            self.last[unsafe_offset=m] = Int32(length)
            # The maximum of a padding query is 0: its dot products are 0, and do not exceed it.
            self.greatest[unsafe_offset=m] = MINUS_INFINITY if m < queries else 0
            self.totals[unsafe_offset=m] = 0
        for i in range(0, room * heads.padded_value, LANES):
            self.acc.unsafe_store(i, FloatVector(0))

    @always_inline
    def state(self, query: Int) -> AttentionState:
        return AttentionState(self.greatest[unsafe_offset=query], self.totals[unsafe_offset=query])

    @always_inline
    def first_seen[tiles: Int](self, m: Int) -> Int:
        """The first token that any of the queries of `tiles` query tiles sees, from query `m` on."""
        return Int(self.first.unsafe_load[width=tiles * QUERY_COLUMNS](m).reduce_min())

    @always_inline
    def end_seen[tiles: Int](self, m: Int) -> Int:
        """The token after the last one that any of the queries of `tiles` query tiles sees."""
        return Int(self.last.unsafe_load[width=tiles * QUERY_COLUMNS](m).reduce_max())

    def read_masks(
        self,
        rows: AttentionRows,
        segment: Segment,
        logits: Logits,
        group: Int,
        starts: IndexList[STEP_WORDS],
        ends: IndexList[STEP_WORDS],
    ) -> Bool:
        """Writes which tokens of a step the queries see; returns whether any of them sees one.

        Args:
            rows: The rows of the call.
            segment: The segment.
            logits: The options of the call.
            group: Query heads of a KV head.
            starts: The token of each word's first bit.
            ends: The token from which on a word's bits are 0: it is not in the step, or in another word.
        """
        var queries = segment.num_rows * group
        var any = UInt32(0)
        comptime for w in range(STEP_WORDS):
            var words = self.seen.unsafe_offset(w * self.room)
            for row in range(segment.num_rows):
                var bits = rows.seen_bits(segment.row + row, starts[w], logits)
                bits &= bits_between(starts[w], starts[w], ends[w])
                any |= bits
                for g in range(group):
                    words[unsafe_offset=row * group + g] = bits
            # As in `clear`, padding sees what the last query sees.
            for m in range(queries, padded_queries(queries)):
                words[unsafe_offset=m] = words[unsafe_offset=queries - 1]
        return any != 0

    @always_inline
    def seen_words(self, m: Int, word: Int) -> SIMD[DType.uint32, QUERY_COLUMNS]:
        """Return what the 16 queries from `m` on see of `MASK_TOKENS` tokens of the step."""
        return self.seen.unsafe_load[width=QUERY_COLUMNS](word * self.room + m)

    @always_inline
    def seen_range[tiles: Int](self, m: Int) -> Tuple[Int, Int]:
        """The first token of the step that any of the queries of `tiles` query tiles sees, and the one after the last.

        Two zeros where they see none.
        """
        var seen = UInt64(0)
        comptime for w in range(STEP_WORDS):
            var words = self.seen.unsafe_load[width=tiles * QUERY_COLUMNS](w * self.room + m)
            seen |= UInt64(words.reduce_or()) << UInt64(w * MASK_TOKENS)
        if seen == 0:
            return (0, 0)
        return (Int(count_trailing_zeros(seen)), 64 - Int(count_leading_zeros(seen)))

    @always_inline
    def all_see_word(self, m: Int, word: Int, bits: UInt32) -> Bool:
        """Return whether each of the 16 queries from `m` on sees all of these tokens of a word."""
        return self.seen_words(m, word).reduce_and() & bits == bits

    @always_inline
    def all_see_step(self, m: Int, begin: Int, end: Int) -> Bool:
        """Return whether the 16 queries from `m` on see all tokens `[begin, end)`, counted from the step's first."""
        var all_see = True
        comptime for w in range(STEP_WORDS):
            all_see &= self.all_see_word(m, w, bits_between(w * MASK_TOKENS, begin, end))
        return all_see

    @always_inline
    def all_see(self, m: Int, begin: Int, end: Int) -> Bool:
        """Return whether each of the 16 queries from `m` on sees all tokens `[begin, end)`."""
        return (
            Int(self.first.unsafe_load[width=QUERY_COLUMNS](m).reduce_max()) <= begin
            and Int(self.last.unsafe_load[width=QUERY_COLUMNS](m).reduce_min()) >= end
        )
