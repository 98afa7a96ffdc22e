"""Cores for replicas: machines that are folders, and locks of processes that are killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_kv.errors import ContractError
from paged_kv.ray.placement import Claim, Core, claim, machine
from support.limits import limited

PLAIN = [Core((number,), number // 4) for number in range(8)]
TWIN = [Core((number, number + 4), 0) for number in range(4)]  # a core is two CPUs


def ask(cpus: int, folder: Path, cores=PLAIN, seconds: float = 0) -> Claim:
    return claim(cpus, seconds=seconds, folder=folder, cores=cores)


def test_no_core_is_given_twice_and_what_is_released_is_given_again(tmp_path):
    first, second = ask(2, tmp_path), ask(3, tmp_path)
    assert not first.cpus & second.cpus
    assert (first.threads, second.threads) == (2, 3)
    with pytest.raises(ContractError, match=r"fewer than \d of 8 CPUs were free"):
        ask(4, tmp_path)
    second.release()
    assert ask(4, tmp_path).threads == 4


def test_a_claim_lies_in_one_node_where_one_has_enough(tmp_path):
    assert ask(1, tmp_path).cpus == {0}
    assert ask(4, tmp_path).cpus == {4, 5, 6, 7}
    assert ask(2, tmp_path).cpus == {1, 2}


def test_the_node_that_is_fullest_is_filled_and_none_is_cut_without_need(tmp_path):
    ask(3, tmp_path)
    assert ask(1, tmp_path).cpus == {3}


def test_a_claim_larger_than_a_node_takes_several(tmp_path):
    assert len({core.node for core in ask(6, tmp_path).cores}) == 2


def test_cpus_are_those_that_ray_counts_and_a_core_has_one_thread(tmp_path):
    """As many replicas as Ray starts find their CPUs; whole cores go first."""
    first, second = ask(2, tmp_path, TWIN), ask(3, tmp_path, TWIN)
    assert (first.cpus, first.threads) == ({0, 4}, 1)
    assert (second.cpus, second.threads) == ({1, 5, 2}, 2)
    last = [ask(1, tmp_path, TWIN) for _ in range(3)]
    assert [(each.cpus, each.threads) for each in last] == [({3}, 1), ({6}, 1), ({7}, 1)]
    with pytest.raises(ContractError, match=r"fewer than \d of 8 CPUs were free"):
        ask(1, tmp_path, TWIN)


@pytest.mark.parametrize(("cpus", "reason"), [(0, "cpus"), (9, "cpus: expected at most 8"), (True, "cpus")])
def test_what_no_machine_has_is_refused(tmp_path, cpus, reason):
    with pytest.raises((ContractError, TypeError), match=reason):
        ask(cpus, tmp_path)


def test_the_system_tells_cores_and_nodes(tmp_path):
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus)
    assert machine(range(8), tmp_path) == [Core((0, 4), 0), Core((1, 5), 0), Core((2, 6), 1), Core((3, 7), 1)]
    assert machine([1, 2, 6], tmp_path) == [Core((1,), 0), Core((2, 6), 1)]
    assert machine([0, 1], tmp_path / "none") == [Core((0,), 0), Core((1,), 0)]


HOLDER = """
import sys, time
from pathlib import Path
from paged_kv.ray.placement import Core, claim
taken = claim(2, folder=Path(sys.argv[1]), cores=[Core((0,), 0), Core((1,), 0)])
print("has", flush=True)
time.sleep(600)
"""


def test_a_killed_process_has_no_cores_any_more(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with limited(subprocess.Popen(command, stdout=subprocess.PIPE, text=True), 300) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "has\n"
        with pytest.raises(ContractError, match="free of replicas"):
            ask(1, tmp_path, PLAIN[:2])
        holder.kill()
        assert ask(2, tmp_path, PLAIN[:2], seconds=300).cpus == {0, 1}


BOUND = """
import os, sys, threading, time
from pathlib import Path
from paged_kv import numa
from paged_kv.ray import placement
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
taken = placement.claim(1, folder=Path(sys.argv[1]))
class Tasks:
    turns = 0
    def iterdir(self):  # a thread that is not bound yet starts another one once it was looked for
        found = sorted(Path("/proc/self/task").iterdir())
        if self.turns < 3:
            self.turns += 1
            os.sched_setaffinity(0, set(all_cpus))
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return iter(found)
all_cpus = os.sched_getaffinity(0)
numa._TASKS = Tasks()
taken.bind()
masks = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
assert masks == {taken.cpus}, masks
os._exit(0)
"""


def test_all_threads_of_a_process_are_bound(tmp_path):
    assert subprocess.run([sys.executable, "-c", BOUND, str(tmp_path)], timeout=300).returncode == 0
