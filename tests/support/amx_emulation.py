"""AMX's kernels on a CPU without AMX: the Mojo package with `tests/isa/emulated_amx.mojo` in place of `isa/amx.mojo`.

For tests, not for use: a product of two tiles takes a hundred times the instruction's time. The other code of AMX's
kernels is as it would run on a CPU that has AMX, and needs a CPU target with AVX-512 VBMI, VNNI and BF16.
"""

import shutil
import tempfile
from pathlib import Path

from paged_kv.graphs.ops import kernels
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, choose_cpu_target
from support import isa

INSTRUCTIONS = Path("isa", "amx.mojo")
EMULATION = Path(__file__).parents[1] / "isa" / "emulated_amx.mojo"
NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_bf16", "avx512_vnni"})
REAL = frozenset({"amx_tile", "amx_bf16"})
_folder: tempfile.TemporaryDirectory[str] | None = None


def reason_to_skip(cpu: CpuInfo) -> str | None:
    """The reason why the emulation is of no use on a CPU; None where it is.

    What the CPU has is not enough: the compiler, too, must know of it. It ends the process where the target lacks an
    instruction that a kernel names, as `cooperlake`, chosen for a Xeon whose AMX is hidden, lacks AVX-512 VBMI.
    """
    target = choose_cpu_target(cpu)
    flags = REQUIRED_FLAGS.get(target or "", frozenset())
    if flags >= REAL:
        return "this CPU has AMX: the op tests run on it"
    missing = NEEDED - flags
    return f"AMX's kernels need {', '.join(sorted(missing))}, which target {target} lacks" if missing else None


def copy_package(folder: Path) -> Path:
    """Makes `folder/mojo_ops`, the Mojo package with the emulation."""
    copy = folder / "mojo_ops"
    shutil.copytree(kernels(), copy)
    shutil.copyfile(EMULATION, copy / INSTRUCTIONS)
    return copy


def install() -> None:
    """Makes this process build its libraries of kernels from the copy."""
    global _folder
    _folder = tempfile.TemporaryDirectory()
    isa.use_libraries(sources=copy_package(Path(_folder.name)))
