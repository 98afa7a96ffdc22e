"""No test waits for ever: what waits for a process, a thread or a result has a limit."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.limits import has_ended, limited

TESTS = Path(__file__).parents[1]
WAITS = {"wait", "join", "communicate", "result"}
"""Methods that wait, without a limit where they get no argument."""
RUNS = {"run", "call", "check_call", "check_output"}
"""Functions of subprocess that wait, without a limit where they get no `timeout`."""
LOOK_AT_THE_CLOCK = {"support/background.py", "hostile/test_hostile.py"}
"""Files that start processes and limit them by themselves; others do it by `limited`."""


def endless(tree: ast.Module) -> list[str]:
    """The calls of a file that may wait for ever, with their lines."""
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    held = {id(argument) for call in calls if _name(call) == "limited" for argument in call.args}
    kept = {call.args[0].id for call in calls if _name(call) == "limited" and isinstance(call.args[0], ast.Name)}
    held |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and _target(node) in kept}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or id(node) in awaited:
            continue
        runs = node.func.attr in RUNS and isinstance(node.func.value, ast.Name) and node.func.value.id == "subprocess"
        limited = any(keyword.arg in ("timeout", "timeout_s", None) for keyword in node.keywords)
        waits = node.func.attr in WAITS and not node.args
        if ((runs or waits) and not limited) or (node.func.attr == "Popen" and id(node) not in held):
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _target(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


@pytest.mark.slow
def test_every_wait_has_a_limit():
    found = {file.relative_to(TESTS).as_posix(): endless(ast.parse(file.read_text())) for file in TESTS.rglob("*.py")}
    for name in LOOK_AT_THE_CLOCK:
        found[name].remove(next(line for line in found[name] if line.endswith("Popen")))
    assert {name: lines for name, lines in found.items() if lines} == {}


ENDLESS = ("child.wait()", "a.join()", "p.communicate(input=x)", "subprocess.run(x)", "with subprocess.Popen(x): 1")
LIMITED = ("child.wait(3)", "','.join(x)", "f.result(timeout=3)", "subprocess.run(x, timeout=3)", "limited(Popen(x))")


@pytest.mark.parametrize("text", ENDLESS + LIMITED)
def test_an_endless_wait_is_told_from_one_with_a_limit(text):
    assert len(endless(ast.parse(text))) == (text in ENDLESS)


def test_a_process_ends_with_the_one_that_started_it():
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(TESTS)!r})
from support.limits import end_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=end_with_parent)
print(child.pid, flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with limited(subprocess.Popen([sys.executable, "-c", code], **pipes), seconds=300) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    assert has_ended(child)


@pytest.mark.slow
def test_a_process_that_does_not_end_is_ended_with_its_children():
    """The child has the pipe too: reading ends once both are gone."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with limited(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE), seconds=1) as child:
        assert child.stdout.read() == b""
    assert child.returncode == -signal.SIGKILL
