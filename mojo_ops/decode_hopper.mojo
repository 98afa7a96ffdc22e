"""Decode attention for Hopper (sm_90a): pages come by TMA, the tensor cores take keys and values as the large operand.

A block of five warps serves one work item for one KV head, in tiles of 64 tokens:

    producer, 1 warp     page table -> boxes of K and V -> ring of slots in shared memory
    consumers, 4 warps   S^T [64 tokens, heads] = K Q^T       wgmma, both operands in shared memory
                         P = 2^(score - greatest)             in registers; each warp tells the others its greatest
                         O^T [head_dim, heads] += V^T P^T     wgmma, P comes through shared memory

With the operands this way round, a group of up to 8 (or 16) query heads is padded to 8 (or 16) and not to 64.
`smem.mojo` draws the memory, `pipeline.mojo` explains the ring. Compiled for sm_90a, not yet run.
"""

from std.math import exp2
from std.sys import size_of
from std.sys._assembly import inlined_assembly
from std.utils import StaticTuple
from layout.tma_async import SharedMemBarrier
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.host.info import H100
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.memory import AddressSpace, external_memory, fence_async_view_proxy
from max.gpu.primitives import warp
from max.gpu.sync import named_barrier

from .combine import enqueue_combine
from .decode_gpu import DeviceCache, Pages, Place
from .decode_rows import DecodeRows, NOT_A_NUMBER
from .pipeline import Ring, Slot
from .schedule import Partials, WorkList, Workspace, enqueue_schedule, multiprocessors
from .smem import (
    ATOM,
    Box,
    CHUNK,
    CONSUMERS,
    CONSUMER_WARPS,
    LEAST_BOX_BITS,
    Operand,
    Rows,
    SharedMemory,
    TILE,
    Tiles,
    WGMMA_K,
    fragment_column,
    fragment_row,
)
from .softmax import MINUS_INFINITY
from .tma import copy_box
from .work import INVALID, NO_ROW, WHOLE, WorkBounds, WorkItem

comptime BLOCK = CONSUMERS + 32
comptime CONSUMER_BARRIER: Int32 = 1
"""Barrier 0 is the whole block's."""
comptime SharedBytes = Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED]


# The host's part

comptime ON_HOPPER = DeviceContext.default_device_info.compute == H100.compute
"""Whether the program is compiled for a GPU that this kernel runs on."""


def hopper_takes[dtype: DType, kv_dtype: DType]() -> Bool:
    """Whether the kernel exists for such a query and cache: only then can it be instantiated."""
    comptime is_16_bit = dtype == DType.bfloat16 or dtype == DType.float16
    comptime is_float8 = kv_dtype == DType.float8_e4m3fn or kv_dtype == DType.float8_e5m2
    return is_16_bit and (kv_dtype == dtype or is_float8)


def hopper_refusal[
    dtype: DType, kv_dtype: DType, //
](rows: DecodeRows[dtype], k: DeviceCache[kv_dtype], v: DeviceCache[kv_dtype]) -> String:
    """Why this kernel does not serve a call, from shapes, strides and dtypes; empty where it does."""
    if not hopper_takes[dtype, kv_dtype]():
        return String(
            "it takes bfloat16 or float16 with a cache of the same or float8, not ", dtype, " with ", kv_dtype
        )
    var dim = Int(rows.head_dim)
    if dim != 64 and dim != 128 and dim != 256:
        return String("it takes head_dim 64, 128 and 256, not ", dim)
    var group = Int(rows.num_heads) // max(1, k.num_heads())
    if group > 16:
        return String("it takes up to 16 query heads a KV head, not ", group)
    var page_size = k.slots()
    if page_size < 1 or Box.of_page(page_size).bits < LEAST_BOX_BITS:
        return String("it copies 8 slots of a page and more at once; page_size ", page_size, " is no multiple of 8")
    return String(map_refusal("k_blocks", k), map_refusal("v_blocks", v))


def map_refusal[kv_dtype: DType, //](what: StaticString, cache: DeviceCache[kv_dtype]) -> String:
    """What the copy engine asks of a cache: `check_page_map`, as a reason."""
    var at = cache.strides()
    comptime bytes = size_of[kv_dtype]()
    if Int(cache.blocks.ptr) % 16 != 0:
        return String(what, " begins at an address that is no multiple of 16 bytes")
    for elements in [at.page, at.slot, at.head]:
        if elements * bytes % 16 != 0:
            return String(what, " has a stride of ", elements * bytes, " bytes, no multiple of 16")
        if elements * bytes >= 1 << 40:
            return String(what, " has a stride of ", elements * bytes, " bytes, which takes more than 40 bits")
    return ""


def attend_hopper[
    dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    """Enqueues attention of every row over the pages of its request, where `hopper_refusal` has nothing to say.

    Like `attend_gpu`: the host waits for nothing; a page id outside the pool makes its row NaN.
    """
    if rows.num_rows == 0 or rows.num_heads == 0:
        return
    var dim = Int(rows.head_dim)
    if dim == 64:
        launch_for_group[64](ctx, rows, k, v, batch_invariant)
    elif dim == 128:
        launch_for_group[128](ctx, rows, k, v, batch_invariant)
    elif dim == 256:
        launch_for_group[256](ctx, rows, k, v, batch_invariant)
    else:
        raise Error("head_dim must be 64, 128 or 256, not ", dim)


def launch_for_group[
    dtype: DType, kv_dtype: DType, //, head_dim: Int
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    if Int(rows.num_heads) <= 8 * k.num_heads():
        launch[head_dim, 8](ctx, rows, k, v, batch_invariant)
    else:
        launch[head_dim, 16](ctx, rows, k, v, batch_invariant)


def launch[
    dtype: DType, kv_dtype: DType, //, head_dim: Int, heads: Int
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    comptime Map = SharedMemory[kv_dtype, head_dim, heads]
    Map.check()
    var kv_heads = k.num_heads()
    var box = Box.of_page(k.slots())
    var k_map = k.create_tma_boxes(ctx, Int(box.slots()))
    var v_map = v.create_tma_boxes(ctx, Int(box.slots()))
    var bounds = WorkBounds.of(Int(rows.num_rows), Int(rows.capacity), kv_heads, multiprocessors(ctx), batch_invariant)
    var workspace = Workspace(ctx, bounds, Int(rows.num_heads), head_dim)
    var work = workspace.work()
    var partials = workspace.partials()
    enqueue_schedule(ctx, rows, work)
    comptime kernel = attend_item[dtype, kv_dtype, head_dim, heads]
    ctx.enqueue_function[kernel](
        k_map,
        v_map,
        rows,
        k,
        work,
        partials,
        box.bits,
        # The KV heads of an item next to each other: in the NHD layout they read the same stretch of memory.
        grid_dim=bounds.items * kv_heads,
        block_dim=BLOCK,
        shared_mem_bytes=Map.BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(Map.BYTES)),
    )
    enqueue_combine(ctx, rows, work, partials)
    _ = workspace^


# The device's part


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK)),
    `nvvm.minctasm`=SIMDLength(SharedMemory[kv_dtype, head_dim, heads].BLOCKS_PER_SM),
)
@__llvm_arg_metadata(k_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(v_map, `nvvm.grid_constant`)
def attend_item[
    dtype: DType, kv_dtype: DType, head_dim: Int, heads: Int
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    rows: DecodeRows[dtype],
    cache: DeviceCache[kv_dtype],
    work: WorkList,
    partials: Partials,
    box_bits: Int32,
):
    """One block: item `block_idx.x // kv_heads` of the schedule for KV head `block_idx.x % kv_heads`.

    `cache` is K's view, for the page table and the sizes, which V shares.
    """
    var kv_heads = UInt32(cache.num_heads())
    var index = UInt32(block_idx.x) // kv_heads
    var kv_head = Int32(UInt32(block_idx.x) - index * kv_heads)
    var item = work.item(Int(index))
    if item.row == NO_ROW:
        return
    var memory = external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    var shared = Shared[kv_dtype, head_dim, heads](memory)
    var ring = shared.ring()
    if thread_idx.x == 0:
        ring.init(CONSUMER_WARPS)
        shared.status()[] = 0
    barrier()

    var box = Box(box_bits)
    var tiles = Tiles.of(item.begin, item.end, box)
    if thread_idx.x >= CONSUMERS:
        produce(k_map, v_map, shared, ring, tiles, Pages(item.row, rows, cache), box, kv_head)
    else:
        var consumer = Consumer[dtype, kv_dtype, head_dim, heads](shared, rows, item, kv_head, Int32(kv_heads))
        consumer.load_query()
        for tile in range(tiles.count):
            consumer.score(ring, tiles, tile)
            consumer.weigh(ring, tiles, tile)
        consumer.finish(partials)


@fieldwise_init
struct Shared[kv_dtype: DType, head_dim: Int, heads: Int](TrivialRegisterPassable):
    """Pointers into the block's shared memory, as `SharedMemory` lays it out."""

    comptime Map = SharedMemory[Self.kv_dtype, Self.head_dim, Self.heads]
    var base: SharedBytes

    @always_inline
    def at[T: AnyType](self, offset: Int) -> Pointer[T, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        return self.base.unsafe_offset(offset).unsafe_bitcast[T]()

    @always_inline
    def ring(self) -> Ring[Self.Map.SLOTS]:
        return Ring[Self.Map.SLOTS](self.at[SharedMemBarrier](Self.Map.FULL), self.at[SharedMemBarrier](Self.Map.EMPTY))

    @always_inline
    def status(self) -> Pointer[Int32, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        """Not 0 where a token's page is outside the pool."""
        return self.at[Int32](Self.Map.STATUS)

    @always_inline
    def descriptor[dtype: DType](self, operand: Operand) -> WGMMADescriptor[dtype]:
        return WGMMADescriptor[dtype](operand.descriptor(UInt32(Int(self.base))))


# Producer


@always_inline
def produce[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](
    k_map: TMADescriptor,
    v_map: TMADescriptor,
    shared: Shared[kv_dtype, head_dim, heads],
    ring: Ring[SharedMemory[kv_dtype, head_dim, heads].SLOTS],
    tiles: Tiles,
    pages: Pages,
    box: Box,
    kv_head: Int32,
):
    """By one warp: copies K and V of every tile into the ring, K of tile t as filling 2 t, V as 2 t + 1.

    Lane i looks up the page of the tile's i-th box, one tile ahead; lane 0 starts the copies.
    """
    var lane = Int32(lane_id())
    var places = find_boxes(tiles, 0, pages, box, lane)
    for tile in range(tiles.count):
        var place = places
        if place.page < 0:
            # The copy engine fills a page outside the map with zeros; the row becomes NaN.
            shared.status()[] = 1
        places = find_boxes(tiles, tile + 1, pages, box, lane)
        var boxes = tiles.wanted(tile).boxes(box)
        var bytes = (boxes << box.bits) * Int32(head_dim * size_of[kv_dtype]())
        with ring.produce(2 * tile, bytes) as slot:
            copy_boxes(k_map, shared, slot, place, boxes, box, kv_head)
        with ring.produce(2 * tile + 1, bytes) as slot:
            copy_boxes(v_map, shared, slot, place, boxes, box, kv_head)


@always_inline
def find_boxes(tiles: Tiles, tile: Int32, pages: Pages, box: Box, lane: Int32) -> Place:
    """Where the tile's `lane`-th box lies; (0, 0) where the tile does not need it."""
    if tile < tiles.count:
        if lane < tiles.wanted(tile).boxes(box):
            # The box's first token may lie before `begin`: in the same page, which the row has.
            return pages.place(tiles.token(tile) + (lane << box.bits))
    return Place(0, 0)


@always_inline
def copy_boxes[
    kv_dtype: DType, head_dim: Int, heads: Int, //
](
    map: TMADescriptor,
    shared: Shared[kv_dtype, head_dim, heads],
    slot: Slot,
    place: Place,
    boxes: Int32,
    box: Box,
    kv_head: Int32,
):
    """Starts the copies of a tile's boxes; lane i knows the place of box i."""
    comptime Map = SharedMemory[kv_dtype, head_dim, heads]
    for i in range(boxes):
        var page = warp.shuffle_idx(place.page, UInt32(i))
        var first_slot = warp.shuffle_idx(place.slot, UInt32(i))
        if lane_id() == 0:
            comptime for copy in range(1 if Map.WIDENED else Map.ATOMS):
                copy_box(
                    map,
                    shared.at[UInt8](slot.index * Map.SLOT_BYTES + Map.box(Int(i << box.bits), copy)),
                    slot.full,
                    Int(page),
                    Int(first_slot),
                    Int(kv_head),
                    copy * ATOM,
                )


# Consumers


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
