"""Copy pages: what a pool does before a request writes to a page that it shares."""

from std.math import ceildiv
from std.memory import unsafe_memcpy

from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer
from ..isa.threads import Workers, run_tasks

comptime ELEMENTS_PER_TASK = 128 * 1024


def check_page_pairs(sources: RowPointer, targets: RowPointer, count: Int, num_pages: Int) raises:
    """Every page exists, no page is written twice, and none is both read and written: their order is free."""
    comptime WRITTEN = 1
    comptime READ = 2
    var uses = List[UInt8](length=num_pages, fill=0)
    for pair in range(count):
        var source = Int(sources[unsafe_offset=pair])
        var target = Int(targets[unsafe_offset=pair])
        if source < 0 or source >= num_pages:
            raise Error("sources: pair ", pair, " reads page ", source, ", outside the pool's [0, ", num_pages, ")")
        if target < 0 or target >= num_pages:
            raise Error("targets: pair ", pair, " writes page ", target, ", outside the pool's [0, ", num_pages, ")")
        if uses[target] & WRITTEN:
            raise Error("targets: pair ", pair, " writes page ", target, ", which an earlier pair already writes")
        uses[target] |= WRITTEN
        uses[source] |= READ
    for pair in range(count):
        var target = Int(targets[unsafe_offset=pair])
        if uses[target] & READ:
            raise Error("targets: pair ", pair, " writes page ", target, ", which is also among the sources")


def copy_whole_pages[
    dtype: DType, //
](
    blocks: Pointer[Scalar[dtype], MutUntrackedOrigin],
    page_elements: Int,
    sources: RowPointer,
    targets: RowPointer,
    count: Int,
    workers: Workers,
):
    """Copies whole pages of an array whose pages are contiguous, on up to `workers` threads; at rank 6 that is every
    layer.
    """
    var parts = max(1, ceildiv(page_elements, ELEMENTS_PER_TASK))

    def task(index: Int) {var blocks, var page_elements, var sources, var targets, var parts}:
        var pair, part = divmod(index, parts)
        var begin = part * page_elements // parts
        unsafe_memcpy(
            dest=blocks.unsafe_offset(Int(targets[unsafe_offset=pair]) * page_elements + begin),
            src=blocks.unsafe_offset(Int(sources[unsafe_offset=pair]) * page_elements + begin),
            count=(part + 1) * page_elements // parts - begin,
        )

    run_tasks(task, count * parts, workers)


def copy_strided_pages(cache: PagedKVCache, sources: RowPointer, targets: RowPointer, count: Int, workers: Workers):
    """Copies pages of a view on up to `workers` threads, head by head of every slot: memory between them is not
    written.
    """

    def task(pair: Int) {var cache, var sources, var targets}:
        var source = Int(sources[unsafe_offset=pair])
        var target = Int(targets[unsafe_offset=pair])
        for slot in range(cache.slots()):
            for head in range(cache.num_heads()):
                unsafe_memcpy(
                    dest=cache.blocks.ptr.unsafe_offset(cache.offset(target, slot, head, 0)),
                    src=cache.blocks.ptr.unsafe_offset(cache.offset(source, slot, head, 0)),
                    count=cache.head_dim(),
                )

    run_tasks(task, count, workers)
