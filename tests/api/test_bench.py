"""The decode benchmark: its grid and arithmetic, and that wrong results are seen. No times are asserted."""

import sys

import numpy as np
import pytest

from paged_kv import reference
from paged_kv.benchmarks import decode_cpu, job, ours
from paged_kv.benchmarks.case_kinds import (
    MIN_BYTES,
    MIN_COPIES,
    MIN_ROTATED,
    AppendCase,
    AttentionCase,
    LinearCase,
    StepCase,
)
from paged_kv.benchmarks.cases import CASES, QUICK, Selection
from paged_kv.benchmarks.peers import PEERS, make_peer
from paged_kv.benchmarks.peers.base import Peer
from paged_kv.benchmarks.problems import numpy_dtype, problem_of
from support import harness

BY_NAME = {case.name: case for case in CASES}

# What is asked for: share of the bandwidth, and by which factor the fastest of these peers is to be beaten.
ASKED = {
    "mla-16": (None, {"torch-mla torch-mla-sdpa": 2, "vllm-mla": 1}),
    "mla-64": (None, {"torch-mla torch-mla-sdpa": 2, "vllm-mla": 1}),
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
    "linear-64": (None, {"torch-linear": 1}),
    "linear-256": (None, {"torch-linear": 1}),
    "step-1": (0.7, {"transformers": 1.3, "llama.cpp": 1}),
    "step-8": (0.7, {"transformers": 1.3, "llama.cpp": 1}),
    "step-prefill": (None, {"transformers": 1}),
    "prefill": (None, {"torch": 1}),
    "new4": (None, {"ours-1": 0.8}),
    **{name: (None, {"ours-rotated": 0.5}) for name in ("rope-bf16", "rope-f32", "rope-prefill")},
    "cascade-8": (None, {"ours-flat": 4}),
    "cascade-32": (None, {"ours-flat": 4}),
    "prefill-wrapper": (None, {"torch": 1.2, "vllm-16 vllm-32": 1}),
    "prefill-cached": (None, {"torch": 1.2, "vllm-16 vllm-32": 1}),
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
    assert [BY_NAME[f"linear-{m}"].rows for m in (1, 8, 64, 256)] == [1, 8, 64, 256]


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


def test_the_rows_of_a_prefill_see_what_is_before_them():
    problem = problem_of(small(lengths=(5, 4), new_tokens=3))
    assert problem.row_lengths.tolist() == [3, 4, 5, 2, 3, 4]
    assert problem.row_batch.tolist() == [0, 0, 0, 1, 1, 1]


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


@pytest.mark.parametrize(
    ("key", "case"),
    [
        ("torch", small(lengths=(64, 64))),
        ("torch", small(lengths=(33,), new_tokens=33)),
        ("torch", small(lengths=(33,), new_tokens=5)),
        ("gather", small(lengths=(64, 64))),
        ("torch-linear", LinearCase("", "", rows=2, outer=30, inner=16)),
    ],
    ids=["torch", "prefill", "chunk", "gather", "linear"],
)
def test_torch_peers_are_right_on_every_copy(key, case):
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
    ids=["NHD", "HND", "MAX", "prefill", "float8", "append"],
)
def test_ours_is_right_on_every_copy(case):
    harness.runtime()
    problem = problem_of(case)
    system = ours.OURS[type(case).__name__]()
    system.prepare(problem, 3)
    assert system.memory.flags.c_contiguous
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
