"""The consumers of the Hopper kernel: the warpgroup that computes with K and V once they are in shared memory.

`kernel.mojo` explains the scheme, `shared_memory.mojo` draws the memory. With a float8 cache two warpgroups share this
work (`float8_consumers.mojo`).
"""

from std.math import exp2
from max.gpu import thread_idx
from max.gpu.compute.mma import wgmma_async, wgmma_commit_group_sync, wgmma_fence_aligned
from max.gpu.memory import fence_async_view_proxy
from max.gpu.primitives import warp
from max.gpu.sync import named_barrier

from ...softmax import MINUS_INFINITY
from ..params import GpuAttentionParams, NOT_A_NUMBER
from ..scheduler import PartialOutputs
from ..split_kv import INVALID_ROW, WHOLE_ROW, SplitItem
from .pipeline import BlockSharedMemory, Ring
from .shared_memory import SharedMemoryMap
from .tile_operands import zero_other_rows
from .tiles import ItemTiles, TileRows, WGMMA_TILE_TOKENS
from .wgmma import (
    ATOM_ELEMENTS,
    CHUNK_BYTES,
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    WGMMA_K,
    fragment_column,
    fragment_row,
    pin_results,
    wait_for_products,
)

comptime CONSUMER_BARRIER: Int32 = 1
"""The barrier of the warpgroup, of the keys' where there are two; 0 is the whole block's."""


struct Consumer[dtype: DType, o_dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int]:
    """A thread of a warpgroup that computes.

    A wgmma's result is `[64, heads]`: tokens for the scores, dims for the sums. A thread holds `WIDTH` numbers of it,
    in `COLUMNS` columns, the same ones for both: a head's state is in the threads of its scores and its sums.
    """

    comptime Map = SharedMemoryMap[Self.kv_dtype, Self.head_dim, Self.heads]
    comptime compute = DType.float16 if Self.Map.WIDENED else Self.dtype
    """The dtype of the operands: float16 holds every float8 exactly."""
    comptime WIDTH = Self.heads // 2
    comptime COLUMNS = Self.heads // 4
    comptime Fragment = SIMD[DType.float32, Self.WIDTH]

    var shared: BlockSharedMemory[Self.kv_dtype, Self.head_dim, Self.heads]
    var params: GpuAttentionParams[Self.dtype, Self.o_dtype]
    var item: SplitItem
    var group: Int32
    """Query heads of the KV head; further columns are padding."""
    var first_head: Int32
    var thread: Int
    """In the warpgroup."""
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
        shared: BlockSharedMemory[Self.kv_dtype, Self.head_dim, Self.heads],
        params: GpuAttentionParams[Self.dtype, Self.o_dtype],
        item: SplitItem,
        kv_head: Int32,
        kv_heads: Int32,
    ):
        self.shared = shared
        self.params = params
        self.item = item
        self.group = params.num_heads // kv_heads
        self.first_head = kv_head * self.group
        self.thread = Int(thread_idx.x)
        comptime if Self.Map.WARPGROUPS > 1:
            self.thread %= CONSUMER_THREADS
        self.scores = 0
        self.acc = Array[Self.Fragment, Self.Map.ATOMS](fill=0)
        self.greatest = Array[Float32, Self.COLUMNS](fill=MINUS_INFINITY)
        self.total = Array[Float32, Self.COLUMNS](fill=0)
        self.slope = Array[Float32, Self.COLUMNS](fill=0)
        comptime for c in range(Self.COLUMNS):
            if self.head(c) < self.group:
                self.slope[c] = params.slope(self.first_head + self.head(c))

    @always_inline
    def head(self, column: Int) -> Int32:
        """The head, within the group, of this thread's `column`-th column."""
        return Int32(fragment_column(self.thread, (column // 2) * 4 + column % 2))

    @staticmethod
    @always_inline
    def column(i: Int) -> Int:
        """Return which of the thread's columns element `i` of a fragment is in."""
        return (i // 4) * 2 + i % 2

    @always_inline
    def load_query(self):
        """Q of the group to shared memory; zeros for the padding."""
        comptime chunks = Self.head_dim // 8
        for i in range(self.thread, Self.heads * chunks, CONSUMER_THREADS):
            var head, chunk = divmod(i, chunks)
            var q = SIMD[Self.compute, 8](0)
            if Int32(head) < self.group:
                q = self.params.q.unsafe_load[width=8](
                    self.params.element(self.item.row, self.first_head + Int32(head), Int32(chunk * 8))
                ).cast[Self.compute]()
            self.shared.at[Scalar[Self.compute]](Self.Map.query_offset(head, chunk)).unsafe_store[
                alignment=CHUNK_BYTES
            ](q)
        # Written by ordinary stores, read by the tensor cores (the async proxy): fence, then the barrier.
        fence_async_view_proxy()
        named_barrier[Int32(CONSUMER_THREADS)](CONSUMER_BARRIER)

    @always_inline
    def multiply_keys(mut self, tile: Int):
        """S^T = K Q^T of the tile of K that lies at `tile`."""
        pin_results(self.scores)
        wgmma_fence_aligned()
        comptime for step in range(Self.head_dim // WGMMA_K):
            self.scores = wgmma_async[
                WGMMA_TILE_TOKENS,
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
        wait_for_products(self.scores)

    @always_inline
    def score_tile(mut self, ring: Ring[Self.Map.STAGES], tiles: ItemTiles, tile: Int32):
        """One tile's weights and their maximum; rescales the sums of the tiles before."""
        var valid = tiles.valid_rows(tile)
        with ring.consume(2 * tile) as stage:
            self.multiply_keys(stage * Self.Map.STAGE_BYTES)
        _ = self.weigh(tiles.token(tile), valid)

    @always_inline
    def weigh(mut self, token: Int32, valid: TileRows) -> Array[Float32, Self.COLUMNS]:
        """From scores to weights and their maximum, in a tile whose row 0 is `token`.

        Returns:
            The factor of each column for the sums of the tiles before; where this warpgroup has them, they are rescaled.
        """
        var factors = Array[Float32, Self.COLUMNS](fill=1)
        var highest = Array[Float32, Self.COLUMNS](fill=MINUS_INFINITY)
        comptime for i in range(Self.WIDTH):
            comptime c = Self.column(i)
            var row = Int32(fragment_row(self.thread, i))
            var score = self.params.score(self.scores[i], self.slope[c], token + row)
            # A select, not a sum with -inf: a row that is not valid may hold NaN.
            self.scores[i] = score if row >= valid.begin and row < valid.end else MINUS_INFINITY
            highest[c] = max(highest[c], self.scores[i])
        self.reduce_over_tile[greatest=True](highest)

        comptime for c in range(Self.COLUMNS):
            highest[c] = max(highest[c], self.greatest[c])
            # Where no score is a number above -inf, weights are relative to 0.
            var maximum = highest[c] if highest[c] != MINUS_INFINITY else 0
            var factor = exp2(self.greatest[c] - maximum)
            self.greatest[c] = highest[c]
            self.total[c] *= factor
            comptime for i in range(Self.WIDTH):
                comptime if Self.column(i) == c:
                    self.scores[i] = exp2(self.scores[i] - maximum)
                    self.total[c] += self.scores[i]
            comptime if Self.Map.WARPGROUPS == 1:
                self.rescale[c](factor)
            factors[c] = factor
        return factors^

    @always_inline
    def rescale[c: Int](mut self, factor: Float32):
        """Multiplies the sums of the `c`-th column."""
        comptime for i in range(Self.WIDTH):
            comptime if Self.column(i) == c:
                comptime for atom in range(Self.Map.ATOMS):
                    self.acc[atom][i] *= factor

    @always_inline
    def reduce_over_tile[*, greatest: Bool](self, mut x: Array[Float32, Self.COLUMNS]):
        """The greatest, or the sum, over all rows of a tile; the same bits in every thread.

        `exchange` may be overwritten: since its last reads there was another barrier of the warpgroup (in `add_values`,
        `load_query` or `float8_consumers.mojo`).
        """
        comptime for c in range(Self.COLUMNS):
            # The lanes of a warp that hold the same columns are 4 apart.
            comptime for bit in range(2, 5):
                var other = warp.shuffle_xor(x[c], UInt32(1 << bit))
                x[c] = max(x[c], other) if greatest else x[c] + other
        if self.thread % 32 < 4:
            comptime for c in range(Self.COLUMNS):
                self.shared.at[Float32](Self.Map.exchange_offset(self.thread // 32, Int(self.head(c))))[] = x[c]
        named_barrier[Int32(CONSUMER_THREADS)](CONSUMER_BARRIER)
        comptime for c in range(Self.COLUMNS):
            x[c] = self.shared.at[Float32](Self.Map.exchange_offset(0, Int(self.head(c))))[]
            comptime for w in range(1, CONSUMER_WARPS):
                var other = self.shared.at[Float32](Self.Map.exchange_offset(w, Int(self.head(c))))[]
                x[c] = max(x[c], other) if greatest else x[c] + other

    @always_inline
    def add_values(mut self, ring: Ring[Self.Map.STAGES], tiles: ItemTiles, tile: Int32):
        """Adds one tile's weighted values."""
        # The weights of the last tile are no longer read: every warp has since waited for its products
        # (`wait_for_products`), then passed the barrier in `reduce_over_tile`.
        self.store_weights()
        # Weights and zeros are written by ordinary stores and read by the tensor cores: each time a fence, then the
        # barrier. The fence also orders the zeros before the copy that fills this stage next.
        var valid = tiles.valid_rows(tile)
        with ring.consume(2 * tile + 1) as stage:
            if not valid.all():
                zero_other_rows(self.shared, stage, valid)
            fence_async_view_proxy()
            named_barrier[Int32(CONSUMER_THREADS)](CONSUMER_BARRIER)
            self.multiply_values(stage * Self.Map.STAGE_BYTES)

    @always_inline
    def store_weights(self, buffer: Int = 0):
        """The tile's weights to shared memory, in the operands' dtype."""
        comptime for i in range(0, Self.WIDTH, 2):
            var pair = SIMD[DType.float32, 2](self.scores[i], self.scores[i + 1]).cast[Self.compute]()
            var at = Self.Map.weight_offset(fragment_row(self.thread, i), fragment_column(self.thread, i), buffer)
            self.shared.at[Scalar[Self.compute]](at).unsafe_store[alignment=4](pair)

    @always_inline
    def multiply_values(mut self, tile: Int, buffer: Int = 0):
        """O^T += V^T P^T of the tile of V that lies at `tile` and the weights in `buffer`."""
        comptime for atom in range(Self.Map.ATOMS):
            pin_results(self.acc[atom])
        wgmma_fence_aligned()
        comptime for step in range(WGMMA_TILE_TOKENS // WGMMA_K):
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
                    self.shared.descriptor[Self.compute](Self.Map.weight_operand(step, buffer)),
                    self.acc[atom],
                )
        wgmma_commit_group_sync()
        comptime for atom in range(Self.Map.ATOMS):
            wait_for_products(self.acc[atom])

    # Epilogue

    @always_inline
    def finish(self, partials: PartialOutputs):
        """Writes o and lse, or the partial result."""
        var totals = self.total.copy()
        self.reduce_over_tile[greatest=False](totals)
        self.write_result(partials, totals)

    @always_inline
    def write_result(self, partials: PartialOutputs, totals: Array[Float32, Self.COLUMNS]):
        """Writes o and lse, or the partial result, from the weights of all rows."""
        var is_nan = self.item.end == INVALID_ROW or self.shared.status()[] != 0
        comptime for c in range(Self.COLUMNS):
            if self.head(c) < self.group:
                var head = self.first_head + self.head(c)
                var total = NOT_A_NUMBER if is_nan else totals[c]
                # Every thread of four columns holds the state; the first warp's lanes 0 to 3 write it.
                if self.item.partial == WHOLE_ROW:
                    var factor = self.params.finish(
                        self.item.row, head, self.greatest[c], total, writes_lse=self.thread < 4
                    )
                    self.write_sums[c](self.params.o, self.params.o_element(self.item.row, head, 0), factor)
                else:
                    var state = Int(self.item.partial) * Int(self.params.num_heads) + Int(head)
                    self.write_sums[c](partials.acc, state * Self.head_dim, 1)
                    if self.thread < 4:
                        partials.greatest.unsafe_store(state, self.greatest[c])
                        partials.total.unsafe_store(state, total)

    @always_inline
    def write_sums[
        to: DType, //, c: Int
    ](self, output: Pointer[Scalar[to], MutUntrackedOrigin], first: Int, factor: Float32):
        """This thread's dims of its `c`-th column, times `factor`, to `output[first + dim]`."""
        comptime for atom in range(Self.Map.ATOMS):
            comptime for i in range(Self.WIDTH):
                comptime if Self.column(i) == c:
                    var dim = atom * ATOM_ELEMENTS + fragment_row(self.thread, i)
                    output.unsafe_store(first + dim, (self.acc[atom][i] * factor).cast[to]())
