"""The steps, in their order: the way there, then whether results are right, then how fast they come.

Words in braces are the host's: `{python}`, `{home}` (where the bundle is unpacked), `{device}`, `{results}`.
Each has its limit in seconds, some four times what it is expected to take (README.md has the expectations).
"""

from __future__ import annotations

import json
from dataclasses import asdict

from benchmarks.gpu_bundle.run import Step

CPU_TARGET = "haswell"
"""What the bundle's host code is compiled for; the host's CPU needs AVX2, and may be older than the one it was
compiled on. Every process sets it before MAX is used, so that the artefacts' keys are the host's."""
ARCHITECTURE = "sm_90a"
PROGRAMS = {
    "wgmma_probe": "wgmma_probe.mojo",
    "tensor_map": "compile_tensor_map.mojo",
    "hopper": "compile_hopper_kernel.mojo",
}
"""Mojo programs of tests/mojo that the host runs as they are built here."""
BOTH = ("gpu", "cpu")
_MODULE = "benchmarks"


_ROWS = f"{_MODULE}.gpu_bundle.pytest_rows"


def _check(*words: str) -> tuple[str, ...]:
    return ("{python}", "-m", f"{_MODULE}.gpu_bundle.checks", "--device", "{device}", *words)


def _measure(*words: str) -> tuple[str, ...]:
    command = ("{python}", "-m", f"{_MODULE}.decode_gpu", "--device", "{device}", "--cpu-target", CPU_TARGET)
    return (*command, "--csv", "{results}/decode.csv", *words)


def _tests(*words: str) -> tuple[str, ...]:
    command = (
        "{python}",
        "-m",
        "pytest",
        "-v",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-p",
        _ROWS,
        "-c",
        "{home}/tests/pytest.ini",
    )
    return (*command, "--rootdir", "{home}", "--cpu-target", CPU_TARGET, *words)


def _program(name: str) -> tuple[str, ...]:
    return ("{home}/programs/" + name,)


OP_TESTS = "nothing_to_attend_to or (bfloat16 and (finds_wrong or permuting_pages))"
"""Those of the graphs that the bundle has."""

_NO_POOL = (("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "0"),)
"""Each allocation is the driver's own, so that an access past its end is seen."""
_WHOLE_POOL = (("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "90"),)
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20")

STEPS = (
    Step(
        "driver",
        "first",
        ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv"),
        30,
    ),
    Step("names", "first", _check("names"), 30, BOTH),
    Step("hello", "first", _check("hello"), 60, BOTH),
    Step("attention", "first", _check("attention"), 60, BOTH),
    Step("memory, capped", "first", _check("memory"), 40),
    Step("memory, not capped", "first", _check("memory"), 40, env=_WHOLE_POOL),
    Step("wgmma_probe", "first", _program("wgmma_probe"), 60),
    Step("tensor_map", "first", _program("tensor_map"), 60),
    Step("hopper", "first", _program("hopper"), 120),
    Step("launches", "first", _check("launches"), 40),
    Step("trace", "first", _check("trace"), 40),
    Step("assembler", "correct", _check("assembler"), 30, BOTH),
    Step("memcheck", "correct", (*_SANITIZER, "--tool", "memcheck", *_check("attention")), 90, env=_NO_POOL),
    Step("racecheck", "correct", (*_SANITIZER, "--tool", "racecheck", *_check("attention")), 120, env=_NO_POOL),
    Step("side streams", "correct", _tests("{home}/tests/gpu/test_gpu_api.py", "-k", "side_stream"), 60),
    Step("float8", "correct", _check("float8"), 40, BOTH),
    Step("empty", "correct", _check("empty"), 40, BOTH),
    Step("op tests", "correct", _tests("{home}/tests/gpu/test_gpu_ops.py", "-k", OP_TESTS), 60),
    Step("API tests", "correct", _tests("{home}/tests/gpu/test_gpu_api.py"), 120),
    Step("one point", "speed", _measure("--points", "one"), 120, BOTH),
    Step("page sizes", "speed", _measure("--points", "pages"), 120, BOTH),
    Step("few points", "speed", _measure("--points", "few"), 180),
    Step("all points", "speed", _measure("--points", "all"), 560),
)


def as_json(commit: str) -> str:
    """What `run.py` reads on the host."""
    return json.dumps(
        {"commit": commit, "steps": [{**asdict(step), "env": dict(step.env)} for step in STEPS]}, indent=1
    )
