"""AMX's kernels on a CPU without AMX: the Mojo package with `tests/isa/emulated_amx.mojo` in place of `isa/amx.mojo`.

For tests, not for use: a product of two tiles takes a hundred times the instruction's time. The other code of AMX's
kernels is as it would run on a CPU that has AMX, and needs a CPU target with AVX-512 VBMI and BF16.
"""

import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from paged_kv.graphs.ops import kernels
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, choose_cpu_target
from support import cases, dtype_pairs, harness

NAME = "paged_kv.mojo_ops"
INSTRUCTIONS = Path("isa", "amx.mojo")
EMULATION = Path(__file__).parents[1] / "isa" / "emulated_amx.mojo"
NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_bf16"})
REAL = frozenset({"amx_tile", "amx_bf16"})
KV_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Of the caches that AMX's kernels read, all with queries in bfloat16."""

WITHOUT_DTYPE = frozenset({"test_any_options"})
"""Tests whose names have no dtype, and that take it from `cases.DTYPES`."""

_folder: tempfile.TemporaryDirectory[str] | None = None


def reason_to_skip(cpu: CpuInfo) -> str | None:
    """Why the emulation is of no use on a CPU; None where it is.

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
    """Puts the copy in the place of `paged_kv.mojo_ops` for this process, and narrows the tests to bfloat16 queries.

    To be called before test modules are imported, because they read the dtypes.
    """
    global _folder
    _folder = tempfile.TemporaryDirectory()
    copy = copy_package(Path(_folder.name))
    spec = importlib.util.spec_from_file_location(NAME, copy / "__init__.py", submodule_search_locations=[str(copy)])
    sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases.DTYPES = harness.DTYPES = ("bfloat16",)
    harness.PAIRS = tuple(("bfloat16", kv_dtype) for kv_dtype in KV_DTYPES)
    harness.MASKED_PAIRS = harness.PAIRS[:2]
    dtype_pairs.LINEAR_PAIRS = (("bfloat16", "bfloat16"),)


def deselect_others(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of bfloat16 queries alone; compiling for others would take as long again."""
    others = [item for item in items if not _is_bfloat16(item.nodeid)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _is_bfloat16(test: str) -> bool:
    function, _, parameters = test.rpartition("::")[2].partition("[")
    named = re.findall(r"(?<!b)float(?:16|32)|bfloat16", parameters)
    return function in WITHOUT_DTYPE or set(named) == {"bfloat16"}
