"""The decode benchmark: its grid and arithmetic, and that wrong results are seen. No times are asserted."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from paged_kv import reference
from paged_kv.bench import job
from paged_kv.bench.blocks import random_blocks
from paged_kv.bench.case_kinds import (
    MIN_COPIES,
    MIN_ROTATED,
    AppendCase,
    AttentionCase,
    CascadeCase,
    LatentCase,
    PrefillCase,
    named,
)
from paged_kv.bench.cases import CASES, PEERS, QUICK, USUAL, cases_of, selected
from paged_kv.bench.ours import make_ours
from paged_kv.bench.peer import Peer
from paged_kv.bench.problems import problem_of
from paged_kv.bench.run import reason
from paged_kv.bench.steps import llama_config
from paged_kv.bench.weight_cases import BYTES_OF_256, ExpertCase, LinearCase, StepCase
from paged_kv.errors import ContractError
from paged_kv.graphs.encodings import ENCODINGS
from support import harness
from support.gguf_blocks import dequantise

MIN_BYTES = 128 * 2**20
"""Bytes of K and V (or weights) in one call of a memory-bound case."""
BY_NAME = {case.name: case for case in CASES}
CASCADE = CascadeCase("", "", batch=3, shared=32, own=16, heads=4, kv_heads=2)


def make_peer(key):
    return named(PEERS[key])()


def test_cases_name_what_there_is():
    assert {peer for case in CASES for peer in case.peers} == set(PEERS)
    names = [case.name for case in CASES]
    assert set(QUICK) <= {case.name for case in USUAL} <= set(names)
    assert len(set(names)) == len(names)


def test_the_usual_cases_are_compared_with_what_the_extra_installs_and_vllm():
    usual = cases_of("sapphirerapids")
    assert [case.name for case in usual] == [case.name for case in USUAL]
    assert {peer for case in usual for peer in case.peers} == {
        *("torch", "gather", "torch-linear", "transformers", "max"),
        *("vllm-16", "vllm-32", "vllm-amx-32", "vllm-amx-64", "vllm-amx-128"),
    }
    assert cases_of("sapphirerapids", every=True) == CASES


def test_memory_bound_cases_are_large_and_rotate():
    for case in CASES:
        if isinstance(case, AttentionCase) and case.new_tokens == 1:
            # Pages of int4 take a quarter of what the same pages take in bfloat16, beside which they are timed.
            assert case.bytes >= MIN_BYTES // (2 if case.kv_dtype == "int4" else 1), case.name
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
    assert BY_NAME["experts-q4_k"].bytes == 8 * 2048 * 4096 * 9 // 16
    assert BY_NAME["experts-mxfp4"].bytes == 8 * 2048 * 4096 * 17 // 32
    assert AppendCase("", "", batch=2, tokens=3, kv_heads=4, head_dim=8).bytes == 2 * 6 * 32 * 2
    assert CASCADE.bytes == 2 * (32 + 3 * 16) * 2 * 128 * 2  # the shared tokens once
    assert CASCADE.flops == CASCADE.flat.flops == 4 * 3 * 48 * 4 * 128


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


def test_cases_are_selected_by_name():
    assert selected(CASES, ()) == CASES
    assert [case.name for case in selected(CASES, ("mla-16", "bf16", "mla-16"))] == ["mla-16", "bf16"]
    with pytest.raises(ContractError, match=r"--cases: expected one of bf16, .*, got 'nope'"):
        selected(CASES, ("bf16", "nope"))


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
    assert problem.error(right.astype(np.dtype(dtype))) < problem.tolerance
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


@pytest.mark.parametrize("encoding", [None, "Q4_K", "MXFP4"])
def test_the_check_of_experts(encoding):
    case = ExpertCase("", "", outer=40, inner=256, experts=4, chosen=2, encoding=encoding)
    problem = problem_of(replace(case, dtype="float32"))
    w = problem.w if encoding is None else dequantise(problem.w.reshape(160, -1), encoding).reshape(4, 40, 256)
    chosen = problem.experts(0)[0]
    right = np.einsum("tk,enk->ten", problem.x.astype(np.float64), w[chosen].astype(np.float64))
    assert problem.error(right) < 1e-6
    assert problem.error(right[:, ::-1]) > problem.tolerance
    assert sorted(chosen.tolist() + problem.experts(1)[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_random_blocks_mean_what_they_are_said_to(encoding):
    blocks, values = random_blocks(encoding, np.random.default_rng(0), 3, 512)
    assert blocks.shape == (3, 2 * BYTES_OF_256[encoding])
    np.testing.assert_array_equal(values, dequantise(blocks, encoding))


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


def test_the_profile_of_a_step(monkeypatch):
    harness.libraries()
    ours = make_ours(case := StepCase("", "", batch=2, context=32, dtype="float32", **TINY_STEP))
    ours.prepare(problem_of(case), 1)
    lines = ours.profile(5)
    assert lines[0].startswith("steps of one token a request: 5, ")
    assert any(line.startswith("  attention                  2 ") for line in lines)
    ours.run(0)
    monkeypatch.setattr(ours._model, "_program", None)
    with pytest.raises(ContractError, match="compiled by MAX"):
        ours.profile(5)
    assert make_ours(small()).profile(5) == []


def test_the_reference_of_a_mixture_is_what_transformers_computes():
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    case = StepCase("", "", batch=2, tokens=6, context=0, dtype="float32", experts=8, chosen=3, **TINY_STEP)
    problem = problem_of(case)
    own = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": case.intermediate}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**llama_config(case), **own, norm_topk_prob=True)).eval()
    weights = {name: torch.from_numpy(array) for name, array in problem.weights.items()}
    for layer in range(case.layers):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (weights.pop(f"{at}.{name}_proj.weight") for name in ("gate", "up", "down"))
        weights |= {f"{at}.gate_up_proj": torch.cat([gate, up], 1), f"{at}.down_proj": down}
    model.load_state_dict(weights)
    with torch.inference_mode():
        logits = model(torch.from_numpy(problem.tokens.astype(np.int64))).logits[:, -1].numpy()
    assert problem.error(logits) < 1e-5
    assert case.parameters == sum(array.size for array in problem.weights.values() if array.ndim > 1)
    assert case.bytes < 4 * case.parameters


@pytest.mark.parametrize(
    ("key", "case"),
    [
        ("torch", small(lengths=(64, 64))),
        ("torch", small(lengths=(33,), new_tokens=33)),
        ("torch", small(lengths=(33,), new_tokens=5)),
        ("gather", small(lengths=(64, 64))),
        ("torch-linear", LinearCase("", "", rows=2, outer=30, inner=16)),
        ("ours-flat", CASCADE),
        ("ours-bf16", small(kv_dtype="float8_e4m3fn")),
    ],
    ids=["torch", "prefill", "chunk", "gather", "linear", "a cascade flat", "float8 as bfloat16"],
)
def test_peers_are_right_on_every_copy(key, case):
    if key.startswith("ours"):
        harness.libraries()
    problem, peer = problem_of(case), make_peer(key)
    assert peer.available(case) is None
    peer.prepare(problem, 3)
    for i in range(4):
        peer.run(i)
        assert peer.error(problem) <= problem.tolerance


@pytest.mark.parametrize(
    "case",
    [
        small(),
        small(layout="HND"),
        small(layout="MAX", page_size=5),
        small(page_size=1, new_tokens=4),
        small(kv_dtype="float8_e4m3fn"),
        AppendCase("", "", batch=3, tokens=5, context=6, kv_heads=2, head_dim=8, page_size=4),
        *(
            PrefillCase("", "", lengths=lengths, new_tokens=new, layout=layout, heads=4, kv_heads=2, head_dim=32)
            for layout in ("NHD", "HND")
            for lengths, new in (((33,), 33), ((40, 21), 5))
        ),
        CASCADE,
        LatentCase("", "", batch=3, length=32, heads=4),
    ],
    ids=[
        *("NHD", "HND", "MAX", "rows", "float8", "append"),
        *("prefill", "chunk", "prefill HND", "chunk HND", "cascade", "MLA"),
    ],
)
def test_ours_is_right_on_every_copy(case):
    harness.libraries()
    problem = problem_of(case)
    system = make_ours(case)
    system.prepare(problem, 3)
    assert system.memory.flags.c_contiguous
    for i in range(4):
        system.run(i)
        assert problem.error(system.output()) <= problem.tolerance


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
    assert reason(-11, "") == "crashed: SIGSEGV"
    assert reason(1, "Traceback\n  ...\nValueError: no\n\n") == "failed: ValueError: no"
    assert reason(3, "") == "exit status 3"


@pytest.mark.slow
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
