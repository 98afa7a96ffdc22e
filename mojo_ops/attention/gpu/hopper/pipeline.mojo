"""The ring of stages between the producer warp and the consumers, and pointers to the rest of shared memory.

A stage holds one tile of K or V and has two mbarriers. A barrier counts its completions (phases); a wait names the
parity of one of them.

    full[s]   completes when all bytes of a fill have arrived       1 arrival (the producer's) + its bytes
    empty[s]  completes when each warp that reads it has released it  1 arrival a warp

Fill `i` (0, 1, ...) of the ring goes to stage `i % stages` and is that stage's `n`-th, n = i // stages. Its data is
complete with the n-th completion of `full`. It may begin after the (n - 1)-th of `empty`; for n = 0 that is the one
before the first, which a fresh barrier counts as done.

The weights of a float8 cache go from one warpgroup to the other through a ring of two stages, in which `full[s]`
completes with one arrival of each warp that writes.
"""

from layout.tma_async import SharedMemBarrier
from max.gpu import lane_id
from max.gpu.compute.mma import WGMMADescriptor
from max.gpu.memory import AddressSpace, fence_async_view_proxy, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, syncwarp

from ..split_kv import SplitItem
from .shared_memory import SharedMemoryMap
from .wgmma import MatrixOperand

comptime SharedBytes = Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.SHARED]
comptime SharedBarriers = Pointer[SharedMemBarrier, MutUntrackedOrigin, address_space=AddressSpace.SHARED]


@fieldwise_init
struct Ring[stages: Int](TrivialRegisterPassable):
    """The barriers of a ring; used only through `with ring.produce(...)`, `ring.write(...)` and `ring.consume(...)`."""

    var full: SharedBarriers
    """`[stages]`."""
    var empty: SharedBarriers
    """`[stages]`."""

    @always_inline
    def init(self, consumer_warps: Int, writer_warps: Int = 1):
        """By one thread, before a barrier of the whole block.

        Args:
            consumer_warps: That read a stage.
            writer_warps: That `write` to it; 1 where one warp has copies made.
        """
        comptime for stage in range(Self.stages):
            self.full[unsafe_offset=stage].init(Int32(writer_warps))
            self.empty[unsafe_offset=stage].init(Int32(consumer_warps))
        fence_mbarrier_init()
        # The copy engine, too, must see the initialised barriers.
        fence_async_view_proxy()

    @staticmethod
    @always_inline
    def stage_of(fill: Int32) -> Tuple[UInt32, Int]:
        """Return which fill of its stage a fill of the ring is, and the stage."""
        var n = UInt32(fill) // UInt32(Self.stages)
        return (n, Int(UInt32(fill) - n * UInt32(Self.stages)))

    @always_inline
    def produce(self, fill: Int32, bytes: Int32) -> ProducerStage[Self.stages]:
        """`with ring.produce(i, bytes) as stage:` start copies of exactly so many bytes. By a whole warp."""
        return ProducerStage[Self.stages](self, fill, bytes)

    @always_inline
    def write(self, fill: Int32) -> WriterStage[Self.stages]:
        """`with ring.write(i) as stage:` store to the stage. By all writer warps."""
        return WriterStage[Self.stages](self, fill)

    @always_inline
    def consume(self, fill: Int32) -> ConsumerStage[Self.stages]:
        """`with ring.consume(i) as stage:` read the stage. By all warps that read it; reads are done at the end."""
        return ConsumerStage[Self.stages](self, fill)


@fieldwise_init
struct RingStage(TrivialRegisterPassable):
    """The target of the copies of one fill."""

    var index: Int
    var full: SharedBarriers
    """The barrier that counts their bytes."""


@fieldwise_init
struct ProducerStage[stages: Int](TrivialRegisterPassable):
    """Waits until the stage is empty, then announces the bytes of its copies."""

    var ring: Ring[Self.stages]
    var fill: Int32
    var bytes: Int32

    @always_inline
    def __enter__(self) -> RingStage:
        var n, stage = self.ring.stage_of(self.fill)
        self.ring.empty[unsafe_offset=stage].wait((n & 1) ^ 1)
        var full = self.ring.full.unsafe_offset(stage)
        # Before one lane arrives, every lane has seen the stage empty and has written what it writes for the consumers:
        # with that arrival the consumers may read it.
        syncwarp()
        if lane_id() == 0:
            # Announced before any copy starts: the count of bytes cannot reach zero early.
            full[].expect_bytes(self.bytes)
        return RingStage(stage, full)

    @always_inline
    def __exit__(self):
        # The copy engine completes `full`.
        pass


@fieldwise_init
struct WriterStage[stages: Int](TrivialRegisterPassable):
    """Waits until the stage is empty; at the end it is full of what this warp stores."""

    var ring: Ring[Self.stages]
    var fill: Int32

    @always_inline
    def __enter__(self) -> Int:
        var n, stage = self.ring.stage_of(self.fill)
        self.ring.empty[unsafe_offset=stage].wait((n & 1) ^ 1)
        return stage

    @always_inline
    def __exit__(self):
        # Each lane's stores are seen by the tensor cores of those who wait for the arrival.
        fence_async_view_proxy()
        syncwarp()
        if lane_id() == 0:
            _ = mbarrier_arrive(self.ring.full.unsafe_offset(self.ring.stage_of(self.fill)[1]))


@fieldwise_init
struct ConsumerStage[stages: Int](TrivialRegisterPassable):
    """Waits until the stage is full; releases it at the end."""

    var ring: Ring[Self.stages]
    var fill: Int32

    @always_inline
    def __enter__(self) -> Int:
        var n, stage = self.ring.stage_of(self.fill)
        self.ring.full[unsafe_offset=stage].wait(n & 1)
        return stage

    @always_inline
    def __exit__(self):
        # One arrival a warp: by now each of its lanes has waited for its last read of the stage.
        syncwarp()
        if lane_id() == 0:
            _ = mbarrier_arrive(self.ring.empty.unsafe_offset(self.ring.stage_of(self.fill)[1]))


@fieldwise_init
struct BlockSharedMemory[kv_dtype: DType, head_dim: Int, heads: Int](TrivialRegisterPassable):
    """Pointers into the block's shared memory, as `SharedMemoryMap` lays it out."""

    comptime Map = SharedMemoryMap[Self.kv_dtype, Self.head_dim, Self.heads]
    var base: SharedBytes

    @always_inline
    def at[T: AnyType](self, offset: Int) -> Pointer[T, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        return self.base.unsafe_offset(offset).unsafe_bitcast[T]()

    @always_inline
    def ring(self) -> Ring[Self.Map.STAGES]:
        return Ring[Self.Map.STAGES](
            self.at[SharedMemBarrier](Self.Map.FULL), self.at[SharedMemBarrier](Self.Map.EMPTY)
        )

    @always_inline
    def buffers(self) -> Ring[Self.Map.BUFFERS]:
        """Return the ring of weights and factors, from the keys' warpgroup to the values' (float8 caches only)."""
        return Ring[Self.Map.BUFFERS](
            self.at[SharedMemBarrier](Self.Map.BUFFERS_FULL), self.at[SharedMemBarrier](Self.Map.BUFFERS_EMPTY)
        )

    @always_inline
    def status(self) -> Pointer[Int32, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        """Not 0 where a token's page is outside the pool."""
        return self.at[Int32](Self.Map.STATUS)

    @always_inline
    def item(self) -> Pointer[SplitItem, MutUntrackedOrigin, address_space=AddressSpace.SHARED]:
        """Return the item that the block serves."""
        return self.at[SplitItem](Self.Map.ITEM)

    @always_inline
    def descriptor[dtype: DType](self, operand: MatrixOperand) -> WGMMADescriptor[dtype]:
        return WGMMADescriptor[dtype](operand.descriptor(UInt32(Int(self.base))))
