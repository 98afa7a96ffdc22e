"""Moves of tokens inside their requests: what is kept of a tree becomes contiguous."""

from std.memory import unsafe_memcpy

from ..cache.page_table import PageTable
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.pointers import RowPointer
from ..isa.threads import Workers, run_tasks
from .slot_layout import BYTES_PER_TASK, SlotLayout


@fieldwise_init
struct TokenMoves(TrivialRegisterPassable):
    """Token `sources[i]` of request `batch_indices[i]` becomes its token `targets[i]`; -1 skips the move."""

    var batch_indices: RowPointer
    var sources: RowPointer
    var targets: RowPointer
    var count: Int

    def check(self, table: PageTable) raises:
        """Every token has a slot, and the moves can be carried out one after the other, in place: those of a request
        ascend, none goes forward, and no two requests meet in a slot."""
        table.check_shape()
        var last_source = List[Int](length=table.batch, fill=-1)
        var last_target = List[Int](length=table.batch, fill=-1)
        var holders = Dict[Int, Int]()
        for move in range(self.count):
            var request = Int(self.batch_indices[unsafe_offset=move])
            var source = Int(self.sources[unsafe_offset=move])
            var target = Int(self.targets[unsafe_offset=move])
            if request == -1:
                continue
            if request < -1 or request >= table.batch:
                raise Error("batch_indices: move ", move, " names request ", request, " of ", table.batch)
            if target < 0 or target > source:
                raise Error(
                    "targets: move ", move, " (request ", request, ") goes from token ", source, " to token ", target
                )
            if source <= last_source[request] or target <= last_target[request]:
                raise Error(
                    "sources: move ",
                    move,
                    " (request ",
                    request,
                    ") goes from token ",
                    source,
                    " to token ",
                    target,
                    ", after one from ",
                    last_source[request],
                    " to ",
                    last_target[request],
                    ": both must ascend",
                )
            last_source[request] = source
            last_target[request] = target
            for position in [source, target]:
                var page_slot, slot = divmod(position, table.page_size)
                if page_slot >= table.max_pages:
                    raise Error(
                        "sources: move ",
                        move,
                        " (request ",
                        request,
                        ") reads token ",
                        position,
                        ", past the ",
                        table.max_pages,
                        " pages of ",
                        table.page_size,
                        " in lookup_table",
                    )
                var page = table.page(request, page_slot)
                var holder = holders.setdefault(page * table.page_size + slot, request)
                if holder != request:
                    raise Error(
                        "targets: move ",
                        move,
                        " (request ",
                        request,
                        ") uses slot ",
                        slot,
                        " of page ",
                        page,
                        ", as a move of request ",
                        holder,
                        " does",
                    )


def move_tokens(
    k_cache: PagedKVCache,
    v_cache: type_of(k_cache),
    num_layers: Int,
    layer_stride: Int,
    moves: TokenMoves,
    workers: Workers,
):
    """Carries out the moves in `num_layers` layers that lie `layer_stride` elements apart, on up to `workers`
    threads; `moves` were checked.
    """

    def task(index: Int) {var k_cache, var v_cache, var layer_stride, var moves}:
        var layer = index // 2
        move_in(k_cache if index % 2 == 0 else v_cache, layer * layer_stride, moves)

    var tasks = 2 * num_layers
    var bytes = tasks * moves.count * SlotLayout.of(k_cache).elements()
    run_tasks(task, tasks, 1 if bytes < BYTES_PER_TASK else workers)


def move_in(cache: PagedKVCache, start: Int, moves: TokenMoves):
    """The moves in K or V of one layer, which begins `start` elements after the view."""
    var layout = SlotLayout.of(cache)
    var copies = 1 if layout.adjacent_heads else layout.num_heads
    for move in range(moves.count):
        var request = Int(moves.batch_indices[unsafe_offset=move])
        var source = Int(moves.sources[unsafe_offset=move])
        var target = Int(moves.targets[unsafe_offset=move])
        if request < 0 or source == target:
            continue
        for head in range(copies):
            unsafe_memcpy(
                dest=cache.block_paged_ptr[1](request, target, head).unsafe_offset(start),
                src=cache.block_paged_ptr[1](request, source, head).unsafe_offset(start),
                count=layout.elements() // copies,
            )
