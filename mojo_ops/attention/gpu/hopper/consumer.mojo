"""A tile of the Hopper kernel: what the warpgroup that computes does with K and V once they are in shared memory.

`decode_hopper.mojo` explains the scheme, `smem.mojo` where everything lies.
"""

from std.math import exp2
from std.sys._assembly import inlined_assembly
from max.gpu import thread_idx
from max.gpu.compute.mma import (
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.memory import fence_async_view_proxy
from max.gpu.primitives import warp
from max.gpu.sync import named_barrier

from ...softmax import MINUS_INFINITY
from ..params import DecodeRows, NOT_A_NUMBER
from ..scheduler import Partials
from ..split_kv import INVALID, WHOLE, WorkItem
from .pipeline import Ring, Shared
from .shared_memory import (
    ATOM,
    CHUNK,
    CONSUMERS,
    CONSUMER_WARPS,
    Rows,
    SharedMemory,
    TILE,
    Tiles,
    WGMMA_K,
    fragment_column,
    fragment_row,
)

comptime CONSUMER_BARRIER: Int32 = 1
"""Barrier 0 is the whole block's."""


struct Consumer[dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int]:
    """A thread of the warpgroup that computes.

    A wgmma's result is `[64, heads]`: tokens for the scores, dims for the sums. A thread holds `WIDTH` numbers of it,
    in `COLUMNS` columns, the same ones for both: so a head's state sits beside its scores and its sums.
    """

    comptime Map = SharedMemory[Self.kv_dtype, Self.head_dim, Self.heads]
    comptime compute = DType.float16 if Self.Map.WIDENED else Self.dtype
    """Of the operands: float16 holds every float8 exactly."""
    comptime WIDTH = Self.heads // 2
    comptime COLUMNS = Self.heads // 4
    comptime Fragment = SIMD[DType.float32, Self.WIDTH]

    var shared: Shared[Self.kv_dtype, Self.head_dim, Self.heads]
    var rows: DecodeRows[Self.dtype]
    var item: WorkItem
    var group: Int32
    """Query heads of the KV head; the columns beyond are padding."""
    var first_head: Int32
    var thread: Int
    var scores: Self.Fragment
    """One tile's scores, then weights; rows are tokens."""
    var acc: Array[Self.Fragment, Self.Map.ATOMS]
    """Sums of weighted values, relative to `greatest`; rows are the 64 dims of an atom."""
    var greatest: Array[Float32, Self.COLUMNS]
    var total: Array[Float32, Self.COLUMNS]
    """The weights of this thread's own rows alone, until `finish`."""
    var slope: Array[Float32, Self.COLUMNS]

    @always_inline
    def __init__(
        out self,
        shared: Shared[Self.kv_dtype, Self.head_dim, Self.heads],
        rows: DecodeRows[Self.dtype],
        item: WorkItem,
        kv_head: Int32,
        kv_heads: Int32,
    ):
        self.shared = shared
        self.rows = rows
        self.item = item
        self.group = rows.num_heads // kv_heads
        self.first_head = kv_head * self.group
        self.thread = Int(thread_idx.x)
        self.scores = 0
        self.acc = Array[Self.Fragment, Self.Map.ATOMS](fill=0)
        self.greatest = Array[Float32, Self.COLUMNS](fill=MINUS_INFINITY)
        self.total = Array[Float32, Self.COLUMNS](fill=0)
        self.slope = Array[Float32, Self.COLUMNS](fill=0)
        comptime for c in range(Self.COLUMNS):
            if self.head(c) < self.group:
                self.slope[c] = rows.slope(self.first_head + self.head(c))

    @always_inline
    def head(self, column: Int) -> Int32:
        """The head, within the group, of this thread's `column`-th column."""
        return Int32(fragment_column(self.thread, (column // 2) * 4 + column % 2))

    @staticmethod
    @always_inline
    def column(i: Int) -> Int:
        """Which of the thread's columns element `i` of a fragment is in."""
        return (i // 4) * 2 + i % 2

    @always_inline
    def load_query(self):
        """Q of the group to shared memory; zeros for the padding."""
        comptime chunks = Self.head_dim // 8
        for i in range(self.thread, Self.heads * chunks, CONSUMERS):
            var head, chunk = divmod(i, chunks)
            var q = SIMD[Self.compute, 8](0)
            if Int32(head) < self.group:
                q = self.rows.q.unsafe_load[width=8](
                    self.rows.element(self.item.row, self.first_head + Int32(head), Int32(chunk * 8))
                ).cast[Self.compute]()
            self.shared.at[Scalar[Self.compute]](Self.Map.query(head, chunk)).unsafe_store[alignment=CHUNK](q)
        # Written by ordinary stores, read by the tensor cores (the async proxy): fence, then everyone.
        fence_async_view_proxy()
        named_barrier[Int32(CONSUMERS)](CONSUMER_BARRIER)

    @always_inline
    def multiply_keys(mut self, tile: Int):
        """S^T = K Q^T of the tile of K that lies at `tile`."""
        wgmma_fence_aligned()
        comptime for step in range(Self.head_dim // WGMMA_K):
            self.scores = wgmma_async[
                TILE,
                Self.heads,
                WGMMA_K,
                a_type=Self.compute,
                b_type=Self.compute,
                scale_d=0 if step == 0 else 1,
            ](
                self.shared.descriptor[Self.compute](Self.Map.key_operand(tile, step)),
                self.shared.descriptor[Self.compute](Self.Map.query_operand(step)),
                self.scores,
            )
        wgmma_commit_group_sync()
        settle(self.scores)

    @always_inline
    def score(mut self, ring: Ring[Self.Map.SLOTS], tiles: Tiles, tile: Int32):
        """One tile's weights and their reference; rescales what was summed so far."""
        var wanted = tiles.wanted(tile)
        comptime if Self.Map.WIDENED:
            with ring.consume(2 * tile) as slot:
                self.widen[is_value=False](slot, Self.Map.KEYS, wanted)
            fence_async_view_proxy()
            named_barrier[Int32(CONSUMERS)](CONSUMER_BARRIER)
            self.multiply_keys(Self.Map.KEYS)
        else:
            with ring.consume(2 * tile) as slot:
                self.multiply_keys(slot * Self.Map.SLOT_BYTES)
        var highest = Array[Float32, Self.COLUMNS](fill=MINUS_INFINITY)
        comptime for i in range(Self.WIDTH):
            comptime c = Self.column(i)
            var row = Int32(fragment_row(self.thread, i))
            var score = self.rows.score(self.scores[i], self.slope[c], tiles.token(tile) + row)
            # A choice, not a sum with -inf: a row that does not count may hold NaN.
            self.scores[i] = score if row >= wanted.begin and row < wanted.end else MINUS_INFINITY
            highest[c] = max(highest[c], self.scores[i])
        self.over_tile[greatest=True](highest)

        comptime for c in range(Self.COLUMNS):
            highest[c] = max(highest[c], self.greatest[c])
            # Where no score is a number above -inf, weights are relative to 0.
            var reference = highest[c] if highest[c] != MINUS_INFINITY else 0
            var factor = exp2(self.greatest[c] - reference)
            self.greatest[c] = highest[c]
            self.total[c] *= factor
            comptime for i in range(Self.WIDTH):
                comptime if Self.column(i) == c:
                    self.scores[i] = exp2(self.scores[i] - reference)
                    self.total[c] += self.scores[i]
                    comptime for atom in range(Self.Map.ATOMS):
                        self.acc[atom][i] *= factor

    @always_inline
    def over_tile[*, greatest: Bool](self, mut x: Array[Float32, Self.COLUMNS]):
        """The greatest, or the sum, over all rows of a tile; the same bits in every thread.

        `exchange` is free: between its last reads and here lies another barrier of the consumers (in `weigh`, or the
        one in `load_query`).
        """
        comptime for c in range(Self.COLUMNS):
            # The lanes of a warp that hold the same columns are 4 apart.
            comptime for bit in range(2, 5):
                var other = warp.shuffle_xor(x[c], UInt32(1 << bit))
                x[c] = max(x[c], other) if greatest else x[c] + other
        if self.thread % 32 < 4:
            comptime for c in range(Self.COLUMNS):
                self.shared.at[Float32](Self.Map.exchange(self.thread // 32, Int(self.head(c))))[] = x[c]
        named_barrier[Int32(CONSUMERS)](CONSUMER_BARRIER)
        comptime for c in range(Self.COLUMNS):
            x[c] = self.shared.at[Float32](Self.Map.exchange(0, Int(self.head(c))))[]
            comptime for w in range(1, CONSUMER_WARPS):
                var other = self.shared.at[Float32](Self.Map.exchange(w, Int(self.head(c))))[]
                x[c] = max(x[c], other) if greatest else x[c] + other

    @always_inline
    def weigh(mut self, ring: Ring[Self.Map.SLOTS], tiles: Tiles, tile: Int32):
        """Adds one tile's weighted values."""
        # The weights of the last tile are no longer read: every warp has since waited for its products (`settle`) and
        # then passed the barrier in `over_tile`.
        comptime for i in range(0, Self.WIDTH, 2):
            var pair = SIMD[DType.float32, 2](self.scores[i], self.scores[i + 1]).cast[Self.compute]()
            var at = Self.Map.weights(fragment_row(self.thread, i), fragment_column(self.thread, i))
            self.shared.at[Scalar[Self.compute]](at).unsafe_store[alignment=4](pair)
        # Weights, zeros and widened values are written by ordinary stores and read by the tensor cores: each time a
        # fence, then everyone. The fence also puts the zeros before the copy that fills this slot next.
        var wanted = tiles.wanted(tile)
        comptime if Self.Map.WIDENED:
            with ring.consume(2 * tile + 1) as slot:
                self.widen[is_value=True](slot, Self.Map.VALUES, wanted)
            fence_async_view_proxy()
            named_barrier[Int32(CONSUMERS)](CONSUMER_BARRIER)
            self.multiply_values(Self.Map.VALUES)
        else:
            with ring.consume(2 * tile + 1) as slot:
                if not wanted.all():
                    self.clear(slot, wanted)
                fence_async_view_proxy()
                named_barrier[Int32(CONSUMERS)](CONSUMER_BARRIER)
                self.multiply_values(slot * Self.Map.SLOT_BYTES)

    @always_inline
    def multiply_values(mut self, tile: Int):
        """O^T += V^T P^T of the tile of V that lies at `tile`."""
        wgmma_fence_aligned()
        comptime for step in range(TILE // WGMMA_K):
            comptime for atom in range(Self.Map.ATOMS):
                self.acc[atom] = wgmma_async[
                    64,
                    Self.heads,
                    WGMMA_K,
                    a_type=Self.compute,
                    b_type=Self.compute,
                    # Both operands have the other dimension adjacent, not the tokens.
                    layout_a="col",
                    layout_b="row",
                ](
                    self.shared.descriptor[Self.compute](Self.Map.value_operand(tile, atom, step)),
                    self.shared.descriptor[Self.compute](Self.Map.weight_operand(step)),
                    self.acc[atom],
                )
        wgmma_commit_group_sync()
        comptime for atom in range(Self.Map.ATOMS):
            settle(self.acc[atom])

    @always_inline
    def clear(self, slot: Int, wanted: Rows):
        """Zeros for the values of rows that do not count: their weight is 0, but 0 * NaN is NaN."""
        for i in range(self.thread, Self.Map.TILE_BYTES // CHUNK, CONSUMERS):
            var row = Int32(Self.Map.row_of_chunk(i))
            if row < wanted.begin or row >= wanted.end:
                # Whole rows, so that the order of their chunks does not matter.
                var at = slot * Self.Map.SLOT_BYTES + i * CHUNK
                self.shared.at[UInt32](at).unsafe_store[alignment=CHUNK](SIMD[DType.uint32, 4](0))

    @always_inline
    def widen[*, is_value: Bool](self, slot: Int, to: Int, wanted: Rows):
        """A float8 tile to float16, swizzled; the values of rows that do not count become 0, as in `clear`.

        The last products that read `to` are done: barriers of the consumers lie in between (as for the weights).
        """
        comptime per_token = Self.head_dim // 16
        comptime assert TILE * per_token % CONSUMERS == 0, "every thread takes the same number of pieces"
        comptime for round in range(TILE * per_token // CONSUMERS):
            var i = round * CONSUMERS + self.thread
            var token, piece = divmod(i, per_token)
            var stored = self.shared.at[Scalar[Self.kv_dtype]](slot * Self.Map.SLOT_BYTES + i * 16).unsafe_load[
                width=16, alignment=16
            ]()
            var halves = stored.cast[DType.float16]()
            comptime if is_value:
                if Int32(token) < wanted.begin or Int32(token) >= wanted.end:
                    halves = 0
            comptime for part in range(2):
                self.shared.at[Float16](to + Self.Map.widened(token, 2 * piece + part)).unsafe_store[alignment=CHUNK](
                    halves.slice[8, offset=part * 8]()
                )

    # Epilogue

    @always_inline
    def finish(self, partials: Partials):
        """Writes o and lse, or the partial result."""
        var totals = self.total.copy()
        self.over_tile[greatest=False](totals)
        var bad = self.item.end == INVALID or self.shared.status()[] != 0
        comptime for c in range(Self.COLUMNS):
            if self.head(c) < self.group:
                var head = self.first_head + self.head(c)
                var total = NOT_A_NUMBER if bad else totals[c]
                # Every thread of four columns holds the state; the first warp's lanes 0 to 3 write it.
                if self.item.partial == WHOLE:
                    var factor = self.rows.finish(
                        self.item.row, head, self.greatest[c], total, writes_lse=self.thread < 4
                    )
                    self.write_sums[c](self.rows.o, self.rows.element(self.item.row, head, 0), factor)
                else:
                    var state = Int(self.item.partial) * Int(self.rows.num_heads) + Int(head)
                    self.write_sums[c](partials.acc, state * Self.head_dim, 1)
                    if self.thread < 4:
                        partials.greatest.unsafe_store(state, self.greatest[c])
                        partials.total.unsafe_store(state, total)

    @always_inline
    def write_sums[
        to: DType, //, c: Int
    ](self, target: Pointer[Scalar[to], MutUntrackedOrigin], first: Int, factor: Float32):
        """This thread's dims of its `c`-th column, times `factor`, to `target[first + dim]`."""
        comptime for atom in range(Self.Map.ATOMS):
            comptime for i in range(Self.WIDTH):
                comptime if Self.column(i) == c:
                    var dim = atom * ATOM + fragment_row(self.thread, i)
                    target.unsafe_store(first + dim, (self.acc[atom][i] * factor).cast[to]())


@always_inline
def settle(mut results: SIMD[DType.float32, _]):
    """Waits for the products under way; no use of the results may move before this."""
    wgmma_wait_group_sync[0]()
    comptime for i in range(results.length):
        # An instruction that is none, but yields the register: whatever uses it comes after the wait.
        results[i] = inlined_assembly["", Float32, constraints="=f,0", has_side_effect=True](results[i])
