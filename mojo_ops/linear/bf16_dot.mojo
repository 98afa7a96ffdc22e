"""`y_i = x w_i^T` in bfloat16 by dot products of pairs: weights as they are stored, rows of x packed in panels.

A sum is one vector of 16 float32 along all of K, folded at the end. So its order depends on K alone, whatever the
number of rows and threads. The instruction takes denormal operands as zero, and a denormal sum becomes zero.

A thread takes sections of rows of w (`bf16_dot_section.mojo`), of whichever layer is next.
"""

from std.math import ceildiv

from ..cache.pointers import untracked
from ..isa.convert import FloatVector
from ..isa.line_counter import LineCounter
from ..isa.memory import Bf16Pointer, align_to_line
from .bf16_dot_section import DotLinear, PANEL_ROWS, SECTION_ROWS, STEP, pack_panel
from .member import LinearMember
from .vector_operands import balanced_rows
from ..isa.threads import Workers, run_tasks

comptime LEAST_ROWS = 8
"""Rows of w in a section, at least."""
comptime PACKED_ROWS = 512
"""Rows of x that are packed at once."""
comptime Bf16Members = Pointer[LinearMember[DType.bfloat16, DType.bfloat16], MutUntrackedOrigin]


@no_inline
def linear_bf16_dot(members: Bf16Members, count: Int, x: Bf16Pointer, m: Int, k: Int, workers: Workers):
    """Computes every member's `y = x w^T` on up to `workers` threads: x `[m, k]`."""
    if m <= 1:
        start[1](members, count, x, m, k, workers)
    elif m == 2:
        start[2](members, count, x, m, k, workers)
    elif m <= 4:
        start[4](members, count, x, m, k, workers)
    else:
        start[PANEL_ROWS](members, count, x, m, k, workers)


def start[rows: Int](members: Bf16Members, count: Int, x: Bf16Pointer, m: Int, k: Int, workers: Workers):
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

        if rows == 1 and k % STEP == 0:
            # A panel of one row is the row itself.
            packed = source
        elif panels == 1:
            pack(0)
        else:
            run_tasks(pack, panels, workers)
        DotLinearGroup[rows](members, count, packed, first, present, k, panels).run(workers)
    _ = memory^


def section_rows(n: Int, workers: Int) -> Int:
    """Rows of w in a section: as many as leave every worker at least 4 sections, and idle for 5 % at most; else those
    that leave the least."""
    comptime for depth in [SECTION_ROWS, 32, 16]:
        var rounds = ceildiv(ceildiv(n, depth), workers)
        if rounds >= 4 and rounds * workers * depth <= n + n // 20:
            return depth
    return balanced_rows(LEAST_ROWS, n, workers)


@fieldwise_init
struct DotLinearGroup[rows: Int](TrivialRegisterPassable):
    """The operands of one call, or of `PACKED_ROWS` of its rows."""

    var members: Bf16Members
    var count: Int
    var x: Bf16Pointer
    """Packed by `pack_panel`: `[panels, steps, rows, STEP]`."""
    var first: Int
    """The row of each y that the first row of x belongs to."""
    var m: Int
    var k: Int
    var panels: Int

    def run(self, workers: Workers):
        """Computes every y on all workers. The next idle thread takes the next section of rows of any w."""
        var columns = 0
        for i in range(self.count):
            columns += self.members[unsafe_offset=i].n
        var depth = section_rows(columns, workers.count)
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

        run_tasks(task, max(1, min(sections, workers.count)), workers)
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
