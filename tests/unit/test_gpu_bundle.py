"""The bundle for a GPU host: pieces within their limits, unpacked as they were; steps that cannot take others along."""

import json
import os
import random
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from paged_kv.benchmarks.gpu_bundle import contents, install, run, steps
from paged_kv.benchmarks.gpu_bundle.archive import PIECE_BYTES, TRANSFER_BYTES, pack, split, transfers
from paged_kv.benchmarks.gpu_bundle.run import Rows, Step, run_steps
from paged_kv.errors import ContractError
from paged_kv.versions import VERSION

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIECE, TRANSFER = 100_000, 1_300_000


@pytest.fixture
def sent(tmp_path):
    """Two archives, sent in two transfers: random bytes do not shrink."""
    rng = random.Random(0)
    archives = []
    for name, size in (("first", 50_000), ("second", 300_000)):
        folder = tmp_path / name / "inner"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(rng.randbytes(size))
        (folder / "program").write_text("#!/bin/sh\necho it runs\n")
        (folder / "program").chmod(0o755)
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "old.pyc").write_bytes(b"old")
        archives.append(split(pack([(tmp_path / name, name)], tmp_path / f"{name}.tar.xz"), PIECE))
    extra = [Path(install.__file__)]
    return transfers(archives, tmp_path / "out", transfer_bytes=TRANSFER, extra=extra)


def unpack(folder, target):
    command = [sys.executable, folder / "install.py", target]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pieces_and_transfers_keep_their_limits(sent):
    assert len(sent) == 2
    for folder in sent:
        sizes = [path.stat().st_size for path in folder.iterdir()]
        assert sum(sizes) <= TRANSFER
        pieces = [path for path in folder.iterdir() if ".tar.xz." in path.name]
        assert max(path.stat().st_size for path in pieces) <= PIECE


def test_the_limits_are_those_of_the_way():
    """Pieces of 29 MB, and 64 MiB a transfer together with the files of a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\0")
    tracked = sum((ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file())
    assert PIECE_BYTES <= 29_000_000
    assert TRANSFER_BYTES + tracked <= 64 << 20


def test_what_is_unpacked_is_what_was_packed(sent, tmp_path):
    target = tmp_path / "host"
    first = unpack(sent[0], target)
    assert (first.returncode, "first.tar.xz" in first.stdout) == (0, True)
    assert not (target / "second").exists()  # some of its pieces are still to come
    second = unpack(sent[1], target)
    assert (second.returncode, "second.tar.xz" in second.stdout) == (0, True)
    for name in ("first", "second"):
        for file in ("data", "program"):
            unpacked = target / name / "inner" / file
            assert unpacked.read_bytes() == (tmp_path / name / "inner" / file).read_bytes()
        program = target / name / "inner" / "program"
        assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "it runs\n"
        assert not (target / name / "inner" / "__pycache__").exists()
    assert list((target / "pieces").iterdir()) == []


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_piece_that_is_not_as_it_was_sent_is_refused(sent, tmp_path, fault):
    piece = sent[0] / "first.tar.xz.00"
    if fault == "missing":
        piece.unlink()
    else:
        content = bytearray(piece.read_bytes())
        content[len(content) // 2] ^= 1
        piece.write_bytes(content)
    result = unpack(sent[0], tmp_path / "host")
    assert result.returncode == 1
    (line,) = (result.stdout + result.stderr).splitlines()
    assert "first.tar.xz.00" in line
    assert "send the folder again" in line
    assert not (tmp_path / "host" / "first").exists()


def test_a_piece_larger_than_a_transfer_is_refused(tmp_path):
    (tmp_path / "large").write_bytes(bytes(2 * PIECE))
    with pytest.raises(ContractError, match=r"large.00 has 200000 bytes, a transfer at most 150000"):
        transfers([split(tmp_path / "large", 2 * PIECE)], tmp_path / "out", transfer_bytes=150_000)


def python(name, code, seconds=20.0, **fields):
    return Step(name, "first", (sys.executable, "-c", code), seconds, **fields)


@pytest.fixture
def ran(tmp_path):
    """Runs steps; their rows, whether all passed, and the log."""

    def go(*listed, seconds=60.0):
        rows, log = Rows(tmp_path / "rows.jsonl", {"device": "gpu"}), tmp_path / "log.txt"
        with log.open("ab") as file:
            passed = run_steps(listed, rows, file, seconds=seconds, env=dict(os.environ))
        return [json.loads(line) for line in rows.path.read_text().splitlines()], passed, log.read_text()

    return go


def test_every_step_has_a_row_whatever_became_of_it(ran):
    rows, passed, log = ran(
        python("good", "print('all is well')"),
        python("bad", "print('nothing is well'); raise SystemExit(3)"),
        Step("absent", "first", ("/nonexistent/program",), 5),
        python("slow", "import time; print('begun', flush=True); time.sleep(60)", seconds=1.0),
        python("last", "print('still here')"),
    )
    assert [(row["step"], row["status"]) for row in rows] == [
        *(("good", "passed"), ("bad", "failed"), ("absent", "missing"), ("slow", "timeout"), ("last", "passed"))
    ]
    assert [row.get("exit") for row in rows[:2]] == [0, 3]
    assert rows[0]["detail"] == "all is well"
    assert "/nonexistent/program" in rows[2]["detail"]
    assert rows[3]["detail"].endswith("begun")
    assert 1 <= rows[3]["seconds"] < 5
    assert all(row["device"] == "gpu" for row in rows)
    assert not passed
    assert "nothing is well" in log


def test_what_a_step_prints_as_json_is_a_row_at_once(ran):
    code = """
import time
print('{"us": 1.5}', flush=True)
print('{not json}', flush=True)
print('{"step": "another"}', flush=True)
time.sleep(60)
"""
    rows, _, log = ran(python("measures", code, seconds=1.5))
    assert rows[0] == {"step": "measures", "part": "first", "us": 1.5, "device": "gpu"}
    assert [row["status"] for row in rows[1:]] == ["timeout"]
    assert '{"us": 1.5}' in log


def test_rows_are_on_disk_while_a_step_runs(tmp_path):
    """Who loses the machine in the middle of a step has all rows before it."""
    code = f"import time; print(open({str(tmp_path / 'rows.jsonl')!r}).read().count('passed')); time.sleep(0)"
    rows = Rows(tmp_path / "rows.jsonl", {})
    with (tmp_path / "log").open("ab") as log:
        run_steps([python("a", "print(1)"), python("b", code)], rows, log, seconds=60, env=dict(os.environ))
    found = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert found[1]["detail"] == "1"


def test_what_a_step_leaves_running_ends_with_it(ran, tmp_path):
    left = tmp_path / "left"
    child = f"import time; time.sleep(1); open({str(left)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.DEVNULL)"
    rows, _, _ = ran(python("leaves", code))
    assert rows[0]["status"] == "passed"
    time.sleep(1.5)
    assert not left.exists()


def test_a_step_without_time_left_is_written_down(ran):
    slow, following = python("slow", "import time; time.sleep(60)", 1.0), python("next", "print(1)", 1.0)
    rows, passed, _ = ran(slow, following, seconds=1.5)
    assert [row["status"] for row in rows] == ["timeout", "not started"]
    assert rows[0]["seconds"] < 5
    assert not passed


def test_the_steps_are_there_and_fit_their_calls():
    names = [step.name for step in steps.STEPS]
    assert len(set(names)) == len(names)
    for step in steps.STEPS:
        assert step.part in ("first", "correct", "speed")
        for word in step.command:
            if word.startswith("{home}/tests/") and not word.endswith(".ini"):
                assert (ROOT / word.removeprefix("{home}/")).is_file()
            if word.startswith("{home}/programs/"):
                assert word.removeprefix("{home}/programs/") in steps.PROGRAMS
            assert set(re.findall(r"\{(.*?)\}", word)) <= {"python", "home", "device", "results"}
    for source in steps.PROGRAMS.values():
        assert (ROOT / "tests" / "mojo" / source).is_file()
    for part in ("first", "correct"):
        assert sum(step.seconds for step in steps.STEPS if step.part == part) <= 600
    assert max(step.seconds for step in steps.STEPS) < 600


def test_the_runner_reads_what_the_bundle_writes(tmp_path):
    """With `--device cpu`, only steps for the CPU run; here their Python is a program that says its arguments."""
    (tmp_path / "run.py").write_text(Path(run.__file__).read_text())
    (tmp_path / "steps.json").write_text(steps.as_json("abc"))
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$*"\n')
    script.chmod(0o755)
    command = [sys.executable, tmp_path / "run.py", "first", "--device", "cpu", "--results", tmp_path / "results"]
    result = subprocess.run(command, env={**os.environ, "PYTHON": str(script)}, capture_output=True, check=False)
    assert result.returncode == 0, result.stdout
    rows = [json.loads(line) for line in (tmp_path / "results" / "rows.jsonl").read_text().splitlines()]
    expected = [step.name for step in steps.STEPS if step.part == "first" and "cpu" in step.devices]
    assert [row["step"] for row in rows] == expected
    assert all((row["commit"], row["device"]) == ("abc", "cpu") for row in rows)
    assert rows[0]["detail"].endswith("--device cpu hello")


def test_the_hosts_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", raising=False)
    env = run.environment(tmp_path)
    assert env["MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"] == "10"
    assert env["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "site")


KEYS = """
import json, os, sys
from paged_kv.benchmarks.gpu_bundle import graphs
graphs.use_host_target(sys.argv[1], virtual=True)
from paged_kv.benchmarks import gpu_graphs
from paged_kv.runtime import artefacts, session
from paged_kv.runtime.compile_key import Sources, toolchain

asked = []
def load_graphs(_, keys, *args, **kwargs):
    asked.append({name: key.digest(Sources.installed(), toolchain()) for name, key in keys.items()})
    return dict.fromkeys(keys)

session.load_graphs = gpu_graphs.load_graphs = load_graphs
for wanted in graphs.wanted(sys.argv[1]):
    wanted.compile()
    print(json.dumps([wanted.name, sorted(graphs.digests_of(wanted)), sorted(asked.pop().values())]))
print(json.dumps([toolchain(), session.runtime_on(0 if sys.argv[1] == "gpu" else None).architecture, ""]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("device", "architecture"), [("gpu", "cuda sm_90a 0"), ("cpu", "")])
def test_the_hosts_processes_look_for_the_names_that_are_packed(device, architecture):
    """A runtime asks for each graph under the digest that the bundle takes for it, for a CPU that any host has."""
    command = [sys.executable, "-c", KEYS, device]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    *graphs, (tools, found, _) = map(json.loads, result.stdout.splitlines())
    assert tools.endswith(" for haswell")
    assert found == architecture
    assert {"add_one", "attention_bfloat16_bfloat16"} <= {name for name, *_ in graphs}
    for name, packed, asked in graphs:
        assert packed == asked, name
    assert len({digest for _, packed, _ in graphs for digest in packed}) == len(graphs)


def test_graphs_of_older_sources_are_left_out(tmp_path):
    cache = tmp_path / "cache" / "paged-kv"
    (cache / "compiled").mkdir(parents=True)
    for name in ("a" * 32, "b" * 32, "c" * 32):
        (cache / "compiled" / f"{name}.graph").write_text(name)
    (cache / "cpu.txt").write_text("a" * 32 + "\n")
    (cache / "gpu.txt").write_text("c" * 32 + "\n")
    contents.forget_older_graphs(tmp_path)
    assert sorted(path.stem[0] for path in (cache / "compiled").iterdir()) == ["a", "c"]


def test_a_wheel_is_laid_out_without_what_no_step_runs(tmp_path):
    (tmp_path / "wheels").mkdir()
    names = (
        "max/engine/api.py",
        "max/engine/api.pyi",
        "max/serve/api.py",
        "max-1.data/platlib/max/core.so",
        "max-1.data/data/x",
    )
    with zipfile.ZipFile(tmp_path / "wheels" / "max-1-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
    contents.wheels(tmp_path, tmp_path / "wheels")
    laid = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert laid == {"max/engine/api.py", "max/core.so"}


def test_the_package_is_laid_out_as_it_is_installed(tmp_path):
    """Every source is there, where imports find it: keys of compiled graphs are digests of these files."""
    contents.own_package(tmp_path)
    packages = PYPROJECT["tool"]["setuptools"]["package-dir"]
    for package, folder in packages.items():
        for source in (ROOT / folder).rglob("*"):
            inner = source.relative_to(ROOT / folder)
            if source.suffix in (".py", ".mojo") and "results" not in inner.parts:
                assert (tmp_path.joinpath(*package.split("."), inner)).read_bytes() == source.read_bytes()
    command = [sys.executable, "-c", "from importlib.metadata import version; print(version('paged_kv'))"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip() == VERSION
