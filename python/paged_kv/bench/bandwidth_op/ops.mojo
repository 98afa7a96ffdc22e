"""The machine's ceilings, as MAX ops: how fast all cores together read memory, and copy it.

They run on the same threads as the kernels that are held against them. A loop reads several streams of one core's
share at once, and prefetches each line a little before it is needed: one stream alone leaves bandwidth unused.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.memory import unsafe_memcpy
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime LINE = 64
comptime Line = SIMD[DType.uint8, LINE]
comptime Bytes = Pointer[UInt8, MutUntrackedOrigin]
comptime READ = PrefetchOptions().for_read().high_locality().to_data_cache()


@extensibility.register("bench_read")
struct Read:
    """Reads all of `data` `[n]` once; `sums` `[cores]` hold a sum, so that no read can be left out.

    `spacing` `[1]` int64 is the distance in bytes of a core's streams, `ahead` `[1]` how many bytes ahead of its
    use a line is asked for. Up to a block (streams * spacing) at the end of a core's share is read as one stream.
    """

    @staticmethod
    def execute[
        streams: Int, target: StaticString
    ](
        sums: OutputTensor[dtype=DType.uint8, rank=1, ...],
        data: InputTensor[dtype=DType.uint8, rank=1, ...],
        spacing: InputTensor[dtype=DType.int64, rank=1, ...],
        ahead: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var cores = sums.dim_size(0)
        var base = untracked(data.unsafe_ptr())
        var result = untracked(sums.unsafe_ptr())
        var lines = data.dim_size(0) // LINE
        var apart = Int(untracked(spacing.unsafe_ptr())[unsafe_offset=0])
        var early = Int(untracked(ahead.unsafe_ptr())[unsafe_offset=0])

        def task(core: Int) {var base, var result, var lines, var cores, var apart, var early}:
            var begin = core * lines // cores
            var end = (core + 1) * lines // cores
            result[unsafe_offset=core] = read_share[streams](
                base.unsafe_offset(begin * LINE), (end - begin) * LINE, apart, early
            )

        sync_parallelize(task, cores)


def read_share[streams: Int](base: Bytes, count: Int, apart: Int, early: Int) -> UInt8:
    """A sum over `count` bytes (whole lines) from `base` on."""
    var sums = Array[Line, streams](fill=0)
    var block = streams * apart
    var blocks = count // block
    for index in range(blocks):
        var start = base.unsafe_offset(index * block)
        for at in range(0, apart, LINE):
            comptime for stream in range(streams):
                var line = start.unsafe_offset(stream * apart + at)
                prefetch[READ](line.unsafe_offset(early))
                sums[stream] += line.unsafe_load[width=LINE](0)
    for at in range(blocks * block, count, LINE):
        var line = base.unsafe_offset(at)
        prefetch[READ](line.unsafe_offset(early))
        sums[0] += line.unsafe_load[width=LINE](0)
    comptime for stream in range(1, streams):
        sums[0] += sums[stream]
    return sums[0].reduce_add()


@extensibility.register("bench_copy")
struct Copy:
    """Copies `source` `[n]` to `target_bytes` `[n]`, in `chunk` `[1]` int64 bytes a task."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        target_bytes: MutableInputTensor[dtype=DType.uint8, rank=1, ...],
        source: InputTensor[dtype=DType.uint8, rank=1, ...],
        chunk: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var count = source.dim_size(0)
        if target_bytes.dim_size(0) != count:
            raise Error("target_bytes has ", target_bytes.dim_size(0), " bytes, source has ", count)
        var into = untracked(target_bytes.unsafe_ptr())
        var out_of = untracked(source.unsafe_ptr())
        var size = Int(untracked(chunk.unsafe_ptr())[unsafe_offset=0])
        if size == 0:
            size = (count + parallelism_level(None) - 1) // parallelism_level(None)

        def task(index: Int) {var into, var out_of, var count, var size}:
            var begin = index * size
            unsafe_memcpy(
                dest=into.unsafe_offset(begin), src=out_of.unsafe_offset(begin), count=min(size, count - begin)
            )

        sync_parallelize(task, (count + size - 1) // size)


@always_inline
def untracked[T: AnyType](pointer: Pointer[T, _]) -> Pointer[T, MutUntrackedOrigin]:
    """The same address, without the origin that a task cannot carry."""
    return pointer.unsafe_mut_cast[True]().unsafe_origin_cast[MutUntrackedOrigin]()
