"""The decode benchmark: its grid, arithmetic and reports, and that wrong results are seen. No times are asserted."""

import csv
import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console

import harness
from paged_kv import reference
from paged_kv.benchmarks import decode_cpu, job, ours, report, roofline
from paged_kv.benchmarks.cases import (
    CASES,
    MIN_BYTES,
    MIN_COPIES,
    MIN_ROTATED,
    QUICK,
    AppendCase,
    AttentionCase,
    LinearCase,
    Selection,
    StepCase,
)
from paged_kv.benchmarks.peers import PEERS, make_peer
from paged_kv.benchmarks.peers.base import Peer
from paged_kv.benchmarks.problems import numpy_dtype, problem_of
from paged_kv.benchmarks.results import met, row_of
from paged_kv.cli import _run

BY_NAME = {case.name: case for case in CASES}
FACTS = {"machine": "a machine", "date": "2026-11-21", "commit": "abc"}

# What is asked for: share of the bandwidth, and by which factor the fastest of these peers is to be beaten.
ASKED = {
    "bf16": (0.85, {"vllm-16": 2.5, "vllm-amx-32 vllm-amx-64 vllm-amx-128": 1.2, "torch": 2.5, "gather": 20}),
    "f32": (0.85, {"vllm-16 vllm-32": 1.7, "max": 5, "ort": 2}),
    "f16": (0.85, {"ort": 3}),
    "group1": (0.85, {}),
    "group2": (0.85, {}),
    "group8": (0.85, {}),
    "group16": (0.7, {}),
    "long": (0.85, {"vllm-amx-32 vllm-amx-64 vllm-amx-128": 1.2}),
    "uneven": (0.8, {}),
    "hnd": (0.85, {}),
    "page1": (0.6, {}),
    "page128": (0.9, {}),
    "max-layout": (0.85, {}),
    "e4m3": (0.7, {"ours-bf16": 1.4}),
    "append-8x1": (None, {}),
    "append-4096": (0.8, {}),
    "linear-1": (0.85, {"torch-linear": 1}),
    "linear-8": (0.85, {"torch-linear": 1}),
    "step-1": (0.7, {"transformers": 1.3, "llama.cpp": 1}),
    "step-8": (0.7, {"transformers": 1.3, "llama.cpp": 1}),
    "step-prefill": (None, {"transformers": 1}),
    "prefill": (None, {"torch": 1}),
}


def test_the_grid_asks_for_what_it_should():
    asked = {
        case.name: (case.share, {" ".join(v.peers): v.at_least for v in case.versus if v.at_least is not None})
        for case in CASES
    }
    assert asked == ASKED
    assert {peer for case in CASES for peer in case.peers} <= set(PEERS)
    assert set(QUICK) <= set(BY_NAME)


def test_the_cases_are_what_their_names_say():
    decode = [case for case in CASES if isinstance(case, AttentionCase) and case.new_tokens == 1]
    assert {(c.kv_heads, c.head_dim) for c in decode} == {(8, 128)}
    groups = {case.heads // case.kv_heads for case in decode}
    assert groups == {1, 2, 4, 8, 16}
    assert {case.page_size for case in decode} == {1, 16, 128}
    assert {case.layout for case in decode} == {"NHD", "HND", "MAX"}
    assert {(case.dtype, case.kv_dtype) for case in decode} == {
        *((dtype, dtype) for dtype in ("float32", "bfloat16", "float16")),
        ("bfloat16", "float8_e4m3fn"),
    }
    assert BY_NAME["bf16"].lengths == (4096,) * 8
    assert BY_NAME["long"].lengths == (65536,)
    assert sorted(BY_NAME["uneven"].lengths) == [*(128,) * 31, 32768]
    assert BY_NAME["prefill"].new_tokens == 2048
    assert [BY_NAME[f"step-{b}"].batch for b in (1, 8)] == [1, 8]
    assert [BY_NAME[f"linear-{m}"].rows for m in (1, 8)] == [1, 8]


def test_memory_bound_cases_are_large_and_rotate():
    for case in CASES:
        if isinstance(case, AttentionCase) and case.new_tokens == 1:
            assert case.bytes >= MIN_BYTES, case.name
        if isinstance(case, AttentionCase | LinearCase):
            assert case.copies >= MIN_COPIES
            assert case.copies * case.bytes >= MIN_ROTATED, case.name


def test_bytes_and_arithmetic():
    assert BY_NAME["bf16"].bytes == 2 * 8 * 4096 * 8 * 128 * 2
    assert BY_NAME["f32"].bytes == 2 * BY_NAME["bf16"].bytes
    assert BY_NAME["bf16"].flops == BY_NAME["bf16"].bytes * 4  # a group of 4 over two bytes: 4 FLOP a byte
    assert BY_NAME["group8"].flops == BY_NAME["bf16"].flops * 2
    small = AttentionCase("", "", lengths=(5, 5), heads=2, kv_heads=1, head_dim=8, new_tokens=3)
    assert small.flops == 2 * (5 + 4 + 3) * 2 * 8 * 4
    assert LinearCase("", "", rows=3, outer=5, inner=7).bytes == 70
    assert LinearCase("", "", rows=3, outer=5, inner=7).flops == 210
    assert AppendCase("", "", batch=2, tokens=3, kv_heads=4, head_dim=8).bytes == 2 * 6 * 32 * 2


def test_a_step_counts_the_weights_that_it_reads():
    step = StepCase(
        "", "", batch=2, context=10, layers=3, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=8, vocab=50
    )
    shapes = problem_of(step).weights
    matrices = {name: array.size for name, array in shapes.items() if array.ndim == 2}
    assert step.parameters == sum(matrices.values())
    kv = 2 * 3 * 2 * 11 * 2 * 8
    assert step.bytes == 2 * (sum(matrices.values()) - matrices["model.embed_tokens.weight"] + kv)
    assert 1.05e9 < BY_NAME["step-1"].parameters < 1.15e9


def test_a_selection_refuses_unknown_names():
    assert Selection.of((), quick=False, with_peers=True).cases == CASES
    assert [case.name for case in Selection.of((), quick=True, with_peers=True).cases] == list(QUICK)
    with pytest.raises(KeyError, match="nope"):
        Selection.of(("bf16", "nope"), quick=False, with_peers=True)


# --- right and wrong results


def small(**changes):
    fields = {"lengths": (37, 5, 64), "heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 8}
    return AttentionCase("small", "", **(fields | changes))


def expected_output(problem):
    """By the oracle, over pages of one token."""
    tokens = np.arange(len(problem.k), dtype=np.uint32)
    table = np.zeros((len(problem.case.lengths), max(problem.case.lengths)), np.uint32)
    for row, begin, length in zip(table, problem.indptr[:-1], problem.case.lengths, strict=True):
        row[:length] = tokens[begin : begin + length]
    blocks = problem.k[:, None], problem.v[:, None]
    return reference.attention(problem.q, *blocks, table, problem.row_batch, problem.row_lengths)[0]


@pytest.mark.parametrize("new_tokens", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_knows_right_attention_from_wrong(dtype, new_tokens):
    problem = problem_of(small(dtype=dtype, kv_dtype=dtype, new_tokens=new_tokens))
    right = expected_output(problem)
    assert problem.error(right.astype(numpy_dtype(dtype))) < problem.tolerance
    one_nan = right.copy()
    one_nan[0, 0, 0] = np.nan
    wrong = {
        "scale": right * 1.05,
        "heads": right[:, ::-1],
        "rows": np.roll(right, 1, axis=0),
        "NaN": np.full_like(right, np.nan),
        "shape": right[:, :, :-1],
        "zero": right * 0,
    }
    for what, output in wrong.items():
        assert not problem.error(output) <= problem.tolerance, what


def test_the_check_knows_a_kernel_that_leaves_out_a_token():
    problem = problem_of(small())
    shorter = problem_of(small())
    shorter.v[problem.indptr[1:] - 1] = 0
    assert problem.error(expected_output(shorter)) > problem.tolerance


def test_the_checks_of_linear_and_append():
    linear = problem_of(LinearCase("", "", rows=3, outer=40, inner=24))
    right = linear.x.astype(np.float64) @ linear.w.astype(np.float64).T
    assert linear.error(right) < 1e-12
    assert linear.error(right[:, ::-1]) > linear.tolerance
    append = problem_of(AppendCase("", "", batch=2, tokens=3, context=5, kv_heads=2, head_dim=8))
    written = np.stack([append.k, append.v])
    assert append.error(written) == append.tolerance == 0
    written[1, 4, 1, 3] += 1
    assert append.error(written) > append.tolerance


TINY_STEP = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 70}


@pytest.mark.parametrize(("tokens", "context"), [(1, 32), (6, 0)])
def test_the_reference_of_a_step_is_what_transformers_computes(tokens, context):
    problem = problem_of(StepCase("", "", batch=2, tokens=tokens, context=context, dtype="float32", **TINY_STEP))
    peer = make_peer("transformers")
    assert peer.available(problem.case) is None
    peer.prepare(problem, 1)
    for i in range(3):  # a run leaves the context as it was
        peer.run(i)
        assert peer.error(problem) < 1e-5
    assert problem.error(np.roll(peer.output(), 1, axis=0)) > problem.tolerance


@pytest.mark.parametrize("key", ["torch", "gather", "torch-linear"])
def test_torch_peers_are_right_on_every_copy(key):
    case = LinearCase("", "", rows=2, outer=30, inner=16) if key == "torch-linear" else small(lengths=(64, 64))
    problem, peer = problem_of(case), make_peer(key)
    assert peer.available(case) is None
    peer.prepare(problem, 3)
    for i in range(4):
        peer.run(i)
        assert peer.error(problem) < problem.tolerance


@pytest.mark.parametrize(
    "case",
    [
        small(),
        small(layout="HND"),
        small(layout="MAX", page_size=5),
        small(page_size=1, new_tokens=4),
        small(kv_dtype="float8_e4m3fn"),
        AppendCase("", "", batch=3, tokens=5, context=6, kv_heads=2, head_dim=8, page_size=4),
    ],
    ids=str,
)
def test_ours_is_right_on_every_copy(case):
    harness.runtime()
    problem = problem_of(case)
    system = ours.OURS[type(case).__name__]()
    system.prepare(problem, 3)
    assert len({piece.nbytes for piece in system.memory}) == 1
    for i in range(4):
        system.run(i)
        assert problem.error(system.output()) <= problem.tolerance


def test_the_gain_of_float8_is_measured_on_the_same_tokens():
    harness.runtime()
    problem = problem_of(small(kv_dtype="float8_e4m3fn"))
    peer = make_peer("ours-bf16")
    peer.prepare(problem, 2)
    peer.run(1)
    assert peer.error(problem) <= problem.tolerance
    assert problem.k.dtype == numpy_dtype("float8_e4m3fn")


# --- peers that cannot run


@pytest.mark.parametrize(
    ("key", "module"), [("ort", "onnxruntime"), ("llama.cpp", "llama_cpp"), ("transformers", "transformers")]
)
def test_a_peer_that_is_not_installed_says_so(monkeypatch, key, module):
    monkeypatch.setitem(sys.modules, "onnx", sys)
    monkeypatch.setitem(sys.modules, "gguf", sys)
    monkeypatch.setitem(sys.modules, module, None)
    result = job.measure(BY_NAME["f32" if key == "ort" else "step-1"], make_peer(key), 9, 0)
    assert result["peer"]["note"].startswith("not installed: ")
    assert module in result["peer"]["note"]


def test_peers_refuse_what_they_cannot_run():
    assert "one length" in make_peer("torch").available(BY_NAME["uneven"])
    assert "one length" in make_peer("max").available(BY_NAME["uneven"])


def test_every_peer_can_be_made():
    made = [make_peer(key) for key in PEERS]
    assert all(isinstance(peer, Peer) and peer.name for peer in made)
    assert len({peer.name for peer in made}) == len(PEERS)


def test_a_dead_job_says_why():
    assert decode_cpu.reason(-11, "") == "crashed: SIGSEGV"
    assert decode_cpu.reason(1, "Traceback\n  ...\nValueError: no\n\n") == "failed: ValueError: no"
    assert decode_cpu.reason(3, "") == "exit status 3"


def test_systems_take_turns_over_all_copies():
    log = []
    runs = {name: lambda i, name=name: log.append((name, i)) for name in ("ours", "read", "peer")}
    times = job.take_turns(runs, 4)
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys(runs, 4)
    for name in runs:
        numbers = [i for who, i in log if who == name]
        assert numbers == list(range(len(numbers)))  # so no copy is used twice before the others were
        assert len(numbers) >= 6
    order = [name for name, _ in log]
    changes = [name for i, name in enumerate(order) if i == 0 or name != order[i - 1]]
    assert changes == [*runs] * 6


# --- from measurements to reports


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


def test_the_readme_gets_the_table_between_its_markers(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.update_readme(readme, report.markdown(results, "benchmarks/results/decode_cpu.png"))
    text = readme.read_text()
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
    with pytest.raises(ValueError, match="no lines"):
        report.update_readme(tmp_path / "r.png" if (tmp_path / "r.png").exists() else _empty(tmp_path), "x")


def _empty(folder):
    (folder / "empty.md").write_text("nothing")
    return folder / "empty.md"


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
    assert fake_jobs == [("peaks", "-"), ("f16", "ort"), ("f16", "torch")]
    assert _run(["bench", "--cases", "hnd", "--cases", "append-4096", "--no-peers", "--out", str(tmp_path)]) == 0
    assert fake_jobs[3:] == [("hnd", "-"), ("append-4096", "-")]
    written = json.loads((tmp_path / "decode_cpu.json").read_text())
    assert [row["case"] for row in written["rows"]] == ["f16", "hnd", "append-4096"]
    assert written["peaks"] == {"float32": 3e11}
    assert {path.name for path in tmp_path.iterdir()} == {"decode_cpu.json", "decode_cpu.csv", "decode_cpu.png"}
    assert "2x ONNX Runtime GQA (3)" in capsys.readouterr().out


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
