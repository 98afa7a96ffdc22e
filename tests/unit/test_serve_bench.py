"""The benchmark of servers: a client's stream, turns with stopped servers, rows, pages, checkpoints; no real server."""

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from max.dtype import DType
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from benchmarks import serve_cpu, serve_report
from benchmarks.serve_cases import CASES, TOGETHER, VERSUS, ServeCase, fresh_turns
from benchmarks.serve_checkpoint import Checkpoint, vocabulary, write_checkpoint
from benchmarks.serve_client import Stream, WrongAnswer, decode_rate, first_token_seconds, parse
from benchmarks.serve_results import merged, read_results, row_of, write_results
from benchmarks.serve_run import Group
from benchmarks.servers import SYSTEMS, base, http
from paged_kv.bench.model_files import write_gguf
from paged_kv.bench.problems import problem_of
from paged_kv.bench.weight_cases import StepCase
from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo import EOS_ID, byte_tokenizer
from paged_kv.engine.tokenizer import Tokenizer as EngineTokenizer
from paged_kv.errors import ContractError

FAKE = Path(__file__).resolve().parent / "fake_server.py"
FACTS = {"machine": "a machine", "date": "2026-11-22", "commit": "abc"}
CASE = ServeCase("small", 1, 64)


class Fake(base.HttpServer):
    """A token takes two milliseconds."""

    label = "fake"
    milliseconds = 2

    def unavailable(self, *_):
        return None

    def version(self):
        return "1"

    def command(self, _, port, *__):
        return [sys.executable, str(FAKE), str(port), str(self.milliseconds)]


class Slow(Fake):
    """A token takes six."""

    label = "slow"
    milliseconds = 6


class Dead(Fake):
    label = "dead"

    def command(self, *_):
        return [sys.executable, "-c", "print('before'); raise SystemExit('no such model')"]


class Absent(Fake):
    label = "absent"

    def unavailable(self, *_):
        return "not installed: nothing"


@pytest.fixture
def fakes(monkeypatch):
    systems = {"ours-bf16": Fake, "max-f32": Slow, "vllm-bf16": Dead, "llama-bf16": Absent}
    monkeypatch.setattr("benchmarks.serve_run.make_system", lambda key: systems[key]("bfloat16"))


def is_stopped(process):
    """Return whether it is, or comes to be: the signal takes effect when a CPU is free for the process."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] == "T":
            return True
        time.sleep(0.01)
    return False


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\r\n"


def piece(text):
    return event(choices=[{"text": text}])


def test_a_stream_of_pieces():
    lines = [
        (1.0, piece("a")),
        (1.5, piece("")),  # half a character
        (2.0, piece("é")),
        (2.1, event(choices=[], usage={"completion_tokens": 3})),
        (2.2, b"data: [DONE]\n"),
    ]
    assert parse(0.5, lines, 3) == Stream(0.5, [1.0, 2.0], 3)
    with pytest.raises(WrongAnswer, match="3 tokens for 4"):
        parse(0.5, lines, 4)
    with pytest.raises(WrongAnswer, match="out of pages"):
        parse(0.5, [(1.0, event(error={"message": "out of pages"}))], 4)


def test_a_stream_without_text_counts_its_pieces():
    lines = [(1.0, piece("")), (2.0, event(choices=[], usage={"completion_tokens": 1}))]
    assert parse(0.0, lines, 1).arrivals == [1.0]


def test_the_rate_is_of_the_time_when_all_are_answered():
    """A token each 0.1 s; the second request begins a second later and ends a second later."""
    early = Stream(0.0, [0.1 * at for at in range(1, 31)], 30)
    late = Stream(0.0, [1.0 + 0.1 * at for at in range(1, 31)], 30)
    assert decode_rate([early, late]) == pytest.approx(20, rel=0.06)
    assert decode_rate([early]) == pytest.approx(10)
    pairs = Stream(0.0, [0.2 * at for at in range(1, 16)], 30)  # two tokens a piece
    assert decode_rate([pairs]) == pytest.approx(10)
    assert first_token_seconds([early, late]) == pytest.approx(0.6)
    with pytest.raises(WrongAnswer, match="together"):
        decode_rate([early, Stream(0.0, [5.0, 6.0], 2)])


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
def test_servers_take_turns(tmp_path):
    keys = ("ours-bf16", "max-f32", "vllm-bf16", "llama-bf16")
    with Group(keys, Checkpoint("small", tmp_path), tmp_path) as group:
        processes = [system._process for system in group._alive.values()]
        assert len(processes) == 2
        assert all(map(is_stopped, processes))
        found = group.measure(CASE, 3)
    assert all(one.poll() is not None for one in processes)
    assert "no such model" in found["vllm-bf16"]["note"]
    assert found["llama-bf16"]["note"] == "not installed: nothing"
    assert group.versions == {"fake": "1", "slow": "1"}
    row = row_of(CASE, "bf16", found, FACTS)
    assert len(row["systems"]["ours-bf16"]["rates"]) == 3
    assert row["systems"]["vllm-bf16"]["rate"] is None
    ratios = {versus["other"]: versus["ratio"] for versus in row["versus"]}
    assert ratios["vllm-bf16"] is None
    ours, slow = (row["systems"][key]["rates"] for key in keys[:2])
    assert ratios["max-f32"] == statistics.median(one / other for one, other in zip(ours, slow, strict=True))
    assert row["systems"]["max-f32"]["first_ms"] > 6


@pytest.mark.usefixtures("fakes")
def test_a_server_that_fails_a_case_goes_on_with_the_next(tmp_path, monkeypatch):
    with Group(("ours-bf16",), Checkpoint("small", tmp_path), tmp_path) as group:
        monkeypatch.setattr(group, "_prompts", lambda *_: [[7, 1], [9, 1]])
        assert group.measure(CASE, 2)["ours-bf16"]["note"].startswith("HTTP 500")
        monkeypatch.setattr(group, "_prompts", lambda *_: [[8, 1], [9, 1]])
        assert group.measure(CASE, 2)["ours-bf16"]["note"] == "0 tokens for 1"
        monkeypatch.setattr(group, "_prompts", lambda *_: [[9, 1]])
        assert "note" not in group.measure(CASE, 2)["ours-bf16"]


def test_prompts_are_new_in_as_many_turns_as_they_are_cheap():
    turns = {(1, 512): 5, (1, 2048): 4, (8, 512): 2, (8, 4096): 1}
    assert {sizes: fresh_turns(ServeCase("large", *sizes), 5) for sizes in turns} == turns


def figures(rate, first):
    return {"name": f"at {rate}", "turns": [{"rate": rate, "first": first}, {"rate": rate * 2, "first": None}]}


def test_rows_have_factors_and_what_serving_costs():
    case = CASES[3]
    found = {"ours-bf16": figures(80.0, 1.0), "max-f32": figures(20.0, 3.0), "engine-bf16": figures(100.0, 1.0)}
    found["vllm-bf16"] = {"name": "vLLM", "turns": [], "note": "not installed: vllm"}
    row = row_of(case, "bf16", found, FACTS)
    (built_in, vllm) = row["versus"]
    assert (built_in["ratio"], built_in["first_ratio"], built_in["at_least"]) == (4, 3, 2)
    assert vllm["ratio"] is None
    assert row["overhead"]["share"] == pytest.approx(0.25)
    assert row["overhead"]["ms"] == pytest.approx((20 + 10) / 2)
    assert row["systems"]["ours-bf16"]["first_ms"] == 1000
    shown = serve_report.text([row])
    for expected in ("120, 1 s", "not installed: vllm", "4.00x at 20.0 (2)", "15.00 ms (25 %)"):
        assert expected in shown


def test_groups_name_systems_that_exist():
    assert all(key in SYSTEMS for groups in TOGETHER.values() for keys in groups.values() for key in keys)
    assert {key for one in VERSUS for key in (one.ours, one.other)} <= set(SYSTEMS)


def test_files_and_pages(tmp_path):
    out = tmp_path / "results"
    out.mkdir()
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "performance.md"
    page.write_text("before\n<!-- serve_cpu: begin -->\nold\n<!-- serve_cpu: end -->\nafter\n")
    found = {"ours-bf16": figures(80.0, 1.0), "max-f32": figures(20.0, 3.0)}
    path = out / "znver5.csv"
    for rate in (1.0, 80.0):
        found["ours-bf16"] = figures(rate, 1.0)
        for case in (CASES[3], CASES[0], CASES[9]):
            facts = FACTS | ({"other_work": 0.5} if case is CASES[9] else {})
            serve_cpu.write(path, [row_of(case, "bf16", found, facts)], {"MAX": "26.7.0"})
    rows = read_results(path)["rows"]
    assert [row["case"] for row in rows] == [CASES[0].name, CASES[3].name, CASES[9].name]
    assert rows[0]["systems"]["ours-bf16"]["rate"] == 120
    assert merged(rows, [{**rows[1], "date": "later"}])[1]["date"] == "later"
    serve_cpu.write_pages(out, tmp_path)
    text = page.read_text()
    assert "old" not in text
    assert "| 1.1 G parameters, B 8, context 512 * | 120, 1 s | 30, 3 s |" in text
    assert "**znver5**: a machine; 2026-11-22; MAX 26.7.0." in text
    assert "100 M parameters" not in text
    assert f"\\* Other processes used more than 0.05 of the cores' time: {CASES[9].name} 0.50." in text


@pytest.mark.parametrize("family", ["znver4", "znver5"])
def test_a_committed_file_stays_as_it_is_when_it_is_read_and_written(family, tmp_path):
    path = serve_cpu.RESULTS / f"{family}.csv"
    write_results(read_results(path), tmp_path / "copy.csv")
    assert (tmp_path / "copy.csv").read_text() == path.read_text()


def test_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("benchmarks.serve_checkpoint.find_spec", lambda _: None)
    case = StepCase(
        "small", "", layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=32, vocab=300, context=0
    )
    checkpoint = write_checkpoint(case, tmp_path / "small")
    assert load_config(checkpoint.folder).vocab_size == 300
    wide, narrow = (load_file(folder / "model.safetensors") for folder in (checkpoint.float32, checkpoint.folder))
    for name, array in wide.items():
        assert narrow[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(narrow[name].astype(np.float32), array)
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    assert tokenizer.encode("</s>a").ids[:2] == [256, 257]
    assert tokenizer.decode([280, 299]) == " w280 w297 w298"
    assert len(vocabulary(300)) == 300
    assert checkpoint.missing("q4_k") is not None
    before = (checkpoint.folder / "model.safetensors").stat().st_mtime_ns
    write_checkpoint(case, tmp_path / "small")
    assert (checkpoint.folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("sizes", [{}, {"experts": 4, "chosen": 2}, {"file_type": "Q8_0"}], ids=str)
def test_the_gguf_file_is_read_by_this_package(tmp_path, sizes):
    """Without a tokenizer.json beside it, its vocabulary spells a text as that of the checkpoint does."""
    case = StepCase(
        "small", "", layers=1, hidden=256, intermediate=256, heads=2, kv_heads=1, head_dim=128, vocab=300, **sizes
    )
    write_gguf(problem_of(case), tmp_path / "model.gguf", vocabulary(300))
    source = open_source(tmp_path)
    source.load(DType.float32)
    assert source.config.eos_token_ids == (EOS_ID,)
    text = "a text </s> of 日本語"
    assert EngineTokenizer(source, source.config).encode(text) == byte_tokenizer().encode(text).ids


def test_servers_are_started_for_the_same_sizes(tmp_path):
    checkpoint = Checkpoint("small", tmp_path)
    for weights in ("float32", "q4_k"):
        for kind, batch in ((http.Ours, "--max-running"), (http.BuiltIn, "--max-batch-size")):
            command = kind(weights).command(checkpoint, 1234, 8, 256)
            given = dict(pairwise(command))
            assert (given["--port"], given[batch], given["--max-length"]) == ("1234", "8", "256")
            assert (str(checkpoint.q4_k) in command) == (weights == "q4_k")


def test_an_unknown_case_is_refused(tmp_path):
    with pytest.raises(ContractError, match="'tiny' is none of small-1x512"):
        serve_cpu.serve_cpu.callback((), ("tiny",), (), 1, None, tmp_path, False, False)
