"""Results reach stdout or the command fails with one line; messages never make a command fail. No model is run here."""

import sys

import pytest

from paged_kv.cli import _run
from support.streams import BROKEN, run
from support.terminal import run_in_terminal

REASONS = {
    "closed": "error: stdout: it is closed\n",
    "full": "error: stdout: No space left on device\n",
    "limited": "error: stdout: File too large\n",
    "left": "",
}
COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a command": ["generate", "--help"],
    "cases": ["bench", "--list"],
}


@pytest.mark.parametrize("stdout", BROKEN)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["help", "cases"])
def test_a_stdout_that_fails_is_one_line_and_a_status(tmp_path, command, unbuffered, stdout):
    found = run(COMMANDS[command], tmp_path, stdout=stdout, PYTHONUNBUFFERED=unbuffered)
    assert found == (1, "", REASONS[stdout])


@pytest.mark.slow
@pytest.mark.parametrize("stderr", BROKEN)
def test_a_stderr_that_fails_changes_no_status(tmp_path, stderr):
    status, out, _ = run(["--version"], tmp_path, stderr=stderr)
    assert (status, out[:8]) == (0, "paged-kv")
    assert run(["generate", "--model", tmp_path / "none", "--prompt", "a"], tmp_path, stderr=stderr) == (2, "", "")
    assert run(["--version"], tmp_path, stdout=stderr, stderr=stderr) == (1, "", "")


def python(body, tmp_path, **options):
    """Runs `body` as a command would run."""
    lines = (
        f"from paged_kv.output import with_streams\ndef body():\n    {body}\n    return 0\nsys.exit(with_streams(body))"
    )
    return run([], tmp_path, command=[sys.executable, "-c", f"import sys, warnings\n{lines}"], **options)


def test_a_character_that_the_encoding_lacks_is_named(tmp_path):
    assert python("print('\u00fc')", tmp_path, PYTHONIOENCODING="utf-8") == (0, "\u00fc\n", "")
    found = python("print('\u00fc')", tmp_path, PYTHONIOENCODING="ascii")
    assert found == (1, "", r"error: stdout: '\xfc' cannot be written in ascii" + "\n")


def test_an_error_that_a_library_swallows_is_not_lost(tmp_path):
    body = "import contextlib\n    with contextlib.suppress(OSError): print('a', flush=True)"
    assert python(body, tmp_path, stdout="full") == (1, "", REASONS["full"])


def test_the_last_line_is_written_before_the_status_is_known(tmp_path):
    """It is still in the buffer when the command ends."""
    assert python("print('a')", tmp_path) == (0, "a\n", "")
    for stdout in ("full", "left"):
        assert python("print('a')", tmp_path, stdout=stdout) == (1, "", REASONS[stdout])


def test_another_error_of_the_system_is_one_line(tmp_path):
    status, out, err = python(f"open({str(tmp_path / 'none')!r})", tmp_path)
    assert (status, out, err) == (1, "", f"error: [Errno 2] No such file or directory: '{tmp_path}/none'\n")


def test_a_warning_is_one_line(tmp_path):
    assert python("warnings.warn('two\\nlines', RuntimeWarning)", tmp_path) == (0, "", "warning: two lines\n")


@pytest.mark.parametrize("size", [0, -1, 2**31, 10**400], ids=lambda size: str(size)[:12])
@pytest.mark.parametrize("name", ["--group", "--page-size", "--head-dim"])
def test_sizes_that_no_kernel_has_are_refused(capsys, name, size):
    assert _run(["doctor", "--explain", f"{name}={size}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {name}: expected ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("width", ["0", "1", "2", "-1", "x", "100000"])
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_any_width_of_the_terminal(monkeypatch, capsys, arguments, width):
    monkeypatch.setenv("COLUMNS", width)
    assert _run(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out


@pytest.mark.slow
def test_a_terminal_of_one_column():
    """A real one, which says itself how wide it is."""
    for arguments in COMMANDS.values():
        status, shown = run_in_terminal(arguments, columns=1)
        assert status == 0
        assert "Traceback" not in shown
