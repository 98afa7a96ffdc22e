"""The ring of shared-memory slots between the warp that copies and the warpgroup that computes, and the rest of it.

Every slot has two mbarriers. A barrier counts its completions (phases); waiting names the parity of one of them.

    full[s]   completes when all bytes of a filling have arrived    1 arrival (the producer's) + its bytes
    empty[s]  completes when every consumer warp has let go         one arrival a warp

Filling `i` (0, 1, ...) of the ring goes to slot `i % slots` and is that slot's `n`-th, n = i // slots. Its data is
complete with the n-th completion of `full`. It may begin after the (n - 1)-th of `empty`; for n = 0 that is the one
before the first, which a fresh barrier counts as done.
"""

from layout.tma_async import SharedMemBarrier
from max.gpu import lane_id
from max.gpu.compute.mma import WGMMADescriptor
from max.gpu.memory import AddressSpace, fence_async_view_proxy, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, syncwarp

from .shared_memory import Operand, SharedMemory

comptime SharedBytes = Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED]
comptime SharedBarriers = Pointer[SharedMemBarrier, MutUntrackedOrigin, address_space=AddressSpace.SHARED]


@fieldwise_init
struct Ring[slots: Int](TrivialRegisterPassable):
    """The barriers of a ring; used only through `with ring.produce(...)` and `with ring.consume(...)`."""

    var full: SharedBarriers
    """`[slots]`."""
    var empty: SharedBarriers
    """`[slots]`."""

    @always_inline
    def init(self, consumer_warps: Int):
        """By one thread, before a barrier of the whole block."""
        comptime for slot in range(Self.slots):
            self.full[unsafe_offset=slot].init(1)
            self.empty[unsafe_offset=slot].init(Int32(consumer_warps))
        fence_mbarrier_init()
        # The copy engine, too, must find the barriers initialised.
        fence_async_view_proxy()

    @staticmethod
    @always_inline
    def place(filling: Int32) -> Tuple[UInt32, Int]:
        """Which filling of its slot a filling of the ring is, and the slot."""
        var n = UInt32(filling) // UInt32(Self.slots)
        return (n, Int(UInt32(filling) - n * UInt32(Self.slots)))

    @always_inline
    def produce(self, filling: Int32, bytes: Int32) -> Filling[Self.slots]:
        """`with ring.produce(i, bytes) as slot:` start copies of exactly so many bytes. By a whole warp."""
        return Filling[Self.slots](self, filling, bytes)

    @always_inline
    def consume(self, filling: Int32) -> Consuming[Self.slots]:
        """`with ring.consume(i) as slot:` read the slot. By all consumer warps; they must be done at the end."""
        return Consuming[Self.slots](self, filling)


@fieldwise_init
struct Slot(TrivialRegisterPassable):
    """Where the copies of one filling go."""

    var index: Int
    var full: SharedBarriers
    """The barrier that counts their bytes."""


@fieldwise_init
struct Filling[slots: Int](TrivialRegisterPassable):
    """Waits until the slot is empty, then announces the bytes that will come."""

    var ring: Ring[Self.slots]
    var filling: Int32
    var bytes: Int32

    @always_inline
    def __enter__(self) -> Slot:
        var n, slot = self.ring.place(self.filling)
        self.ring.empty[unsafe_offset=slot].wait((n & 1) ^ 1)
        var full = self.ring.full.unsafe_offset(slot)
        # Every lane has seen the slot empty, and what the lanes wrote for the consumers is written, before one lane
        # arrives: with that arrival the consumers may see it.
        syncwarp()
        if lane_id() == 0:
            # Announced before any copy starts: the count of bytes cannot reach zero early.
            full[].expect_bytes(self.bytes)
        return Slot(slot, full)

    @always_inline
    def __exit__(self):
        # The copy engine completes `full`.
        pass


@fieldwise_init
struct Consuming[slots: Int](TrivialRegisterPassable):
    """Waits until the slot is full; lets go of it at the end."""

    var ring: Ring[Self.slots]
    var filling: Int32

    @always_inline
    def __enter__(self) -> Int:
        var n, slot = self.ring.place(self.filling)
        self.ring.full[unsafe_offset=slot].wait(n & 1)
        return slot

    @always_inline
    def __exit__(self):
        # One arrival a warp: by now each of its lanes has waited for its last read of the slot.
        syncwarp()
        if lane_id() == 0:
            _ = mbarrier_arrive(self.ring.empty.unsafe_offset(self.ring.place(self.filling)[1]))


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
