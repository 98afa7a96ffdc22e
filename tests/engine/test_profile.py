"""The times of a step: each call is in the table, by operation and by layer; without a profile none is noted."""

import re

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.cli import _run
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.model import DecoderModel
from paged_kv.errors import ContractError
from paged_kv.runtime.step_profile import FIRST, LAST

PAGES = [[0], [1]]
EMBEDDING = "model.embed_tokens.weight"
LAST_ROWS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""The products of the last layer that have the last row of each request alone."""


@pytest.fixture
def model():
    return DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=4, page_size=16)


def test_every_call_is_noted(model):
    model.step([[1, 2, 3], [4]], [0, 0], PAGES)
    decode, other = model.profile_steps()
    model.step([[1, 2, 3], [4]], [0, 0], PAGES)
    for position in (3, 4, 5):
        model.step([[5], [6]], [position, position - 2], PAGES)
    assert (decode.runs, other.runs) == (3, 1)
    layers = model.config.num_hidden_layers
    for profile in (decode, other):
        assert (np.diff(profile.begins) >= 0).all()
        assert 0 < profile.kernel_ns <= profile.run_ns
        operations, by_layer = profile.by_operation(), profile.by_layer()
        for parts in (operations, by_layer):
            assert sum(part.calls for part in parts) == len(profile.begins) - 1
            assert sum(part.ns for part in parts) == profile.kernel_ns
        calls = {part.name: part.calls for part in operations}
        assert (calls["attention"], calls["append"]) == (layers, layers)
        assert [part.name for part in by_layer] == [FIRST, *(f"layer {n}" for n in range(layers)), LAST]
    read = {part.name: part.weight_bytes for part in decode.by_operation()}
    sizes = {name: weight.nbytes for name, weight in model.weights.items() if "norm" not in name}
    if "lm_head.weight" in sizes:
        del sizes[EMBEDDING]
    assert read["linear"] == sum(sizes.values())
    assert read["attention"] == 0
    of_last = [f"model.layers.{layers - 1}.{name}.weight" for name in LAST_ROWS]
    of_last = sum(sizes[name] for name in (*of_last, "lm_head.weight" if "lm_head.weight" in sizes else EMBEDDING))
    for profile, rows in ((decode, 3 * 2), (other, 4)):
        computed = {part.name: part.flops for part in profile.by_operation()}
        assert computed["linear"] == (rows * (read["linear"] - of_last) + 2 * profile.runs * of_last) // 2  # float32
        assert computed["attention"] == 0


def test_a_step_without_a_profile_notes_no_time(model):
    decode, _ = model.profile_steps()
    model.step([[1]], [0], [[0]])
    noted = decode.begins.copy()
    model.end_profile()
    model.step([[2]], [1], [[0]])
    np.testing.assert_array_equal(decode.begins, noted)
    assert decode.runs == 1


def test_steps_of_max_are_refused(model, monkeypatch):
    monkeypatch.setattr(model, "_program", None)
    with pytest.raises(ContractError, match="compiled by MAX"):
        model.profile_steps()


def test_the_command_prints_both_kinds_of_step(capsys):
    command = ["generate", "--model", str(FOLDER), "--prompt", "In the", "--max-new-tokens", "9", "--profile"]
    assert _run(command) == 0
    stderr = capsys.readouterr().err
    assert re.search(r"^steps of one token a request: 8, \d+\.\d{3} ms each$", stderr, re.MULTILINE)
    assert re.search(r"^other steps: 1, ", stderr, re.MULTILINE)
    shares = re.findall(r"^  (\w+(?: \w+)*) +\d* +\d+\.\d{3} +(\d+\.\d) %", stderr, re.MULTILINE)
    assert {"linear", "attention", "rms_norm", "no kernel", "layer 0", FIRST, LAST} <= {name for name, _ in shares}
    assert re.search(r"^  linear .* GB/s, \d+\.\d\d of a copy; \d+\.\d GFLOP/s$", stderr, re.MULTILINE)
    outside = re.search(r"^outside of steps \(plans, sampling, text\): (.*) s of (.*) s$", stderr, re.MULTILINE)
    assert 0 < float(outside[1]) < float(outside[2])


def test_a_profile_of_drafts_is_refused(capsys):
    command = ["generate", "--model", str(FOLDER), "--prompt", "x", "--speculate", "lookup", "--profile"]
    assert _run(command) == 2
    assert "--profile is not for --speculate" in capsys.readouterr().err
