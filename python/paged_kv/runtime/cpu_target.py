"""The CPU that MAX compiles for, chosen from what this CPU reports it can do.

MAX picks its LLVM target by the CPU's model number. A virtual machine that masks the number gets an older
target: bf16 code ran five times slower on a Sapphire Rapids that called itself Rocket Lake.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from paged_kv.errors import ToolchainError


def _flags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_HASWELL = _flags(
    "fpu mmx fxsr cx8 cmov sse sse2 pni ssse3 sse4_1 sse4_2 cx16 popcnt lahf_lm xsave "
    "avx avx2 bmi1 bmi2 f16c fma abm movbe pclmulqdq"
)
_SKYLAKE = _HASWELL | _flags("adx aes 3dnowprefetch avx512f avx512bw avx512cd avx512dq avx512vl")
_CASCADE_LAKE = _SKYLAKE | _flags("avx512_vnni")
_COOPER_LAKE = _CASCADE_LAKE | _flags("avx512_bf16")
_ICE_LAKE = _CASCADE_LAKE | _flags(
    "avx512ifma avx512vbmi avx512_vbmi2 avx512_bitalg avx512_vpopcntdq gfni sha_ni vaes vpclmulqdq"
)
_SAPPHIRE_RAPIDS = _ICE_LAKE | _flags("avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_bf16 amx_int8")
_ZEN2 = _HASWELL | _flags("adx aes 3dnowprefetch sha_ni sse4a")
_ZEN3 = _ZEN2 | _flags("vaes vpclmulqdq")
_ZEN4 = _ZEN3 | _ICE_LAKE | _flags("avx512_bf16")

REQUIRED_FLAGS: dict[str, frozenset[str]] = {
    "graniterapids": _SAPPHIRE_RAPIDS | _flags("amx_fp16"),
    "sapphirerapids": _SAPPHIRE_RAPIDS,
    "znver5": _ZEN4 | _flags("avx_vnni avx512_vp2intersect"),
    "znver4": _ZEN4,
    "cooperlake": _COOPER_LAKE,
    "icelake-server": _ICE_LAKE,
    "cascadelake": _CASCADE_LAKE,
    "skylake-avx512": _SKYLAKE,
    "znver3": _ZEN3,
    "znver2": _ZEN2,
    "haswell": _HASWELL,
}
"""LLVM's name of each target, the best first, and the flags (as Linux names them) that a CPU must report for it.

They are all the features of the target that the code generator may use by itself. Left out are those that are
reached only by name (`waitpkg`, `pku`, `shstk`, `clwb`, `rdseed`, ...): hypervisors hide many,
and a kernel that does not name them never executes them. AMD's targets need `sse4a`, which tells them from Intel's.
"""


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as the operating system describes it."""

    machine: str
    """The architecture: `x86_64`, `aarch64`, ..."""
    model_name: str
    flags: frozenset[str]
    """Features that every core reports; empty where the system does not list them."""

    @classmethod
    def read(cls, path: Path = Path("/proc/cpuinfo")) -> CpuInfo:
        """The CPU of this machine. Never raises: what cannot be read stays empty."""
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return cls.parse(platform.machine(), text)

    @classmethod
    def parse(cls, machine: str, cpuinfo: str) -> CpuInfo:
        """From the text of `/proc/cpuinfo`."""
        flags: list[set[str]] = []
        model_name = ""
        for line in cpuinfo.splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):  # x86's and ARM's word
                flags.append(set(value.split()))
            elif key.strip() == "model name":
                model_name = value.strip()
        return cls(machine, model_name, frozenset(set.intersection(*flags)) if flags else frozenset())


def choose_cpu_target(cpu: CpuInfo) -> str | None:
    """The best LLVM target that claims nothing `cpu` lacks; None leaves the choice to MAX."""
    if cpu.machine.lower() not in ("x86_64", "amd64"):
        return None
    return next((target for target, required in REQUIRED_FLAGS.items() if required <= cpu.flags), None)


def usable_targets(in_force: str | None, cpu: CpuInfo) -> list[str]:
    """The targets whose code may run where `in_force` was chosen, the best first: it, then those that ask for less.

    Empty where `cpu` lacks a flag of it, or what it asks for is not known.
    """
    claimed = REQUIRED_FLAGS.get(in_force or "")
    if in_force is None or claimed is None or not claimed <= cpu.flags:
        return []
    return [in_force, *(name for name, required in REQUIRED_FLAGS.items() if required < claimed)]


def check_cpu_runs(target: str | None, cpu: CpuInfo) -> None:
    """Refuses code for a target that the CPU cannot run, which would end the process.

    A target that is not listed here, and a CPU that says nothing of itself, are the user's own affair.

    Raises:
        ToolchainError: the CPU lacks a flag of the target.
    """
    lacking = REQUIRED_FLAGS.get(target or "", frozenset()) - cpu.flags
    if lacking and cpu.flags:
        raise ToolchainError(
            f"CPU target {target} is in force, but this CPU does not report {', '.join(sorted(lacking))}: code that is"
            " compiled for it would end the process"
        )


def apply_cpu_target() -> str | None:
    """Makes MAX compile for this CPU, and returns the target in force (None: MAX's own choice).

    Call it before the first compile. A target that is already set, by the user or an earlier call, stays.
    """
    # Not at the top: `doctor` reads the CPU where MAX is not installed.
    from max.driver import get_virtual_cpu_target, set_virtual_cpu_target

    if in_force := get_virtual_cpu_target():
        return in_force
    target = choose_cpu_target(CpuInfo.read())
    if target is not None:
        set_virtual_cpu_target(target)
    return target
