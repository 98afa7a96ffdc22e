"""AMX: the eight tile registers of recent Intel servers, and the permission to use them.

A tile is up to 16 rows of 64 bytes. `tdpbf16ps` adds to float32 tile C `[m, n]` the product of A `[m, 2k]` and B, both
bfloat16, where row p of B holds the pairs `(2p, 2p + 1)` of column n side by side. `tdpbssd` does so in int32, by fours
in place of pairs, with signed bytes. The compiler does not allocate these registers: every
statement below is volatile and is not reordered. Their shapes are configured, so each kernel states at its start which
register has which shape.
"""

from std.sys import inlined_assembly
from std.sys.info import CompilationTarget

from .system_call import system_call

comptime HAS_AMX = (
    CompilationTarget.is_linux()
    and CompilationTarget.is_x86()
    and CompilationTarget._has_feature["amx-bf16"]()
    and CompilationTarget._has_feature["avx512bf16"]()
    and CompilationTarget._has_feature["avx512vbmi"]()
)
"""True if the CPU target has AMX, and the vector instructions that prepare its operands."""
comptime HAS_AMX_INT8 = (
    HAS_AMX and CompilationTarget._has_feature["amx-int8"]() and CompilationTarget._has_feature["avx512vnni"]()
)
"""True if it has products of bytes too, and those of vectors for what is left over."""


def amx_permitted() -> Bool:
    """Requests the tile registers from Linux, in 0.1 us at every call; False where the kernel refuses."""
    comptime if HAS_AMX:
        comptime ARCH_PRCTL = 158
        comptime REQUEST_PERMISSION = 0x1023
        comptime TILE_DATA = 18
        return system_call(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0
    else:
        return False


struct TileShapes(Movable):
    """The number of rows and the bytes of a row of the eight tile registers: the 64 bytes that `ldtilecfg` reads."""

    var memory: Array[UInt8, 64]

    def __init__(out self):
        self.memory = Array[UInt8, 64](fill=0)
        self.memory[0] = 1

    def set(mut self, tile: Int, rows: Int, row_bytes: Int):
        self.memory[16 + 2 * tile] = UInt8(row_bytes)
        self.memory[48 + tile] = UInt8(rows)

    def apply(self):
        """Configures this thread's registers."""
        inlined_assembly["ldtilecfg ($0)", NoneType, constraints="r,~{memory}", has_side_effect=True](
            self.memory.unsafe_ptr()
        )


@always_inline
def tile_release():
    """Frees the registers, so that a context switch need not save them."""
    inlined_assembly["tilerelease", NoneType, constraints="", has_side_effect=True]()


@always_inline
def tile_zero[tile: Int]():
    inlined_assembly["tilezero %tmm" + String(tile), NoneType, constraints="", has_side_effect=True]()


@always_inline
def tile_load[tile: Int](source: Pointer[_, _], stride: Int):
    """Reads the tile's rows from `source` on, `stride` bytes apart."""
    inlined_assembly[
        "tileloadd ($0,$1,1), %tmm" + String(tile), NoneType, constraints="r,r,~{memory}", has_side_effect=True
    ](source, stride)


@always_inline
def tile_store[tile: Int](target: Pointer[_, _], stride: Int):
    inlined_assembly[
        "tilestored %tmm" + String(tile) + ", ($0,$1,1)",
        NoneType,
        constraints="r,r,~{memory}",
        has_side_effect=True,
    ](target, stride)


@always_inline
def tile_dot[c: Int, a: Int, b: Int]():
    """Does `C += A B` on bfloat16; products and sums are float32."""
    inlined_assembly[
        "tdpbf16ps %tmm" + String(b) + ", %tmm" + String(a) + ", %tmm" + String(c),
        NoneType,
        constraints="",
        has_side_effect=True,
    ]()


@always_inline
def tile_dot_int8[c: Int, a: Int, b: Int]():
    """Does `C += A B` on signed bytes; sums are int32."""
    inlined_assembly[
        "tdpbssd %tmm" + String(b) + ", %tmm" + String(a) + ", %tmm" + String(c),
        NoneType,
        constraints="",
        has_side_effect=True,
    ]()


@always_inline
def tile_dot_2x2(
    a: Pointer[_, _], second_a: Pointer[_, _], a_stride: Int, b: Pointer[_, _], second_b: Pointer[_, _], b_stride: Int
):
    """Does `tmm[2 i + j] += a_i b_j`: loads both `a` into `tmm4` and `tmm5`, both `b` into `tmm6` and `tmm7`.

    The rows of an operand lie so many bytes apart.
    """
    comptime first = "tileloadd ($0,$2,1), %tmm4\ntileloadd ($3,$5,1), %tmm6\ntdpbf16ps %tmm6, %tmm4, %tmm0\n"
    comptime second_column = "tileloadd ($4,$5,1), %tmm7\ntdpbf16ps %tmm7, %tmm4, %tmm1\n"
    comptime second_row = "tileloadd ($1,$2,1), %tmm5\ntdpbf16ps %tmm6, %tmm5, %tmm2\ntdpbf16ps %tmm7, %tmm5, %tmm3\n"
    comptime text = first + second_column + second_row
    inlined_assembly[text, NoneType, constraints="r,r,r,r,r,r,~{memory}", has_side_effect=True](
        a, second_a, a_stride, b, second_b, b_stride
    )
