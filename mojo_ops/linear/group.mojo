"""Several linear layers of one x, `y_i = x w_i^T`, in one call: q, k and v, or gate and up.

With dot products x is packed once, and the threads share the rows of all weights, so they start and wait once. Each y
is bit by bit what `linear` computes.
"""

from max.algorithm import sync_parallelize
from std.math import ceildiv

from ..cache.pointers import untracked
from ..isa.amx import HAS_AMX, amx_permitted
from ..isa.bf16_dot import USES_BF16_DOT
from ..isa.convert import FloatVector
from ..isa.line_counter import LineCounter
from ..isa.memory import Bf16Pointer, align_to_line
from .bf16_dot import PACKED_ROWS, PANEL_ROWS, SECTION_ROWS, STEP, DotLinear, pack_panel, section_rows
from .dispatch import linear


@fieldwise_init
struct LinearMember[dtype: DType, weight_dtype: DType](TrivialRegisterPassable):
    """One member of a group, and its result."""

    var y: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[m, n]`."""
    var w: Pointer[Scalar[Self.weight_dtype], MutUntrackedOrigin]
    """`[n, k]`."""
    var n: Int


def linear_group[
    dtype: DType, weight_dtype: DType, count: Int, //
](
    members: Array[LinearMember[dtype, weight_dtype], count],
    x: Pointer[Scalar[dtype], MutUntrackedOrigin],
    m: Int,
    k: Int,
    workers: Int,
):
    """Computes every member's `y = x w^T`: x `[m, k]`. The result does not depend on `workers`."""
    comptime if count > 1 and USES_BF16_DOT and dtype == DType.bfloat16 and weight_dtype == DType.bfloat16:
        if not (HAS_AMX and amx_permitted()):
            var shared = untracked(Pointer(to=members[0]).unsafe_mut_cast[True]())
            var narrow = shared.unsafe_bitcast[LinearMember[DType.bfloat16, DType.bfloat16]]()
            var source = x.unsafe_bitcast[BFloat16]()
            if m <= 1:
                start_group[1](narrow, count, source, m, k, workers)
            elif m == 2:
                start_group[2](narrow, count, source, m, k, workers)
            elif m <= 4:
                start_group[4](narrow, count, source, m, k, workers)
            else:
                start_group[PANEL_ROWS](narrow, count, source, m, k, workers)
            _ = members
            return
    for i in range(count):
        linear(members[i].y, x, members[i].w, m, members[i].n, k, workers)


def start_group[
    rows: Int
](
    members: Pointer[LinearMember[DType.bfloat16, DType.bfloat16], MutUntrackedOrigin],
    count: Int,
    x: Bf16Pointer,
    m: Int,
    k: Int,
    workers: Int,
):
    """Packs x in panels of `rows` rows, and multiplies them."""
    var panel_elements = ceildiv(k, STEP) * rows * STEP
    var memory = List[BFloat16](capacity=ceildiv(min(m, PACKED_ROWS), rows) * panel_elements + STEP)
    for first in range(0, m, PACKED_ROWS):
        var present = min(PACKED_ROWS, m - first)
        var panels = ceildiv(present, rows)
        var source = x.unsafe_offset(first * k)
        var packed = align_to_line(untracked(memory.unsafe_ptr()))

        def pack(panel: Int) {var source, var present, var k, var packed, var panel_elements}:
            pack_panel[rows](
                source.unsafe_offset(panel * rows * k),
                min(rows, present - panel * rows),
                k,
                packed.unsafe_offset(panel * panel_elements),
            )

        if panels == 1:
            pack(0)
        else:
            sync_parallelize(pack, panels)
        DotLinearGroup[rows](members, count, packed, first, present, k, panels).run(workers)
    _ = memory^


@fieldwise_init
struct DotLinearGroup[rows: Int](TrivialRegisterPassable):
    """The operands of one call, or of `PACKED_ROWS` of its rows."""

    var members: Pointer[LinearMember[DType.bfloat16, DType.bfloat16], MutUntrackedOrigin]
    var count: Int
    var x: Bf16Pointer
    """Packed by `pack_panel`: `[panels, steps, rows, STEP]`."""
    var first: Int
    """The row of each y that the first row of x belongs to."""
    var m: Int
    var k: Int
    var panels: Int

    def run(self, workers: Int):
        """Computes every y on all workers. The next idle thread takes the next section of rows of any w."""
        var columns = 0
        for i in range(self.count):
            columns += self.members[unsafe_offset=i].n
        var depth = section_rows(columns, workers)
        var sections = 0
        for i in range(self.count):
            sections += ceildiv(self.members[unsafe_offset=i].n, depth)
        var counter = LineCounter()
        var taken = counter.at()

        def task(index: Int) {var self, var depth, var sections, var taken}:
            # [SECTION_ROWS, rows]: the sums of one panel.
            var memory = Array[FloatVector, SECTION_ROWS * Self.rows](fill=0)
            var sums = untracked(Pointer(to=memory[0]))
            var section = Int(taken[].fetch_add(1))
            while section < sections:
                # Taken early, so that it can be prefetched.
                var next = Int(taken[].fetch_add(1))
                var at = self.member_of(section, depth)
                ref member = self.members[unsafe_offset=at[0]]
                var coming = self.member_of(next, depth)
                DotLinear[Self.rows](
                    member.y.unsafe_offset(self.first * member.n),
                    self.x,
                    member.w,
                    self.m,
                    member.n,
                    self.k,
                    self.panels,
                ).multiply_section(
                    at[1],
                    min(member.n, at[1] + depth),
                    # A section of another member is not prefetched.
                    coming[1] if coming[0] == at[0] else member.n,
                    sums,
                )
                section = next
            _ = memory

        sync_parallelize(task, max(1, min(sections, workers)))
        _ = counter^

    @always_inline
    def member_of(self, section: Int, depth: Int) -> Tuple[Int, Int]:
        """The member that a section belongs to, and its first row there; `(count, 0)` past the last."""
        var left = section
        for i in range(self.count):
            var sections = ceildiv(self.members[unsafe_offset=i].n, depth)
            if left < sections:
                return (i, left * depth)
            left -= sections
        return (self.count, 0)
