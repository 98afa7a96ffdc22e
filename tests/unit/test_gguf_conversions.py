"""A file of every family as llama.cpp's converter writes it is the checkpoint that it was made of."""

import dataclasses
import json

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.checkpoint.gguf_families import GGUF_FAMILIES
from paged_kv.checkpoint.source import open_source
from support.conversions import FOLDER, write_checkpoint, write_converted

CONVERSIONS = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
OF_LAYOUT = {"experts.separate_gate_up", "recurrence.tiled", "fused_gate_up", "mlp", "draft_layers"}
"""Entries that say in which tensors weights lie: in a file, gate and up of experts and of Granite 4's shared ones are
apart, Qwen3.5's value heads in another order, and layers that draft tokens after the others."""
NOT_IN_FILES = {"recurrence.dt_range"}
"""Nemotron-H's least time step, which llama.cpp does not know."""


def opened(tmp_path, name):
    """The checkpoint and the file of a description."""
    parts = CONVERSIONS[name]
    file = write_converted(tmp_path / "model.gguf", parts["metadata"], parts["tensors"])
    return write_checkpoint(tmp_path / "checkpoint", parts["config"], parts["weights"]), file


def flat(value, name=""):
    """The entries of a configuration; numbers as a file holds them."""
    if isinstance(value, dict):
        return {key: each for part in value for key, each in flat(value[part], f"{name}.{part}".lstrip(".")).items()}
    if isinstance(value, tuple):
        return {key: each for at, part in enumerate(value) for key, each in flat(part, f"{name}[{at}]").items()}
    return {name: float(np.float32(value)) if isinstance(value, float) else value}


def weights(source):
    """By names, as float32; gate and up are one, as most checkpoints have those of experts."""
    at = f".{source.config.mlp}."
    found = {name.replace(at, ".mlp."): array for name, array in source.load(DType.float32).items()}
    for name in [name for name in found if ".gate_proj." in name]:
        parts = [found.pop(name), found.pop(name.replace(".gate_proj.", ".up_proj."))]
        found[name.replace(".gate_proj.", ".gate_up_proj.")] = np.concatenate(parts, int(".experts." in name))
    return found


def in_file(name, values, config):
    """A weight in the order of a file's rows, where the step takes it so."""
    unrotated = not any(config.rotates or (True,))
    if unrotated and config.mlp_or_mixer and name.endswith((".q_proj.weight", ".k_proj.weight")):
        # Nemotron-H's q and k as if they were rotated by neighbours: their products are the same.
        return values.reshape(-1, 2, config.head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return in_tiles(name, values, config.recurrence) if config.recurrence and config.recurrence.tiled else values


def in_tiles(name, values, recurrence):
    """A weight of Gated DeltaNet with its value heads as a file has them: the first of each key head, and so on."""
    part, keys = name.rpartition(".linear_attn.")[2], recurrence.key_heads * recurrence.key_dim
    kind, axis = part.removesuffix(".weight"), int(part == "out_proj.weight")
    if part == name or kind == "norm":
        return values
    first = 2 * keys if kind in ("in_proj_qkv", "conv1d") else 0
    kept, moved = np.split(values, [first], axis)
    each = moved.shape[axis] // recurrence.heads
    order = np.arange(recurrence.heads).reshape(recurrence.key_heads, -1).T.reshape(-1)
    places = (order[:, None] * each + np.arange(each)).reshape(-1)
    return np.concatenate([kept, moved.take(places, axis)], axis)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_file_is_its_checkpoint(tmp_path, name):
    checkpoint, file = map(open_source, opened(tmp_path, name))
    config, converted = (flat(dataclasses.asdict(source.config)) for source in (checkpoint, file))
    differ = {key for key in config.keys() | converted.keys() if config.get(key) != converted.get(key)}
    assert {key.partition("[")[0] for key in differ} <= OF_LAYOUT | NOT_IN_FILES
    expected, found = weights(checkpoint), weights(file)
    assert found.keys() == expected.keys()
    for of, values in expected.items():
        values = in_file(of, values, file.config)
        error = 1e-6 if of.endswith("A_log") else 0
        np.testing.assert_allclose(found[of].reshape(values.shape), values, rtol=error, err_msg=of)


def test_every_architecture_is_converted():
    assert {CONVERSIONS[name]["metadata"]["general.architecture"] for name in CONVERSIONS} == GGUF_FAMILIES.keys()
