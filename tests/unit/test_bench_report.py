"""The decode benchmark: from measurements to shares, factors, table, CSV, JSON, picture and README; the command."""

import csv
import io
import json

import pytest
from rich.console import Console

from paged_kv.benchmarks import bars, decode_cpu, report, roofline
from paged_kv.benchmarks.cases import CASES, QUICK
from paged_kv.benchmarks.results import met, row_of
from paged_kv.cli import _run

BY_NAME = {case.name: case for case in CASES}
FACTS = {"machine": "a machine", "date": "2026-11-21", "commit": "abc"}


def fake_job(ours_s, read_gb, peer_s=None, *, peer_right=True, right=True, size=1000):
    """What `job.measure` returns."""
    result = {
        "ours": {"name": "paged-kv", "seconds": [ours_s * 3, ours_s, ours_s / 2], "error": 1e-3, "right": right},
        "read": {"seconds": [size / read_gb / 1e9], "bytes": size},
        "copy": {"seconds": [2 * size / read_gb / 1e9], "bytes": size},
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


def test_append_is_held_against_copies():
    case = BY_NAME["append-4096"]
    row = row_of(case, {"-": fake_job(case.bytes / 10e9, 25)}, FACTS)
    assert row["share"] == pytest.approx(0.8)
    assert report.share_cell(row) == "0.80 of memcpy (0.8)"
    assert row["ceiling_gb_per_s"] == pytest.approx(12.5)


@pytest.mark.parametrize(("name", "rate"), [("step-8", "40.0 tokens/s"), ("step-prefill", "1280.0 tokens/s")])
def test_steps_count_tokens(name, rate):
    row = row_of(BY_NAME[name], {"-": fake_job(0.2, 25)}, FACTS)
    assert row["rate"] == rate
    assert (row["share"] is None) == (name == "step-prefill")


def test_a_wrong_result_of_ours_is_told():
    row = row_of(BY_NAME["hnd"], {"-": fake_job(1e-6, 25, right=False)}, FACTS)
    assert met(row) is False
    assert report.verdict(row) == "WRONG"


def test_a_case_without_a_figure_says_why():
    row = row_of(BY_NAME["hnd"], {"-": {"note": "crashed: SIGABRT"}}, FACTS)
    assert (row["ms"], row["note"]) == (None, "crashed: SIGABRT")
    assert report.verdict(row) == "no figure"


@pytest.fixture
def results():
    rows = [
        full_row(),
        row_of(BY_NAME["hnd"], {"-": {"note": "crashed: SIGABRT"}}, FACTS),
        row_of(BY_NAME["append-4096"], {"-": fake_job(2e-3, 25)}, FACTS),
    ]
    return {**FACTS, "versions": {"max": "26.7.0", "torch": "2.13.0"}, "peaks": {"float32": 3e11}, "rows": rows}


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


def test_the_picture_is_drawn(results, tmp_path):
    roofline.draw(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_are_drawn(results, tmp_path):
    bars.draw(results, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_gets_what_was_measured_against_others(results):
    text = report.summary(results, "bars.png")
    assert "(bars.png)" in text
    assert "a machine; 2026-11-21; max 26.7.0, torch 2.13.0." in text
    assert (
        "| bf16, NHD, page 16, B 8, 32/8, L 4096 | 6.71 ms | 20.0 GB/s | 2x vLLM CPU, page 16, "
        "1.3x vLLM CPU AMX, best page size, 3x torch SDPA, contiguous," in text
    )
    assert "append 1 x 4096" not in text
    assert "SIGABRT" not in text


def test_a_page_gets_the_table_between_its_markers(results, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.update_page(page, report.markdown(results, "benchmarks/results/decode_cpu.png"))
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert "old" not in text
    assert "a machine; 2026-11-21; max 26.7.0, torch 2.13.0." in text
    assert (
        "| bf16, NHD, page 16, B 8, 32/8, L 4096 | 6.71 ms | 20.0 GB/s | 0.80 (0.85) | 2x vLLM CPU, page 16 (2.5),"
        in text
    )
    assert "SIGABRT" not in text
    assert "(benchmarks/results/decode_cpu.png)" in text
    other = tmp_path / "other.md"
    other.write_text("nothing")
    with pytest.raises(ValueError, match="no lines"):
        report.update_page(other, "x")


# --- the command


@pytest.fixture
def fake_jobs(monkeypatch):
    calls = []

    def fake(self, case, peer):  # noqa: ARG001
        calls.append((case, peer))
        return {"peaks": {"float32": 3e11}} if case == "peaks" else fake_job(1e-3, 25, None if peer == "-" else 2e-3)

    monkeypatch.setattr(decode_cpu.Run, "job", fake)
    return calls


def test_the_command_writes_its_files_and_keeps_other_cases(fake_jobs, tmp_path, capsys):
    assert _run(["bench", "--cases", "f16", "--out", str(tmp_path)]) == 0
    assert fake_jobs == [("peaks", "-"), ("f16", "-"), ("f16", "ort"), ("f16", "torch")]
    assert _run(["bench", "--cases", "hnd", "--cases", "append-4096", "--no-peers", "--out", str(tmp_path)]) == 0
    assert fake_jobs[4:] == [("hnd", "-"), ("append-4096", "-")]
    written = json.loads((tmp_path / "decode_cpu.json").read_text())
    assert [row["case"] for row in written["rows"]] == ["f16", "hnd", "append-4096"]
    assert written["peaks"] == {"float32": 3e11}
    assert {path.name for path in tmp_path.iterdir()} == {"decode_cpu.json", "decode_cpu.csv", "decode_cpu.png"}
    assert "2x ONNX Runtime GQA (3)" in capsys.readouterr().out


def test_update_readme_writes_both_pages(fake_jobs, tmp_path, monkeypatch):  # noqa: ARG001
    for folder in ("benchmarks/results", "docs/pictures"):
        (tmp_path / folder).mkdir(parents=True)
    for page in ("README.md", "docs/performance.md"):
        (tmp_path / page).write_text(f"{report.BEGIN}\n{report.END}\n")
    monkeypatch.setattr(decode_cpu, "HERE", tmp_path / "benchmarks")
    assert _run(["bench", "--cases", "f16", "--update-readme"]) == 0
    readme, performance = ((tmp_path / page).read_text() for page in ("README.md", "docs/performance.md"))
    assert "2x ONNX Runtime GQA (3)" in performance
    assert "(../benchmarks/results/decode_cpu.png)" in performance
    assert "2x ONNX Runtime GQA, 2x torch SDPA, contiguous |" in readme
    assert f"({decode_cpu.BARS})" in readme
    assert (tmp_path / decode_cpu.BARS).is_file()


def test_quick_writes_nothing(fake_jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _run(["bench", "--quick"]) == 0
    assert fake_jobs == [(name, "-") for name in QUICK]
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_in_one_line(monkeypatch, tmp_path, capsys):
    assert _run(["bench", "--cases", "nope"]) == 2
    assert "error: --cases: 'nope' is none of bf16, f32" in capsys.readouterr().err
    assert _run(["bench", "--quick", "--update-readme"]) == 2
    assert "--update-readme needs a checkout" in capsys.readouterr().err
    monkeypatch.setattr(decode_cpu, "find_spec", lambda name: None)  # noqa: ARG005
    assert _run(["bench", "--cases", "hnd", "--out", str(tmp_path / "new")]) == 2
    assert "the picture needs matplotlib: pip install 'paged-kv[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
