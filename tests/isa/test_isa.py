"""The op tests once more on every ISA path that this CPU can run but would not choose; and the helper that does it."""

import subprocess
import sys
from functools import partial

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.runtime import libraries
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
from support.background import Job
from support.isa import CPU_TARGETS, ISA_PATHS, can_run, run_tests, walked_by_default

PATHS = [path for path in ISA_PATHS if can_run(path) and path != walked_by_default(CpuInfo.read())]
RUNS = {
    f"{path}-{dtype}": Job(partial(run_tests, path, f"--q-dtype={dtype}", *tests), is_long=True)
    for path in PATHS
    for dtype, tests in ISA_PATHS[path].items()
}


@pytest.mark.parametrize("run", [pytest.param(name, marks=pytest.mark.waits_for(run)) for name, run in RUNS.items()])
def test_ops(run):
    RUNS[run]()


def test_a_target_runs_where_its_flags_are():
    haswell = CpuInfo("x86_64", "", REQUIRED_FLAGS["haswell"])
    assert [target for target in CPU_TARGETS if can_run(target, haswell)] == ["x86-64", "haswell"]
    assert not can_run("x86-64", CpuInfo("aarch64", "", frozenset()))


def test_the_path_that_other_tests_walk_is_not_forced():
    paths = {name: walked_by_default(CpuInfo("x86_64", "", REQUIRED_FLAGS[name])) for name in REQUIRED_FLAGS}
    assert paths["haswell"] == paths["znver3"] == "haswell"
    assert paths["skylake-avx512"] == "skylake-avx512"
    assert paths["sapphirerapids"] not in ISA_PATHS
    assert walked_by_default(CpuInfo("x86_64", "", frozenset())) == "x86-64"


def test_the_target_is_in_force(request, monkeypatch, tmp_path):
    """In a run that forces a target, this very test asks for a library that is built for it; elsewhere it starts such
    a run.
    """
    target = request.config.getoption("--cpu-target")
    if target is None:
        output = run_tests("x86-64", "isa/test_isa.py", "-k", "test_the_target_is_in_force")
        assert "1 passed" in output
        return

    def build(built, _, of, **__):
        raise ToolchainError(f"{built[0]} for {of}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries, "build_libraries", build)
    with pytest.raises(ToolchainError, match=f"merge .* for {target}"):
        libraries.kernel("merge", "float16")


@pytest.mark.parametrize("arguments", [("-k", "no_such_test"), ("test_none.py",)])
def test_nothing_run_is_a_failure(arguments):
    with pytest.raises(AssertionError, match="x86-64"):
        run_tests("x86-64", "unit/test_cache_folder.py" if "-k" in arguments else "", *arguments)


def test_an_unknown_target_is_refused():
    command = [sys.executable, "-m", "pytest", "--cpu-target=pentium9", "--collect-only", "tests/isa/test_isa.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 4
    assert "pentium9" in result.stderr
