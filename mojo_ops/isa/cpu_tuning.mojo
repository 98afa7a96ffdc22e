"""Choices that are best on one family of CPUs and not on another, though both run the same instructions.

The families and their values are in `cpu_tuning_table.mojo`, which `benchmarks/tune.py` writes. A family is the CPU
target that the code is compiled for, by LLVM's name.
"""

from std.sys import CompilationTarget

from .cpu_tuning_table import tuning_of

comptime FAMILY = CompilationTarget._arch()
comptime CPU_TUNING = tuning_of("znver3" if FAMILY == "znver2" else FAMILY)
"""The values of the CPU family that this code is compiled for. A Zen 2 has those of a Zen 3: none was at hand."""
