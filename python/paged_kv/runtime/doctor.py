"""Findings of `paged-kv doctor`: the toolchain, the CPU and its target, GPUs, the cache folder, what is compiled."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paged_kv.graphs.encodings import GGUF_ENCODINGS
from paged_kv.runtime.cache_folder import cache_folder
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, apply_cpu_target
from paged_kv.runtime.kernel_choice import attention_kernels, explain
from paged_kv.runtime.threads import allowed_cpus, cgroup_quota, started_pool_threads
from paged_kv.versions import PINNED

if TYPE_CHECKING:  # this module has to work where MAX is not installed
    from paged_kv.runtime.libraries import Library

_TELLING_FLAGS = (
    "avx2 fma avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8 asimd asimdhp bf16 sve"
)

T = TypeVar("T")


@dataclass
class Report:
    """Findings, each empty or None where there is nothing, and in `problems` what is wrong with them."""

    cpu: CpuInfo
    cores: int
    """Cores that this process may run on."""
    versions: dict[str, str | None] = field(default_factory=dict)
    """Installed version of each pinned distribution."""
    threads: int | None = None
    """Threads that the ops run on; None: unknown."""
    quota: float | None = None
    """CPUs that the control group grants; None: no limit."""
    target: str | None = None
    """The LLVM CPU target in force; None: MAX's own choice."""
    default_target: str | None = None
    """The target that MAX picks by itself."""
    gpus: list[str] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)
    """The GPUs' architectures: "sm_90a", "gfx942", ..."""
    kernels: Path | None = None
    """The folder of the Mojo sources."""
    cache: Path | None = None
    compiled: dict[str, str | None] = field(default_factory=dict)
    """The place of each API kernel's code for this CPU, in words; None: a first call compiles it."""
    steps: dict[str, list[str | None]] = field(default_factory=dict)
    """Each step of a model that was asked for, and where each library that it calls lies, likewise."""
    problems: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0 when nothing is wrong, else 1."""
        return 1 if self.problems else 0


def collect(steps: Callable[[], Mapping[str, Sequence[Library]]] = dict) -> Report:
    """Looks at this machine and installation. Never raises: what goes wrong becomes a problem in the report.

    Args:
        steps: The libraries that the steps of some models call, by what the report calls them; called where MAX is
            installed.
    """
    report = Report(cpu=CpuInfo.read(), cores=len(allowed_cpus()), quota=cgroup_quota())

    def attempt(what: str, find: Callable[[], T]) -> T | None:
        try:
            return find()
        except Exception as error:
            report.problems.append(f"{what}: {' '.join(str(error).split()) or type(error).__name__}")
            return None

    report.versions = {name: _installed(name) for name in PINNED}
    report.problems += _version_problems(report.versions)
    report.kernels = attempt("Mojo sources", _kernels)
    report.cache = attempt("cache", cache_folder)
    if report.versions["max"] is not None:
        report.target = attempt("CPU target", apply_cpu_target)
        report.threads = attempt("threads", started_pool_threads)
        if report.cache is not None:  # without one it is said already that there is none
            report.compiled, report.steps = attempt("compiled kernels", lambda: _compiled(steps())) or ({}, {})
        gpus = attempt("GPU", _gpus) or []
        report.gpus = [name for name, _ in gpus]
        report.architectures = [architecture for _, architecture in gpus]
    if report.versions["mojo"] is not None:
        report.default_target = attempt("mojo", _default_target)
    return report


def render(report: Report) -> str:
    """The report as text, one finding a line."""
    cpu = report.cpu
    features = " ".join(flag for flag in _TELLING_FLAGS.split() if flag in cpu.flags)
    target = report.target or "MAX's own choice"
    if report.default_target:
        target += f" (MAX alone picks {report.default_target})"
    rows = {
        **{name: version or "not installed" for name, version in report.versions.items()},
        "python": f"{platform.python_version()} ({sys.executable})",
        "cpu": f"{cpu.model_name or 'unknown model'}, {cpu.machine}, {report.cores} core{'s' * (report.cores != 1)}",
        "threads": _threads_in_words(report),
        "features": features or "none listed",
        "target": target,
        "gpu": ", ".join(report.gpus) or "none",
        **_attention_on(report.architectures),
        "kernels": str(report.kernels or "not found"),
        "cache": str(report.cache or "none"),
        "compiled": _compiled_in_words(report.compiled),
        "call": _first_call_in_words(report.compiled),
        "weights": _quantised_in_words(report.target),
        **{name: _step_in_words(places) for name, places in report.steps.items()},
    }
    lines = [f"{name:<10}{value}" for name, value in rows.items()]
    lines += [f"error: {problem}" for problem in report.problems] or ["all is well"]
    return "\n".join(lines)


def explain_kernels(
    architectures: Sequence[str], head_dim: int, group: int, page_size: int, cpu_target: str | None = None
) -> str:
    """The attention kernel of every pair of dtypes, on the CPU and on GPUs of these architectures."""
    sizes = f"head_dim {head_dim}, {group} query heads a KV head, pages of {page_size}"
    blocks = []
    for architecture in (None, *dict.fromkeys(architectures)):
        lines = explain(architecture, head_dim, group, page_size, cpu_target)
        blocks.append(
            "\n".join([f"\n{architecture or 'cpu'}: attention with {sizes}", *(f"  {line}" for line in lines)])
        )
    return "\n".join(blocks)


def _attention_on(architectures: Sequence[str]) -> dict[str, str]:
    """The attention kernels of the GPUs; nothing where there is none."""
    of_each = [f"{architecture}: {attention_kernels(architecture)}" for architecture in dict.fromkeys(architectures)]
    return {"attention": "; ".join(of_each)} if of_each else {}


def list_compiled(report: Report) -> str:
    """A line for each kernel of the API: where its code lies."""
    return "\n".join(f"  {name}: {place or 'compiled by the first call'}" for name, place in report.compiled.items())


def _quantised_in_words(target: str | None) -> str:
    """The instruction that multiplies by quantised weights on a CPU target, and the encodings of weights."""
    flags = REQUIRED_FLAGS.get(target or "")
    if flags is None:
        kernel = "the kernel of MAX's own target"
    elif "amx_int8" in flags:
        kernel = "vpdpbusd of 512 bits, for each 16 rows of x AMX's tdpbsud where the system grants it"
    elif "avx512_vnni" in flags:
        kernel = "vpdpbusd of 512 bits"
    elif "avx512bw" in flags:
        kernel = "vpmaddubsw of 512 bits"
    else:
        kernel = "vpmaddubsw of 256 bits"
    return (
        f"{kernel}, dense and of experts: {', '.join(GGUF_ENCODINGS)}; GPT-OSS's experts as MXFP4; GPTQ, AWQ and"
        " compressed-tensors as Q4_0, Q8_0, INT4, INT8, dequantised at load where groups are no multiple of 32 or out"
        " of order"
    )


def _compiled_in_words(compiled: Mapping[str, str | None]) -> str:
    """Count compiled libraries per location."""
    if not compiled:
        return "unknown"
    places = Counter(place for place in compiled.values() if place)
    parts = ", ".join(f"{count} {place}" for place, count in places.items())
    return f"{places.total()} of {len(compiled)} libraries of kernels{': ' if parts else ''}{parts}"


def _first_call_in_words(compiled: Mapping[str, str | None]) -> str:
    """The time that the first call of a process takes to load or build its kernel."""
    read = "0.1 s where its kernel is compiled"
    missing = sum(place is None for place in compiled.values())
    if not compiled:
        return "unknown"
    if not missing:
        return f"the first one of a process waits {read}, as all are"
    return f"the first one of a process waits {read}, some 25 s for each of the other {missing}, once on this machine"


def _step_in_words(places: Sequence[str | None]) -> str:
    """The time that a command takes to load or build kernels before its model's first step."""
    if missing := sum(place is None for place in places):
        return f"builds {missing} libraries of kernels in some {15 + 4 * missing} s, once on this machine"
    return f"reads its kernels in 0.1 s: {', '.join(dict.fromkeys(place for place in places if place))}"


def _threads_in_words(report: Report) -> str:
    """Return how many threads the ops run on, and why."""
    total = os.cpu_count() or report.cores
    reasons = [f"{report.cores} of {total} CPUs in the affinity mask"]
    if report.quota is not None:
        reasons.append(f"a control group's quota of {report.quota:g}")
    if report.threads is not None and report.threads < report.cores and (report.quota or total) >= report.cores:
        reasons.append("--threads or set_num_threads, or MAX counts cores")
    return f"{report.threads or 'unknown'} ({', '.join(reasons)})"


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _version_problems(versions: dict[str, str | None]) -> list[str]:
    """One line for each wrong version, each with the command that puts it right."""
    wrong = {name: installed for name, installed in versions.items() if installed != PINNED[name]}
    command = shlex.join([sys.executable, "-m", "pip", "install", *(f"{name}=={PINNED[name]}" for name in wrong)])
    return [
        f"{name} {PINNED[name]} is needed, {installed or 'none'} is installed; run: {command}"
        for name, installed in wrong.items()
    ]


def _kernels() -> Path:
    folder = Path(str(resources.files("paged_kv.mojo_ops")))
    if not (folder / "ops.mojo").is_file():
        raise FileNotFoundError(f"{folder / 'ops.mojo'} is missing; reinstall paged-kv")
    return folder


def _compiled(
    steps: Mapping[str, Sequence[Library]],
) -> tuple[dict[str, str | None], dict[str, list[str | None]]]:
    """Each library of the API, and those of each of some steps, and where its code for this CPU lies."""
    # Not at the top: this module has to work where MAX is not installed.
    from paged_kv.runtime.libraries import api_libraries, where_libraries_lie

    libraries = api_libraries()
    lie = where_libraries_lie({*libraries, *(each for of_step in steps.values() for each in of_step)})
    return {each.file: lie.get(each.file) for each in libraries}, {
        name: [lie.get(each.file) for each in of_step] for name, of_step in steps.items()
    }


def _gpus() -> list[tuple[str, str]]:
    """Each GPU in words, and its architecture."""
    # Not at the top: this module has to work where MAX or Mojo is not installed.
    from max.driver import Accelerator, accelerator_count

    devices = [Accelerator(index) for index in range(accelerator_count())]
    return [
        (f"{device.model_name} ({device.api}, {device.architecture_name})", device.architecture_name)
        for device in devices
    ]


def _default_target() -> str | None:
    """Return what the compiler picks for this CPU by default."""
    from mojo.run import subprocess_run_mojo

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "any.mojo")
        source.touch()
        args = ["build", "--print-effective-target", str(source)]
        output = subprocess_run_mojo(args, capture_output=True, text=True, timeout=60, check=True).stdout
    _, _, rest = output.partition("--target-cpu ")
    return rest.split()[0] if rest else None
