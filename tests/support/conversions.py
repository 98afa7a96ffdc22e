"""Small checkpoints and what llama.cpp's converter made of them (`conversions/`), as folders and GGUF files for tests.

A description has the configuration, the names and shapes of the checkpoint's tensors, and the file's metadata and
tensors. Weights are numbers by which it shows where each came from: those of a checkpoint count upwards by `STEP` over
all of its tensors, in the order of the description. So a tensor of the file is one progression, or a few, or else
numbers that are written down. Tensors whose names differ by numbers alone are described together, as a stack:
`blk.{0,1}.attn_q.weight`. `llama_conversions.py` writes the descriptions.
"""

import itertools
import json
import re
from pathlib import Path

import gguf
import numpy as np

from support.checkpoints import raw_safetensors
from support.gguf_files import finish

FOLDER = Path(__file__).parent / "conversions"
STEP = 4
"""The 1 that the converter adds to some weights shows."""


def expanded(name):
    """The names that a description stands for, in its order."""
    parts = re.split(r"{([\d,]*)}", name)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def values_of(parts):
    """The numbers of progressions, one after another: of each the first number, then counts and steps, the slowest
    first.
    """
    found = []
    for first, *steps in parts:
        values = np.array([first], np.float64)
        for count, step in steps:
            values = (values[:, None] + step * np.arange(count)).reshape(-1)
        found.append(values)
    return np.concatenate(found).astype(np.float32)


def checkpoint_weights(shapes):
    """The tensors of a checkpoint of these shapes by their described names."""
    at, found = 0, {}
    for described, shape in shapes.items():
        for name in expanded(described):
            count = int(np.prod(shape))
            found[name] = (np.arange(at, at + count, dtype=np.float32) * STEP).reshape(shape)
            if name.endswith("A_log"):  # the converter writes -exp of it
                found[name] = np.arange(1, count + 1, dtype=np.float32) / -8
            at += count
    assert at * STEP < 2**24  # float32 has them all
    return found


def write_checkpoint(folder, config, shapes):
    """The checkpoint that is converted: config.json and weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = checkpoint_weights(shapes)
    raw = {name: ("F32", values.shape, values.tobytes()) for name, values in weights.items()}
    (folder / "model.safetensors").write_bytes(raw_safetensors(raw))
    return folder


def write_converted(file, metadata, tensors):
    """The file that the converter made of it, without a vocabulary."""
    writer = gguf.GGUFWriter(file, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind)
    for described, (shape, *parts) in tensors.items():
        names = expanded(described)
        for name, values in zip(names, values_of(parts).reshape(len(names), *shape), strict=True):
            writer.add_tensor(name, np.ascontiguousarray(values))
    finish(writer)
    return file
