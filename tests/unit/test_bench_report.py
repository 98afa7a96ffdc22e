"""The decode benchmark: from measurements to shares, factors, table, CSV, JSON, picture and page; the command."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import pages
from paged_kv.bench import job, provenance, report, run, targets
from paged_kv.bench.cases import CASES, QUICK
from paged_kv.bench.results import met, row_of
from paged_kv.bench.run import Run
from paged_kv.bench.targets import cases_of
from paged_kv.cli import _run

BY_NAME = {case.name: case for case in CASES}
BEGIN, END = "<!-- decode_cpu: begin -->", "<!-- decode_cpu: end -->"
FACTS = {"machine": "a machine", "date": "2026-11-21", "commit": "abc"}


def fake_job(ours_s, read_gb, peer_s=None, *, peer_right=True, right=True, size=1000):
    """What `job.measure` returns."""
    result = {
        "ours": {"name": "paged-kv", "seconds": [ours_s * 3, ours_s, ours_s / 2], "error": 1e-3, "right": right},
        "read": {"seconds": [size / read_gb / 1e9] * 3, "bytes": size},
        "copy": {"seconds": [2 * size / read_gb / 1e9] * 3, "bytes": size},
        "overhead": {"seconds": [2e-5, 3e-5, 9e-5]},
    }
    if peer_s is not None:
        result["peer"] = {"name": "peer", "seconds": [peer_s] * 3, "error": 2e-3, "right": peer_right}
    return result


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
    assert row["overhead_us"] == pytest.approx(30)
    ratios = {versus["label"]: versus["ratio"] for versus in row["versus"]}
    assert ratios["vLLM CPU, page 16"] == pytest.approx(2)
    assert ratios["vLLM CPU AMX, best page size"] == pytest.approx(1.3)  # the fastest that is right
    assert ratios["torch gather + SDPA"] is None
    assert met(row) is False
    assert report.versus_lines(row)[-2:] == [
        "torch gather + SDPA: crashed: SIGSEGV",
        "MAX flash_attention_ragged: not installed: ImportError: x",
    ]


def test_the_share_is_that_of_the_job_without_a_peer():
    """A peer's threads may disturb ours: factors are of its job, the share is not, unless there is no other."""
    case = BY_NAME["f16"]
    jobs = {"-": fake_job(6e-3, 25), "ort": fake_job(8e-3, 25, 40e-3)}
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
    row = row_of(case, {"ort": job}, FACTS)
    assert row["versus"][0]["ratio"] == pytest.approx(2)


def test_one_of_several_targets_may_be_enough():
    case = next(case for case in cases_of("znver5") if case.name == "bf16")
    time = case.bytes / 20e9  # at 20 of 25 GB/s: the share is reached
    for factor, read, expected in ((2, 25, True), (3, 40, True), (2, 40, False)):
        row = row_of(case, {"-": fake_job(time, read), "vllm-16": fake_job(time, read, factor * time)}, FACTS)
        assert met(row) is expected
    assert report.share_cell(row) == "0.50 (0.8 or a factor)"


@pytest.mark.parametrize(("name", "rate"), [("step-8", "40.0 tokens/s"), ("step-prefill", "1280.0 tokens/s")])
def test_steps_count_tokens(name, rate):
    row = row_of(BY_NAME[name], {"-": fake_job(0.2, 25)}, FACTS)
    assert row["rate"] == rate
    assert (row["share"] is None) == (name == "step-prefill")


def test_a_wrong_result_and_a_missing_figure_are_told():
    row = row_of(BY_NAME["hnd"], {"-": fake_job(1e-6, 25, right=False)}, FACTS)
    assert (met(row), report.verdict(row)) == (False, "WRONG")
    row = row_of(BY_NAME["hnd"], {"-": {"note": "crashed: SIGABRT"}}, FACTS)
    assert (row["ms"], row["note"], report.verdict(row)) == (None, "crashed: SIGABRT", "no figure")


@pytest.fixture
def results():
    rows = [
        full_row(),
        row_of(BY_NAME["hnd"], {"-": {"note": "crashed: SIGABRT"}}, FACTS),
        row_of(BY_NAME["append-4096"], {"-": fake_job(2e-3, 25)}, FACTS),
    ]
    return {
        "family": "sapphirerapids",
        **FACTS,
        "versions": {"max": "26.7.0", "torch": "2.13.0"},
        "peaks": {"float32": 3e11},
        "rows": rows,
    }


def test_the_table_shows_targets_beside_figures(results):
    console = Console(record=True, width=160, file=io.StringIO())
    report.print_table(results["rows"], console)
    text = console.export_text()
    for words in ("0.80 (0.85)", "2x vLLM CPU, page 16 (2.5)", "crashed: SIGABRT", "0.67 of memcpy (0.8)"):
        assert words in text


def test_csv_and_json(results, tmp_path):
    report.write_csv(results["rows"], tmp_path / "r.csv")
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 1 + 7 + 1 + 1
    first, second = lines[0], lines[1]
    assert (first["case"], first["system"], first["share"], first["commit"]) == ("bf16", "paged-kv", "0.8", "abc")
    assert (second["ours_is_faster_by"], second["at_least"], second["machine"]) == ("2", "2.5", "a machine")
    notes = {line["note"] for line in lines} - {""}
    assert notes == {
        "wrong result: relative error 2.0e-03",
        "crashed: SIGSEGV",
        "not installed: ImportError: x",
        "crashed: SIGABRT",
    }
    report.write_json(results, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["share"] == 0.8


@pytest.fixture
def families(results):
    """Those results, and a second family's: other figures of one case, and one that the first has not."""
    cases = {case.name: case for case in cases_of("znver5")}
    time = cases["bf16"].bytes / 60e9
    rows = [
        row_of(cases["bf16"], {"-": fake_job(time, 80), "vllm-16": fake_job(time, 80, 2.6 * time)}, FACTS),
        row_of(cases["linear-1"], {"-": fake_job(1e-3, 80)}, FACTS),
    ]
    other = {"machine": "another machine", "date": "2026-11-22", "commit": "def"}
    rows = [row | other for row in rows]
    return [results, {"family": "znver5", **other, "versions": {"max": "26.7.0"}, "rows": rows}]


def test_a_page_gets_the_families_side_by_side(families, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    pages.update_page(page, pages.markdown(families, "results/{family}.png"))
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text
    assert "| case (head_dim 128) | sapphirerapids | znver5 |\n" in text
    first = "6.71 ms, 20.0 GB/s, 0.80 (0.85) | 2.24 ms, 60.0 GB/s, 0.75 (0.8 or a factor)"
    assert f"| bf16, NHD, page 16, B 8, 32/8, L 4096 | {first} |" in text
    assert "| linear bf16, 8192 x 4096, 1 row |  | 1 ms, 67.1 GB/s, 0.84 (0.85) |" in text
    assert "| append 1 x 4096 tokens, bf16 | 2 ms, 8.4 GB/s, 0.67 of memcpy (0.8) |  |" in text
    one, other = text.split("### znver5")
    assert "sapphirerapids: a machine; 2026-11-21; max 26.7.0, torch 2.13.0." in one
    assert "| bf16, NHD, page 16, B 8, 32/8, L 4096 | 2x vLLM CPU, page 16 (2.5)," in one
    assert "(results/sapphirerapids.png)" in one
    assert "Commit def." in other
    assert "(results/znver5.png)" in other
    assert "SIGABRT" not in text.replace("torch gather + SDPA: crashed: SIGSEGV", "")
    summary = pages.summary(families, "bars.png")  # what was measured against others alone
    assert "| bf16, NHD, page 16, B 8, 32/8, L 4096 | vLLM CPU, page 16 | 2x | 2.6x |" in summary
    assert "|  | torch SDPA, contiguous | 3x |  |" in summary
    assert not any(word in summary for word in ("append 1 x 4096", "SIGABRT"))
    empty = tmp_path / "other.md"
    empty.write_text("nothing")
    with pytest.raises(ValueError, match="no lines"):
        pages.update_page(empty, "x")


# --- the command


@pytest.fixture
def fake_jobs(monkeypatch):
    calls = []

    def fake(self, case, peer):  # noqa: ARG001
        calls.append((case, peer))
        return {"peaks": {"float32": 3e11}} if case == "peaks" else fake_job(1e-3, 25, None if peer == "-" else 2e-3)

    monkeypatch.setattr(Run, "job", fake)
    monkeypatch.setattr(targets, "cpu_family", lambda: "sapphirerapids")
    return calls


def test_the_command_writes_its_files_and_keeps_other_cases(fake_jobs, tmp_path, capsys):
    assert _run(["bench", "--cases", "f16", "--out", str(tmp_path)]) == 0
    assert fake_jobs == [("peaks", "-"), ("f16", "-"), ("f16", "ort"), ("f16", "torch")]
    assert _run(["bench", "--cases", "hnd", "--cases", "append-4096", "--no-peers", "--out", str(tmp_path)]) == 0
    assert fake_jobs[4:] == [("hnd", "-"), ("append-4096", "-")]
    written = json.loads((tmp_path / "sapphirerapids.json").read_text())
    assert written["family"] == "sapphirerapids"
    assert [row["case"] for row in written["rows"]] == ["f16", "hnd", "append-4096"]
    assert written["peaks"] == {"float32": 3e11}
    names = {f"sapphirerapids.{kind}" for kind in ("json", "csv", "png")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "sapphirerapids.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "sapphirerapids.csv").read_text().splitlines()) == 1 + 3 + 2
    assert "2x ONNX Runtime GQA (3)" in capsys.readouterr().out


def test_update_pages_adds_this_family_to_the_others(fake_jobs, tmp_path, monkeypatch):  # noqa: ARG001
    for folder in ("benchmarks/results", "docs/pictures"):
        (tmp_path / folder).mkdir(parents=True)
    for module in ("__init__.py", "pages.py"):
        shutil.copy(Path(pages.__file__).with_name(module), tmp_path / "benchmarks")
    versus = [line.replace(pages.MARK, pages.VERSUS) for line in (BEGIN, END)]
    (tmp_path / "docs/performance.md").write_text("\n".join([*versus, BEGIN, END, ""]))
    for module in (provenance, run):
        monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    assert _run(["bench", "--cases", "f16"]) == 0
    first = (tmp_path / "benchmarks/results/decode_cpu/sapphirerapids.json").read_bytes()
    monkeypatch.setattr(targets, "cpu_family", lambda: "znver5")
    assert _run(["bench", "--cases", "f16", "--update-pages"]) == 0
    assert (tmp_path / "benchmarks/results/decode_cpu/sapphirerapids.json").read_bytes() == first
    performance = (tmp_path / "docs/performance.md").read_text()
    assert "2x ONNX Runtime GQA (3)" in performance  # the target with AMX
    assert "2x ONNX Runtime GQA, 2x torch SDPA, contiguous |" in performance  # without
    for family in ("sapphirerapids", "znver5"):
        assert f"(../benchmarks/results/decode_cpu/{family}.png)" in performance
    assert "| f16, same | ONNX Runtime GQA | 2x | 2x |" in performance
    assert f"({pages.BARS.removeprefix('docs/')})" in performance
    assert (tmp_path / pages.BARS).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_arithmetic_has_no_picture(fake_jobs, tmp_path, monkeypatch, capsys):
    assert _run(["bench", "--cases", "append-4096", "--no-peers", "--out", str(tmp_path)]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv"}
    assert "sapphirerapids.json, .csv\n" in capsys.readouterr().err
    monkeypatch.setattr(Run, "job", lambda *_: {"note": "crashed: SIGSEGV"})
    assert _run(["bench", "--cases", "hnd", "--no-peers", "--out", str(tmp_path)]) == 0
    assert "crashed: SIGSEGV" in capsys.readouterr().out
    assert fake_jobs == [("append-4096", "-")]


def test_quick_writes_nothing(fake_jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _run(["bench", "--quick"]) == 0
    assert fake_jobs == [(name, "-") for name in QUICK]
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_in_one_line(monkeypatch, tmp_path, capsys):
    assert _run(["bench", "--cases", "nope"]) == 2
    assert "error: --cases: 'nope' is none of bf16, f32" in capsys.readouterr().err
    assert _run(["bench", "--quick", "--update-pages"]) == 2
    assert "--update-pages needs a checkout" in capsys.readouterr().err
    monkeypatch.setattr("paged_kv.commands.bench.find_spec", lambda name: None)  # noqa: ARG005
    assert _run(["bench", "--cases", "hnd", "--out", str(tmp_path / "new")]) == 2
    assert "the picture needs matplotlib: pip install 'paged-kv[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_slow_product_is_not_repeated_for_the_roof(monkeypatch):
    """Kept to AVX2, torch takes half a minute for one of bfloat16."""
    monkeypatch.setattr(job, "_SLOW_PRODUCT", 0)
    monkeypatch.setattr(job, "take_turns", lambda *_: pytest.fail("it was repeated"))
    peaks = job.measure_peaks(9)["peaks"]
    assert set(peaks) == {"float32", "bfloat16"}
    assert min(peaks.values()) > 0
