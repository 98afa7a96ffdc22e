"""Commands that run a model, or look at the machine, with a stdout or stderr that cannot be written."""

import pytest

from support.streams import BROKEN, run
from support.terminal import run_in_terminal

REASONS = {"closed": "it is closed", "full": "No space left on device", "limited": "File too large"}


@pytest.fixture(scope="module")
def commands(folder):
    generate = ["generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "4"]
    return {"doctor": ["doctor"], "demo": ["demo"], "generate": generate, "json": [*generate, "--json"]}


@pytest.fixture(scope="module", autouse=True)
def compiled(commands, tmp_path_factory):
    """Runs once with streams that work, so that no case below waits for a compile; what it printed."""
    found = run(commands["generate"], tmp_path_factory.mktemp("compiled"), timeout=600)
    assert found[0] == 0
    return found


# A limit on the size of files would stop the demo and the doctor where they write files.
CASES = [(name, kind) for name in ("doctor", "demo", "generate", "json") for kind in ("closed", "full", "left")]
CASES += [("generate", "limited")]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "stdout"), CASES)
def test_a_stdout_that_fails_is_one_line_and_a_status(commands, tmp_path, command, stdout):
    status, out, err = run(commands[command], tmp_path, stdout=stdout)
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert (status, out) == (1, "")
    assert errors == ([] if stdout == "left" else [f"error: stdout: {REASONS[stdout]}"])
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("stderr", [kind for kind in BROKEN if kind != "limited"])
def test_a_stderr_that_fails_loses_no_result(commands, compiled, tmp_path, stderr):
    assert run(commands["generate"], tmp_path, stderr=stderr) == (0, compiled[1], "")


@pytest.mark.slow
def test_a_terminal_of_one_column(commands, compiled, tmp_path):
    """Progress is drawn on it, and the text is the same."""
    assert run(commands["generate"], tmp_path, COLUMNS="1")[:2] == compiled[:2]
    for command in ("generate", "doctor"):
        status, shown = run_in_terminal(commands[command], columns=1)
        assert status == 0
        assert "Traceback" not in shown
    assert "all is well" in shown
