"""The consumers of the kernel for many rows: the warpgroups that compute with K and V once they are in shared memory.

`README.md` explains the scheme, `shared_memory.mojo` draws the memory.
"""

from std.math import exp2
from max.gpu import thread_idx
from max.gpu.compute.mma import wgmma_async, wgmma_commit_group_sync, wgmma_fence_aligned
from max.gpu.primitives import warp

from ...logits import soft_capped
from ...softmax import LOG2E, MINUS_INFINITY
from ..params import GpuAttentionParams, NOT_A_NUMBER
from ..scheduler import PartialOutputs
from ..split_kv import INVALID_ROW, WHOLE_ROW
from ..hopper.tiles import CopyBox, ItemTiles, TileRows, WGMMA_TILE_TOKENS
from ..hopper.wgmma import (
    ATOM_ELEMENTS,
    CONSUMER_THREADS,
    WGMMA_K,
    fragment_column,
    fragment_row,
    pin_results,
    wait_for_products,
)
from .edge_values import clear_special_values, find_special_values
from .head_rows import HeadRow, HeadRows
from .register_operand import Fragment, add_product, advanced, packed, pin_operand, pinned
from .shared_memory import RowsMemory


struct RowsConsumer[dtype: DType, o_dtype: DType, head_dim: Int]:
    """A thread of a warpgroup that computes: one item.

    Results `[64, 64]` have heads of rows in their rows, tokens or dims in their columns. A thread holds 16 numbers of
    each of two rows, 8 apart; four adjacent lanes hold a row.
    """

    comptime Memory = RowsMemory[Self.dtype, Self.head_dim]
    comptime Map = Self.Memory.Map

    var shared: Self.Memory
    var params: GpuAttentionParams[Self.dtype, Self.o_dtype]
    var warpgroup: Int
    var thread: Int
    """In the warpgroup."""
    var seen: TileRows
    """The warpgroup's rows see tokens of `[begin, end)` alone."""
    var seen_by_all: TileRows
    """All rows of the item see every token of `[begin, end)`."""
    var rows: Array[HeadRow, 2]
    var scores: Fragment
    """One tile's scores, then weights."""
    var acc: Array[Fragment, Self.Map.ATOMS]
    """Sums of weighted values of 64 dims each, relative to `greatest`."""
    var greatest: Array[Float32, 2]
    var total: Array[Float32, 2]
    """The weights of this thread's own columns alone, until `finish`."""

    @always_inline
    def __init__(
        out self,
        shared: Self.Memory,
        of: HeadRows[Self.dtype, Self.o_dtype],
    ):
        self.shared = shared
        self.params = of.params
        self.warpgroup = of.warpgroup
        self.thread = Int(thread_idx.x) % CONSUMER_THREADS
        self.seen = of.seen()
        self.seen_by_all = of.seen_by_all()
        self.rows = Array[HeadRow, 2](fill=HeadRow(0, 0, 0))
        comptime for j in range(2):
            self.rows[j] = of.row(fragment_row(self.thread, 2 * j))
        self.scores = 0
        self.acc = Array[Fragment, Self.Map.ATOMS](fill=0)
        self.greatest = Array[Float32, 2](fill=MINUS_INFINITY)
        self.total = Array[Float32, 2](fill=0)

    @always_inline
    def attend(mut self, first_tile: Int32, tiles: ItemTiles, box: CopyBox):
        """Every tile of the item; the ring has `first_tile` tiles before it."""
        for tile in range(tiles.count):
            var token = tiles.token(tile)
            var valid = tiles.valid_rows(tile)
            # The same in the whole warpgroup. A tile that none of its heads sees is released unread.
            var is_seen = token < self.seen.end and token + WGMMA_TILE_TOKENS > self.seen.begin
            var fill = 2 * (first_tile + tile)
            var outside: UInt64
            with self.shared.ring().consume(fill) as stage:
                outside = self.shared.outside(first_tile + tile).unsafe_bitcast[UInt64]()[]
                if is_seen:
                    self.multiply_keys(stage * self.Map.TILE_BYTES)
            if is_seen:
                self.weigh(token, outside, box)
            with self.shared.ring().consume(fill + 1) as stage:
                if token < self.seen_by_all.begin or token + WGMMA_TILE_TOKENS > self.seen_by_all.end:
                    self.keep_values_apart(stage, token, valid, is_seen)
                if is_seen:
                    self.multiply_values(stage * self.Map.TILE_BYTES)

    @always_inline
    def multiply_keys(mut self, tile: Int):
        """S = Q K^T of the tile of K that lies at `tile`."""
        comptime Tile = Self.Map.Tile
        # Computed for each tile from a number that is: descriptors kept all along would take a register pair each.
        var query = self.shared.descriptor(Tile.key_operand(pinned(self.Map.query(self.warpgroup)), 0))
        var keys = self.shared.descriptor(Tile.key_operand(tile, 0))
        pin_results(self.scores)
        wgmma_fence_aligned()
        comptime for step in range(Self.head_dim // WGMMA_K):
            comptime offset = Tile.key_operand(0, step).start
            self.scores = wgmma_async[
                64,
                WGMMA_TILE_TOKENS,
                WGMMA_K,
                a_type=Self.dtype,
                b_type=Self.dtype,
                scale_d=0 if step == 0 else 1,
            ](advanced(query, offset), advanced(keys, offset), self.scores)
        wgmma_commit_group_sync()
        wait_for_products(self.scores)

    @always_inline
    def weigh(mut self, token: Int32, outside: UInt64, box: CopyBox):
        """One tile's weights and their reference; rescales the sums of the tiles before.

        `outside` has a byte a box of the tile, 1 where its page is outside the pool.
        """
        ref params = self.params
        # As `GpuAttentionParams.score`, its options asked for once. One product for both cases: the compiler would
        # compute those of both before it asks, and keep twice the scores.
        var is_plain = params.has_alibi == 0 and params.soft_cap <= 0
        self.scores *= params.scale * LOG2E if is_plain else params.scale
        if not is_plain:
            comptime for i in range(Fragment.length):
                var position = Float32(token + Int32(fragment_column(self.thread, i)))
                self.scores[i] = position.fma(self.rows[(i // 2) % 2].slope, self.scores[i])
            if params.soft_cap > 0:
                # One after the other: their parts would not all fit into registers.
                comptime for i in range(Fragment.length):
                    self.scores[i] = soft_capped(self.scores[i], params.soft_cap)
            self.scores *= LOG2E
        if outside != 0:
            for b in range(UInt64(8)):
                if (outside >> (8 * b)) & 1 != 0:
                    var begin = Int32(b) << box.bits
                    comptime for i in range(Fragment.length):
                        var column = Int32(fragment_column(self.thread, i))
                        if column >= begin and column < begin + box.slots():
                            self.scores[i] = NOT_A_NUMBER
        if token < self.seen_by_all.begin or token + WGMMA_TILE_TOKENS > self.seen_by_all.end:
            comptime for i in range(Fragment.length):
                comptime j = (i // 2) % 2
                var at = token + Int32(fragment_column(self.thread, i))
                # A select, not a sum with -inf: slots without a token may hold NaN.
                if at < self.rows[j].begin or at >= self.rows[j].end:
                    self.scores[i] = MINUS_INFINITY
        comptime for j in range(2):
            var highest = self.greatest[j]
            comptime for i in range(Fragment.length):
                comptime if (i // 2) % 2 == j:
                    highest = max(highest, self.scores[i])
            comptime for bit in range(2):
                highest = max(highest, warp.shuffle_xor(highest, UInt32(1 << bit)))
            # Where no score is a number above -inf, weights are relative to 0.
            var reference = highest if highest != MINUS_INFINITY else 0
            var factor = exp2(self.greatest[j] - reference)
            self.greatest[j] = highest
            self.total[j] *= factor
            comptime for i in range(Fragment.length):
                comptime if (i // 2) % 2 == j:
                    self.scores[i] = exp2(self.scores[i] - reference)
                    self.total[j] += self.scores[i]
                    comptime for atom in range(Self.Map.ATOMS):
                        self.acc[atom][i] *= factor

    @always_inline
    def keep_values_apart(mut self, stage: Int, token: Int32, valid: TileRows, is_seen: Bool):
        """By all warpgroups, before products with values that not all rows see (`edge_values.mojo`)."""
        var special = find_special_values(self.shared, stage, valid)
        if special != 0:
            for i in range(Int32(WGMMA_TILE_TOKENS)):
                if (special >> UInt64(i)) & 1 != 0 and is_seen:
                    self.add_value(stage * self.Map.TILE_BYTES, i, token + i)
            clear_special_values(self.shared, stage, special)

    @always_inline
    def add_value(mut self, tile: Int, row: Int32, token: Int32):
        """Adds the weighted value of the tile's `row`-th token to the sums of the rows that see it."""
        comptime for j in range(2):
            var weight = Float32(0)
            comptime for i in range(Fragment.length):
                comptime if (i // 2) % 2 == j:
                    if Int32(fragment_column(self.thread, i)) == row:
                        weight = self.scores[i]
            comptime for bit in range(2):
                weight += warp.shuffle_xor(weight, UInt32(1 << bit))
            if token >= self.rows[j].begin and token < self.rows[j].end:
                comptime for atom in range(Self.Map.ATOMS):
                    comptime for i in range(2 * j, Fragment.length, 4):
                        var dim = atom * ATOM_ELEMENTS + fragment_column(self.thread, i)
                        var at = tile + Self.Map.Tile.widened_offset(Int(row), dim // 8) + dim % 8 * 2
                        var pair = self.shared.at[Scalar[Self.dtype]](at).unsafe_load[width=2, alignment=4]()
                        self.acc[atom][i] += weight * pair[0].cast[DType.float32]()
                        self.acc[atom][i + 1] += weight * pair[1].cast[DType.float32]()

    @always_inline
    def multiply_values(mut self, tile: Int):
        """O += P V of the tile of V that lies at `tile`."""
        comptime steps = WGMMA_TILE_TOKENS // WGMMA_K
        var weights = Array[SIMD[DType.uint32, 4], steps](fill=0)
        comptime for step in range(steps):
            weights[step] = packed[Self.dtype](self.scores, step)
            pin_operand(weights[step])
        comptime for atom in range(Self.Map.ATOMS):
            pin_results(self.acc[atom])
        var values = self.shared.descriptor(self.Map.value_operand(tile, 0, 0))
        wgmma_fence_aligned()
        comptime for step in range(steps):
            comptime for atom in range(Self.Map.ATOMS):
                comptime offset = Self.Map.value_operand(0, atom, step).start
                add_product[Self.dtype](self.acc[atom], weights[step], advanced(values, offset))
        wgmma_commit_group_sync()
        comptime for atom in range(Self.Map.ATOMS):
            wait_for_products(self.acc[atom])

    # Epilogue

    @always_inline
    def finish(mut self, of: HeadRows[Self.dtype, Self.o_dtype], partials: PartialOutputs):
        """Writes o and lse of the rows, or their partial results; `of` are those given first, read once more."""
        comptime for j in range(2):
            comptime for bit in range(2):
                self.total[j] += warp.shuffle_xor(self.total[j], UInt32(1 << bit))
        var params = of.params
        var item = of.item
        var is_first = self.thread % 4 == 0
        comptime for j in range(2):
            var place = of.place(fragment_row(self.thread, 2 * j))
            if place.row < item.rows:
                var row = item.first_row + place.row
                var head = of.head(place)
                var total = NOT_A_NUMBER if self.rows[j].end == INVALID_ROW else self.total[j]
                if item.partial == WHOLE_ROW:
                    var factor = params.finish(row, head, self.greatest[j], total, writes_lse=is_first)
                    self.write_sums[j](params.o, params.o_element(row, head, 0), factor)
                else:
                    var partial = item.partial + place.row * item.parts
                    var state = Int(partial) * Int(params.num_heads) + Int(head)
                    self.write_sums[j](partials.acc, state * Self.head_dim, 1)
                    if is_first:
                        partials.greatest.unsafe_store(state, self.greatest[j])
                        partials.total.unsafe_store(state, total)

    @always_inline
    def write_sums[
        to: DType, //, j: Int
    ](self, output: Pointer[Scalar[to], MutUntrackedOrigin], first: Int, factor: Float32):
        """This thread's dims of its `j`-th row, times `factor`, to `output[first + dim]`."""
        comptime for atom in range(Self.Map.ATOMS):
            comptime for i in range(2 * j, Fragment.length, 4):
                var dim = atom * ATOM_ELEMENTS + fragment_column(self.thread, i)
                var pair = SIMD[DType.float32, 2](self.acc[atom][i], self.acc[atom][i + 1]) * factor
                output.unsafe_store(first + dim, pair.cast[to]())
