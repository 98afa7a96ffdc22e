"""The places of threads and memory: two nodes in a folder as Linux has it, and the one of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_kv.cli import _run
from paged_kv.errors import ContractError
from paged_kv.numa import Placement, nodes, place

TWO = {0: frozenset({0, 1, 4}), 2: frozenset({2, 3, 5})}


def test_nodes_with_memory_are_read(tmp_path):
    assert list(nodes(tmp_path)) == [0], "the system tells of none"
    for node, cpus in ((0, "0-1,4\n"), (1, "6\n"), (2, "2-3,5\n")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus)
    (tmp_path / "node" / "has_memory").write_text("0,2\n")
    assert nodes(tmp_path) == TWO


def test_memory_by_turns_leaves_threads_where_they_are():
    assert place("interleave", TWO, {0, 3}, [0, 1, 2]) == Placement(3, (0, 2))
    assert place("interleave", TWO, {0, 3}, [2]) == Placement(3, (2,))


def test_a_node_has_threads_and_memory():
    assert place("2", TWO, {0, 3, 5, 9}, [0, 2]) == Placement(1, (2,), frozenset({3, 5}))


@pytest.mark.parametrize("where", ["1", "7", "-1", "all", "", "²"])
def test_other_values_are_refused(where):
    with pytest.raises(ContractError, match="a NUMA node is one of 0, 2 or interleave, not"):
        place(where, TWO, {0, 2}, [0, 2])


def test_what_the_process_may_not_use_is_refused():
    with pytest.raises(ContractError, match="one of 0 or interleave"):
        place("2", TWO, {2}, [0])
    with pytest.raises(ContractError, match="may run on no CPU of NUMA node 2"):
        place("2", TWO, {0, 1}, [0, 2])
    with pytest.raises(ContractError, match="no NUMA node"):
        place("interleave", TWO, {0}, [])


POLICY = """
import ctypes, os, sys
from paged_kv.numa import set_numa
set_numa(sys.argv[1])
mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
assert not ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, 1024, None, 0)
print(mode.value, mask[0] & 1, len(os.sched_getaffinity(0)) > 0)
"""


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="the system tells of no node 0")
@pytest.mark.parametrize(("where", "mode"), [("interleave", 3), ("0", 1)])
def test_the_system_has_the_policy(where, mode):
    result = subprocess.run([sys.executable, "-c", POLICY, where], capture_output=True, text=True, timeout=60)
    if "policy: Operation not permitted" in result.stderr:
        pytest.skip("a container that may not set it")
    assert result.stdout.split() == [str(mode), "1", "True"], result.stderr


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_the_option_refuses_other_values(command, capsys):
    assert _run([command, "--threads", "0", "--numa", "9999"]) == 2, "--threads, which starts threads, comes after it"
    assert capsys.readouterr().err.startswith("error: --numa: a NUMA node is one of ")
