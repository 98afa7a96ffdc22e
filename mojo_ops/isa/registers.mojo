"""The vector registers of the CPU target, which decide how many sums a loop may keep."""

from std.sys import CompilationTarget, inlined_assembly, simd_width_of

comptime REGISTER_LANES = min(16, simd_width_of[DType.float32]())
"""Float32 lanes of a register: 16 with AVX-512, 8 with AVX2, 4 elsewhere."""
comptime HAS_32_REGISTERS = REGISTER_LANES == 16 or not CompilationTarget.is_x86()
"""True if there are 32 of them, not 16."""
comptime RegisterVector = SIMD[DType.float32, REGISTER_LANES]


@always_inline
def unfused(x: SIMD[DType.float32, _]) -> type_of(x):
    """The same numbers, rounded: the compiler fuses no addition with the products that they are.

    Where it does is its own choice, another one in each loop.
    """
    comptime constraint = "=v,0" if REGISTER_LANES == 16 else ("=x,0" if CompilationTarget.is_x86() else "=w,0")
    var result = x
    comptime for i in range(0, x.length, REGISTER_LANES):
        var part = inlined_assembly["", RegisterVector, constraints=constraint, has_side_effect=False](
            x.slice[REGISTER_LANES, offset=i]()
        )
        result = result.insert[offset=i](part)
    return result
