"""Generated hostile checkpoints: files whose JSON was changed are opened, or a `CheckpointError` of one line.

    pytest tests/hostile/test_hostile_files.py --hostile-seed 7 --hostile-cases 25000

There is one for every ten of `--hostile-cases`; the name of a case that fails has its seed and number.
"""

import copy
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.sampling import OF_MODEL
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import CheckpointError
from paged_kv.graphs import models
from paged_kv.serve.chat import ChatFormat

CASES_A_FILE = 10
ODD: list[Any] = [
    "", "x", "\ud800", "a\nb\x1b[31m", "\0", "../x", "x" * 5000, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0,
    1e308, float("nan"), float("inf"), float("-inf"), True, False, None, [], {}, [[]], [["x"]], ["x"], [1], [None],
    [1.5, "x"], [0] * 300, [[[[[[]]]]]], {"a": {"b": []}}, {"x": 1}, {"": ""}, {"content": 5}, {"type": "x"},
]  # fmt: skip
DEEP, LONG = "[" * 3000 + "]" * 3000, "9" * 5000
NAMES = ["", "\ud800", "x" * 3000, "\n"]
GENERATION = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
TEMPLATES = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
PACKING = {
    "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "format": "pack-quantized", "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "weight_config": {},
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}},
}  # fmt: skip
METHODS = ["gptq", "awq", "fp8", "compressed-tensors", "modelopt", "bitsandbytes", "hqq"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed = metafunc.config.getoption("--hostile-seed")
    count = -(-metafunc.config.getoption("--hostile-cases") // CASES_A_FILE)
    batches = [(seed, first, min(first + 250, count)) for first in range(0, count, 250)]
    metafunc.parametrize("cases", batches, ids=lambda batch: f"seed {batch[0]}, {batch[1]} to {batch[2]}")


def test_files_of_a_model_are_opened_or_refused_by_name(cases: tuple[int, int, int], tmp_path: Path) -> None:
    seed, first, last = cases
    refused, wrong = 0, []
    for number in range(first, last):
        rng = random.Random(f"{seed} {number}")
        folder = tmp_path / str(number)
        name = write(folder, rng)
        try:
            opened(folder)
        except CheckpointError as error:
            refused += 1
            if not str(error).isprintable() or len(str(error)) > 1000 or str(folder) not in str(error):
                wrong.append(f"case {seed} {number}, {name}: {str(error)[:200]!r}")
        except Exception as error:
            wrong.append(f"case {seed} {number}, {name}: {type(error).__name__}: {str(error)[:200]}")
        shutil.rmtree(folder)
    assert not wrong, "\n".join(["", *wrong])
    if last - first >= 100:
        assert (last - first) / 5 < refused < last - first


def opened(folder: Path) -> None:
    source = open_source(folder)
    source.sampling(OF_MODEL)
    ChatFormat.read(source, Tokenizer(source, source.config))


def write(folder: Path, rng: random.Random) -> str:
    """Writes a checkpoint with one file that was changed, and returns its name."""
    folder.mkdir()
    for file in FOLDER.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "model.safetensors").symlink_to(FOLDER / "model.safetensors")
    config, tokens, tokenizer = (
        json.loads((FOLDER / name).read_text()) for name in ("config.json", "tokenizer_config.json", "tokenizer.json")
    )
    with (FOLDER / "model.safetensors").open("rb") as opened_weights:
        header = json.loads(opened_weights.read(struct.unpack("<Q", opened_weights.read(8))[0]))
        data = opened_weights.read()
    packed = config | {"quantization_config": PACKING | {"quant_method": rng.choice(METHODS)}}
    other = config | {"architectures": [rng.choice(list(models.FAMILIES))]}
    shards = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(header, "a.safetensors")}
    name, values = rng.choice([
        ("config.json", config), ("config.json", packed), ("config.json", other),
        ("generation_config.json", GENERATION), ("tokenizer_config.json", tokens),
        ("tokenizer_config.json", tokens | {"chat_template": TEMPLATES}),
        ("special_tokens_map.json", {"bos_token": {"content": "x"}, "eos_token": "y"}), ("tokenizer.json", tokenizer),
        ("model.safetensors.index.json", shards), ("model.safetensors", header),
    ])  # fmt: skip
    content = text(changed(values, rng), rng)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "a.safetensors")
    if name == "model.safetensors":
        (folder / name).unlink()
        content = struct.pack("<Q", len(content)) + content + data
    (folder / name).write_bytes(content)
    return name


def changed(values: Any, rng: random.Random) -> Any:
    values = copy.deepcopy(values)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        above, key = rng.choice(places(values) or [([None], 0)])
        kind = rng.random()
        if kind < 0.7:
            above[key] = copy.deepcopy(rng.choice(ODD))
        elif kind < 0.8:
            del above[key]
        elif kind < 0.9 and isinstance(above, dict):
            above[rng.choice(NAMES)] = above.pop(key)
        else:
            above[key] = rng.choice([[above[key]], {"x": above[key]}])
    return copy.deepcopy(rng.choice(ODD)) if rng.random() < 0.03 else values


def places(values: Any) -> list[tuple[Any, Any]]:
    """Every object or list in a value, with each of its keys, six of a list."""
    keys = list(values) if isinstance(values, dict) else range(min(len(values), 6)) if isinstance(values, list) else ()
    return [place for key in keys for place in ((values, key), *places(values[key]))]


def text(values: Any, rng: random.Random) -> bytes:
    written = json.dumps(values)
    if rng.random() < 0.05:
        written = written.replace(rng.choice(['"x"', "null", "true", "1"]), rng.choice([DEEP, LONG, "1e999"]), 1)
    return written[: rng.randrange(len(written) + 1) if rng.random() < 0.02 else None].encode()
