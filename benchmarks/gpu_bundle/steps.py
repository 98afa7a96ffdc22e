"""The steps, in their order: the way there, then whether results are right, then how fast they come.

Words in braces are the host's: `{python}`, `{home}` (where the bundle is unpacked), `{device}`, `{results}`.
Each has its limit in seconds, some four times what it took on an H200 (README.md).
"""

from __future__ import annotations

import json
from dataclasses import asdict

from benchmarks.gpu_bundle.run import Step

CPU_TARGET = "haswell"
"""The CPU target of the bundle's host code; the host's CPU needs AVX2, and may be older than the one it was
compiled on. Every process sets it before MAX is used, so that the artefacts' keys are the host's."""
ARCHITECTURE = "sm_90a"
PROGRAMS = {"tensor_map": "compile_tensor_map.mojo"}
"""Mojo programs of tests/mojo that the host runs as they are built here."""
BOTH = ("gpu", "cpu")
_MODULE = "benchmarks"


_ROWS = f"{_MODULE}.gpu_bundle.pytest_rows"


def _check(*words: str) -> tuple[str, ...]:
    return ("{python}", "-m", f"{_MODULE}.gpu_bundle.checks", "--device", "{device}", *words)


_DECODE = ("{python}", "-m", f"{_MODULE}.decode_gpu", "--device", "{device}", "--cpu-target", CPU_TARGET)


def _measure(*words: str) -> tuple[str, ...]:
    return (*_DECODE, "--csv", "{results}/decode.csv", *words)


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


OP_TESTS = "not narrower_caches or (bfloat16-float8 and not fnuz)"
CODE_TESTS = "bfloat16 and test_attention"
ENTRY_TESTS = "merging_states and bfloat16 or ways_to_append or index or functional"
MASKED_TESTS = "bfloat16"
"""Those of the graphs that the bundle has."""

_NO_POOL = (("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "0"),)
"""Each allocation is the driver's own, so that an access past its end is seen."""
_WHOLE_POOL = (("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "90"),)
_HALF_POOL = (("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "50"),)
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20")
_SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "SchedulerStats")
_NCU = (
    *("ncu", "--clock-control", "none", "--kernel-name", "regex:attention_gpu_hopper", "--launch-count", "2"),
    *(word for section in _SECTIONS for word in ("--section", section)),
)
"""Hardware counters of the Hopper kernel; the card's clocks stay as they are."""

STEPS = (
    Step(
        "driver",
        "first",
        ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv"),
        10,
    ),
    Step("names", "first", _check("names"), 15, BOTH),
    Step("hello", "first", _check("hello"), 20, BOTH),
    Step("attention", "first", _check("attention"), 35, BOTH),
    Step("memory, capped", "first", _check("memory"), 25),
    Step("memory, not capped", "first", _check("memory"), 25, env=_WHOLE_POOL),
    Step("tensor_map", "first", _program("tensor_map"), 15),
    Step("launches", "first", _check("launches"), 25),
    Step("trace", "first", _check("trace"), 45),
    Step("host", "first", _check("host"), 25),
    Step("assembler", "correct", _check("assembler"), 15, BOTH),
    Step("memcheck", "correct", (*_SANITIZER, "--tool", "memcheck", *_check("attention")), 30, env=_NO_POOL),
    Step("racecheck", "correct", (*_SANITIZER, "--tool", "racecheck", *_check("attention")), 30, env=_NO_POOL),
    Step("side streams", "correct", _tests("{home}/tests/gpu/test_gpu_api.py", "-k", "side_stream"), 30),
    Step("float8", "correct", _check("float8"), 25, BOTH),
    Step("empty", "correct", _check("empty"), 25, BOTH),
    Step("latent", "correct", _check("latent"), 30),
    Step("demo", "correct", _check("demo"), 20),
    Step("pages", "correct", _check("pages"), 30),
    Step("families", "correct", _check("families"), 45, BOTH),
    Step("API tests", "correct", _tests("{home}/tests/gpu/test_gpu_api.py"), 40),
    Step("entry tests", "correct", _tests("{home}/tests/gpu/test_gpu_entries.py", "-k", ENTRY_TESTS), 40),
    Step("masked tests", "correct", _tests("{home}/tests/gpu/test_gpu_masked.py", "-k", MASKED_TESTS), 30),
    Step("code tests", "correct", _tests("{home}/tests/gpu/test_gpu_codes.py", "-k", CODE_TESTS), 30),
    Step("op tests", "correct", _tests("{home}/tests/gpu/test_gpu_ops.py", "-k", OP_TESTS), 150),
    Step("one point", "speed", _measure("--points", "one"), 40, BOTH),
    Step("llama", "speed", _check("llama"), 60, env=_HALF_POOL),
    Step("page sizes", "speed", _measure("--points", "pages"), 40, BOTH),
    Step("counters", "speed", (*_NCU, *_DECODE, "--points", "one", "--only", "Ours", "--repeats", "1"), 60),
    Step("few points", "speed", _measure("--points", "few"), 40),
    Step("all points", "speed", _measure("--points", "all"), 300),
)


def as_json(commit: str) -> str:
    """Return what `run.py` reads on the host."""
    return json.dumps(
        {"commit": commit, "steps": [{**asdict(step), "env": dict(step.env)} for step in STEPS]}, indent=1
    )
