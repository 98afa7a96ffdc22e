"""Runs test modules again with the kernels compiled for another CPU target, in a process of its own.

The kernels of ops lie in libraries, which graphs call by name. So the libraries alone are built anew: the graphs are
those of this CPU, which other tests have compiled.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from paged_kv.graphs.ops import kernels
from paged_kv.runtime import libraries
from paged_kv.runtime.compile_key import Key, Sources, digests_of
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, choose_cpu_target
from support import background

CPU_TARGETS = ("x86-64", *REQUIRED_FLAGS)
"""Targets that can be forced. An unknown name would abort the process inside MAX."""

OP_TESTS = (
    *(f"ops/test_{name}_op.py" for name in ("linear", "attention", "adapter", "prefill", "rotary", "extremes")),
    *("ops/test_masked_attention_op.py", "ops/test_mla_op.py", "ops/test_quantised.py"),
)
"""The tests of what differs between instruction sets, AMX's among them."""

SAME_BITS = "engine/test_same_bits.py"
FEW_ENCODINGS = "--few-encodings"
"""What a path takes whose products of encodings are those of another one: haswell's for skylake-avx512, and for AMX
those of this CPU, but for the tiles, which know nothing of encodings."""
ISA_PATHS: dict[str, dict[str, tuple[str, ...]]] = {
    # SSE2 alone: 4 float32 lanes, no FMA; what the portable path must make do with. No CPU of the last ten years takes
    # it: linear layers, adapters and decoding, whose loops and conversions prompts share.
    "x86-64": {"bfloat16": OP_TESTS[:3]},
    # AVX2: 8 float32 lanes in 16 registers, and instructions that convert float16
    "haswell": {"bfloat16": (*OP_TESTS, SAME_BITS), "float32": (*OP_TESTS[:3], SAME_BITS), "float16": OP_TESTS[:2]},
    # AVX-512 without bfloat16 instructions or tiles
    "skylake-avx512": {"bfloat16": (*OP_TESTS, FEW_ENCODINGS)},
}
"""One target for each path through the kernels that is not the best one of a recent CPU, and the tests of queries of a
dtype that it runs.

The paths convert bfloat16 and float8 in ways of their own, and compute in float32: what is not a conversion is tested
with one dtype.
"""

TESTS = Path(__file__).parents[1]


def can_run(target: str, cpu: CpuInfo | None = None) -> bool:
    """Return whether code compiled for `target` executes here."""
    cpu = CpuInfo.read() if cpu is None else cpu
    if target == "x86-64":
        return cpu.machine.lower() in ("x86_64", "amd64")
    return can_run("x86-64", cpu) and REQUIRED_FLAGS[target] <= cpu.flags


def walked_by_default(cpu: CpuInfo) -> str | None:
    """The path that this CPU's own target takes, with other scheduling alone; None where it takes a better one."""
    for path, better in (("haswell", "skylake-avx512"), ("x86-64", "haswell")):
        if can_run(path, cpu) and not can_run(better, cpu):
            return path
    return choose_cpu_target(cpu)


def use_libraries(*, target: str | None = None, sources: Path | None = None) -> None:
    """Makes this process build its libraries of kernels for a CPU target, or from another folder of Mojo sources."""
    package, choose = sources or kernels(), libraries.apply_cpu_target
    folders = {**Sources.installed().folders, "mojo_ops": package}

    def digests(keys: Mapping[str, Key], _: Sources, of: str | None = None) -> dict[str, str]:
        return digests_of(keys, Sources(folders), of or libraries.apply_cpu_target())

    patch = pytest.MonkeyPatch()  # for as long as the process lives
    patch.setattr(libraries, "apply_cpu_target", lambda: target or choose())
    patch.setattr(libraries, "kernels", lambda: package)
    patch.setattr(libraries, "digests_of", digests)
    # Nothing that came with the package: it may be for another target.
    patch.setattr(libraries, "places", lambda _, own, **__: [(None, own())])


def run_tests(target: str | None, *arguments: str, timeout: int = 3600) -> str:
    """Return what pytest prints when it runs `arguments` (modules of this folder, `-k` ...) for `target`; all must
    pass.

    None is the target that this CPU runs by default.

    A skipped or an absent test is a failure: a path that was not run was not tested.
    """
    paths = [str(TESTS / argument) if argument.endswith(".py") else argument for argument in arguments]
    forced = [f"--cpu-target={target}"] if target else []
    options = [*forced, "--all-kernels", "-n0", "-q", "-p", "no:cacheprovider", "--durations=0", "--durations-min=5"]
    result = background.run([sys.executable, "-m", "pytest", *options, *paths], timeout=timeout, cwd=TESTS.parent)
    output = result.stdout + result.stderr
    last = result.stdout.strip().splitlines()[-1:]
    if result.returncode or " passed" not in "".join(last) or "skipped" in "".join(last):
        raise AssertionError(f"{target}: {' '.join(paths)} (exit status {result.returncode})\n{output[-8000:]}")
    return output
