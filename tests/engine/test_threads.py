"""The number of threads: an option and a call, each in a process of its own, because MAX starts its pool once."""

import os
import subprocess
import sys

import pytest

from paged_kv.cli import _run
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.runtime.cpu_target import CpuInfo
from paged_kv.runtime.doctor import Report, render
from paged_kv.runtime.threads import allowed_cpus, cgroup_quota, set_num_threads

CPUS = sorted(allowed_cpus())


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


USED = """
import os
from paged_kv.runtime.threads import started_pool_threads
threads, mask = started_pool_threads(), os.sched_getaffinity(0)
def has_mask(task):
    try:
        return os.sched_getaffinity(int(task)) == mask
    except ProcessLookupError:  # it has ended
        return True
print(threads, all(map(has_mask, os.listdir("/proc/self/task"))))
"""


@pytest.mark.parametrize("count", sorted({1, len(CPUS)}))
def test_the_pool_has_as_many_threads_as_were_set(count):
    """Afterwards every thread may run on every CPU again."""
    assert run(f"import paged_kv; paged_kv.set_num_threads({count})\n{USED}") == f"{count} True"
    code = f"import paged_kv; paged_kv.set_num_threads({count}); paged_kv.set_num_threads({count})"
    assert run(code) == ""  # the same number again changes nothing


def test_the_affinity_mask_is_the_default():
    assert run(f"import os; os.sched_setaffinity(0, {{{CPUS[0]}}})\n{USED}") == "1 True"


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_a_pool_that_runs_is_not_changed():
    code = (
        "import paged_kv\nfrom max.driver import CPU\nCPU()\n"
        "try: paged_kv.set_num_threads(1)\nexcept paged_kv.errors.ContractError as error: print(error)"
    )
    assert f"num_threads: expected {len(CPUS)}, as MAX runs on so many already" in run(code)


@pytest.mark.parametrize(("value", "error"), [(0, ContractError), (-1, ContractError), ("2", ContractTypeError)])
def test_bad_numbers_are_refused(value, error):
    with pytest.raises(error, match="num_threads"):
        set_num_threads(value)


def test_more_threads_than_cpus_are_refused():
    with pytest.raises(
        ContractError, match=f"num_threads: expected 1 to {len(CPUS)}, the CPUs of this process, got 9999"
    ):
        set_num_threads(9999)


@pytest.mark.parametrize("command", ["doctor", "generate", "demo"])
def test_the_option_refuses_bad_numbers(command, capsys):
    assert _run([command, "--threads", "0"]) == 2
    assert capsys.readouterr().err == "error: --threads: num_threads: expected at least 1, got 0\n"


@pytest.mark.slow
def test_doctor_says_how_many_and_why():
    command = [sys.executable, "-c", "from paged_kv.cli import main; main(['doctor', '--threads', '1'])"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False).stdout
    assert f"\nthreads   1 ({len(CPUS)} of {os.cpu_count()} CPUs in the affinity mask" in output


def test_a_quota_is_named():
    report = Report(cpu=CpuInfo("x86_64", "", frozenset()), cores=4, threads=2, quota=2.5)
    assert "CPUs in the affinity mask, a control group's quota of 2.5)" in render(report)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_both_versions_of_control_groups(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_quota((tmp_path / "cpu.max", tmp_path / "cpu.cfs_quota_us")) == quota
