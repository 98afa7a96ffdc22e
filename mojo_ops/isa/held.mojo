"""Constant vectors that a loop keeps."""

from std.sys import CompilationTarget, inlined_assembly, size_of

comptime HOLDS_CONSTANTS = CompilationTarget.is_x86() and CompilationTarget._has_feature["avx512f"]()
"""True if `held` has an effect: with fewer registers, loops would not keep the constants."""


@always_inline
def held(constant: SIMD) -> type_of(constant):
    """A constant of 64 bytes as a value of which the compiler only knows that it is in a register.

    MAX compiles ops for code anywhere in memory (LLVM's large code model): the address of a constant is an instruction
    of its own, and the compiler loads constants again at every use rather than keep them. Called before a loop, this
    makes it keep the constant in a register, or on the stack.
    """
    comptime assert size_of[type_of(constant)]() == 64, "one register of AVX-512"
    comptime if HOLDS_CONSTANTS:
        return inlined_assembly["", type_of(constant), constraints="=v,0", has_side_effect=False](constant)
    else:
        return constant
