"""The vector registers of the CPU target, which decide how many sums a loop may keep."""

from std.sys import CompilationTarget, simd_width_of

comptime REGISTER_LANES = min(16, simd_width_of[DType.float32]())
"""Float32 lanes of a register: 16 with AVX-512, 8 with AVX2, 4 elsewhere."""
comptime HAS_32_REGISTERS = REGISTER_LANES == 16 or not CompilationTarget.is_x86()
"""True if there are 32 of them, not 16."""
comptime RegisterVector = SIMD[DType.float32, REGISTER_LANES]
