"""A record of a run: the same run gives the same bits, and a planted difference is named by position and operation."""

from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.cli import _run
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.run_record import RunRecord, differences, read_record
from paged_kv.engine.sampling import Sampling
from paged_kv.errors import ContractError

PROMPT = list(range(5, 29))
NEW = 4
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def recorded(path, prompts=(PROMPT,), weights=None, **options):
    """The record of a run of the demo model, by way of a file."""
    model = DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=16, page_size=16)
    if weights is not None:
        model = DecoderModel(
            model.config, {**model.weights, **weights}, dtype=DType.float32, num_pages=16, page_size=16
        )
    engine = Engine(model, None, **options)
    engine.record = model.new_record()
    for prompt in prompts:
        engine.add_request(prompt, Sampling(NEW))
        engine.step()
    while not engine.is_idle:
        engine.step()
    with path.open("wb") as file:
        engine.record.write(file)
    return read_record(path)


def test_the_same_run_is_the_same_to_the_bit(tmp_path):
    first, second = (recorded(tmp_path / f"{name}.npz") for name in "ab")
    (difference,) = differences(first, second)
    assert (difference.position, difference.parted, difference.largest) == (None, None, 0)
    assert difference.compared == len(PROMPT) + NEW - 1
    (sample,) = first.samples.values()
    assert [sample.tokens[at] for at in range(len(PROMPT))] == PROMPT
    assert sorted(sample.logits) == list(range(len(PROMPT) - 1, difference.compared))
    for digests in sample.digests.values():  # each operation of tokens has a row at each position
        assert digests[first.names.index("layer 0: attention")] != 0


def test_a_weight_that_differs_is_named(tmp_path):
    model = DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=1, page_size=16)
    changed = model.weights[O_PROJ].copy()
    changed[3, 5] += 0.5
    first, second = recorded(tmp_path / "a.npz"), recorded(tmp_path / "b.npz", weights={O_PROJ: changed})
    (difference,) = differences(first, second)
    assert (difference.position, difference.operation) == (0, "layer 1: linear")
    assert difference.differing == difference.compared
    assert difference.largest > 0


def test_what_no_operation_reads_is_not_compared(tmp_path):
    """The lse of attention: a row that sees itself alone has its V whichever kernel computes it, and any lse."""
    whole, cut = recorded(tmp_path / "a.npz"), recorded(tmp_path / "b.npz", max_step_tokens=2)
    attention = whole.names.index("layer 0: attention")
    first, second = (run.samples[0, 0].digests[0][attention] for run in (whole, cut))
    assert first == second != 0


def test_where_tokens_part_nothing_after_is_compared(tmp_path):
    other = [*PROMPT[:7], PROMPT[7] + 1, *PROMPT[8:]]
    (difference,) = differences(recorded(tmp_path / "a.npz"), recorded(tmp_path / "b.npz", [other]))
    assert (difference.parted, difference.compared) == (7, 7)


def test_other_vocabularies_are_refused(tmp_path):
    one = recorded(tmp_path / "a.npz")
    (key,) = one.samples
    shorter = {at: row[:-1] for at, row in one.samples[key].logits.items()}
    other = replace(one, samples={key: replace(one.samples[key], logits=shorter)})
    with pytest.raises(ContractError, match="other vocabularies"):
        list(differences(one, other))


def test_each_sample_of_a_batch_has_its_own_rows_however_its_prompt_is_cut(tmp_path):
    """Rows of two samples in one step, and of a prompt in several, are those of the sample and its positions."""
    other = [token + 40 for token in PROMPT[:9]]
    together = recorded(tmp_path / "a.npz", [PROMPT, other])
    alone = recorded(tmp_path / "b.npz", [other], max_step_tokens=4)
    mixed = together.samples[1, 0]
    assert mixed.tokens == alone.samples[0, 0].tokens
    embedding = [name.endswith("take_rows") for name in together.names].index(True)
    for at, digests in mixed.digests.items():
        assert digests[embedding] == alone.samples[0, 0].digests[at][embedding]
    np.testing.assert_allclose(mixed.logits[8], alone.samples[0, 0].logits[8], atol=1e-4)


def test_a_prefix_from_the_cache_has_no_rows(tmp_path):
    twice = recorded(tmp_path / "a.npz", [PROMPT, PROMPT])
    assert min(twice.samples[0, 0].tokens) == 0
    assert min(twice.samples[1, 0].tokens) == 16


def test_the_program_gives_what_it_gives_unwatched(monkeypatch):
    model = DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=2, page_size=16)
    expected = model.step([PROMPT[:5]], [0], [[0]])
    seen = []
    record = model.new_record()
    monkeypatch.setattr(model, "_watch", lambda _index, _op, results: seen.append([each.copy() for each in results]))
    np.testing.assert_array_equal(model.step([PROMPT[:5]], [0], [[1]]), expected)
    assert len(seen) == len(record.names)
    assert any(np.array_equal(each, expected) for each in seen[-1])


def test_commands(tmp_path, capsys):
    a, b, other = (str(tmp_path / name) for name in ("a", "b", "other"))
    command = ["generate", "--model", str(FOLDER), "--prompt", "In the beginning", "--max-new-tokens", "3"]
    for path in (a, b):
        assert _run([*command, "--logits", path]) == 0
    assert _run([*command[:-1], "9", "--seed", "7", "--temperature", "3", "--logits", other]) == 0
    capsys.readouterr()
    assert _run(["diff", a, b]) == 0
    assert "positions are the same to the bit" in capsys.readouterr().out
    assert _run(["diff", a, other]) == 1
    assert "tokens part at position" in capsys.readouterr().out
    assert _run([*command, "--logits", str(tmp_path / "missing" / "file")]) == 2
    assert capsys.readouterr() == ("", ANY)  # before anything is computed
    assert _run([*command, "--logits", a, "--profile"]) == 2
    assert "one by one" in capsys.readouterr().err


def test_refusals(tmp_path, monkeypatch):
    model = DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=1, page_size=16)
    record = model.new_record()
    with (tmp_path / "empty.npz").open("wb") as file:
        record.write(file)
    empty = read_record(tmp_path / "empty.npz")
    with pytest.raises(ContractError, match="no sample in common"):
        list(differences(empty, empty))
    (tmp_path / "text").write_text("no record")
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    for name in ("text", "one.npy", "other.npz", "nowhere"):
        with pytest.raises(ContractError, match="no record of a run"):
            read_record(tmp_path / name)
    few = RunRecord(model._program.operations[:3], model._program.inputs, model._program.outputs)
    with (tmp_path / "few.npz").open("wb") as file:
        few.write(file)
    with pytest.raises(ContractError, match="other operations"):
        list(differences(read_record(tmp_path / "few.npz"), empty))
    monkeypatch.setattr(model, "_program", None)
    with pytest.raises(ContractError, match="compiled by MAX"):
        model.new_record()
