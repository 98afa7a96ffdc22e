"""Safetensors in: every dtype bit for bit, nothing copied without need, and every broken checkpoint refused by name."""

import gc
import io
import json

import pytest
import torch
import transformers
from max.dtype import DType
from safetensors.torch import load_file, save_file

from paged_kv.checkpoint import weights
from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.source import open_source
from paged_kv.checkpoint.weights import INDEX_FILE, SINGLE_FILE, open_checkpoint, progress_bar
from paged_kv.graphs.models.tensors import expected_tensors
from support.checkpoints import TORCH, assert_same, bits, make_checkpoint, random_tensors, raw_safetensors, read_config
from support.families import make_case
from support.refusals import refused

NORM = "model.norm.weight"


@pytest.fixture
def tiny(tmp_path):
    """A folder with a config.json, its config, and its tensors in float32, not yet written."""
    config = read_config(tmp_path)
    return tmp_path, config, random_tensors(config)


@pytest.mark.parametrize("target", TORCH)
@pytest.mark.parametrize("source", TORCH.values())
def test_every_dtype_is_converted_as_torch_does(tiny, source, target):
    folder, config, _ = tiny
    tensors = random_tensors(config)
    # Overflow, subnormals, ties, signed zeros, infinities and NaN.
    odd = [7e4, -7e4, 1e-7, 6e-8, 1e-40, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-11, 0.0, -0.0, 3.4e38]
    odd += [float("inf"), -float("inf"), float("nan")]
    tensors[NORM][: len(odd)] = torch.tensor(odd)
    tensors = {name: tensor.to(source) for name, tensor in tensors.items()}
    save_file(tensors, folder / SINGLE_FILE)
    loaded = open_checkpoint(folder).load(config, target)
    assert list(loaded) == list(expected_tensors(config))
    assert {array.dtype.name for array in loaded.values()} == {target.name}
    assert_same(loaded, {name: tensor.to(TORCH[target]) for name, tensor in tensors.items()})


def test_blocks_of_a_conversion_meet_and_dtypes_may_be_mixed(tiny, monkeypatch):
    folder, config, tensors = tiny
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    monkeypatch.setattr(weights, "_BLOCK_BYTES", 1000)  # rows of 192 and 256 bytes: the last block is short
    save_file(tensors, folder / SINGLE_FILE)
    loaded = open_checkpoint(folder).load(config, DType.bfloat16)
    assert_same(loaded, {name: tensor.bfloat16() for name, tensor in tensors.items()})


@pytest.mark.parametrize("padding", [0, 1, 2, 4])
@pytest.mark.parametrize(("dtype", "name"), [(DType.float32, "F32"), (DType.bfloat16, "BF16")])
def test_only_misaligned_tensors_are_copied(tiny, monkeypatch, dtype, name, padding):
    folder, config, tensors = tiny
    tensors = {key: tensor.to(TORCH[dtype]) for key, tensor in tensors.items()}
    raw = {key: (name, tensor.shape, bits(tensor).tobytes()) for key, tensor in tensors.items()}
    (folder / SINGLE_FILE).write_bytes(raw_safetensors(raw, padding))
    copied = []
    copy = weights._copy
    monkeypatch.setattr(weights, "_copy", lambda key, *rest: copied.append(key) or copy(key, *rest))
    loaded = open_checkpoint(folder).load(config, dtype)
    assert_same(loaded, tensors)
    assert len(copied) == (0 if padding % dtype.size_in_bytes == 0 else len(tensors))
    assert all(array.ctypes.data % dtype.align == 0 for array in loaded.values())


@pytest.mark.parametrize("tied", [False, True])
def test_shards_that_transformers_saved(tmp_path, tied):
    model = make_checkpoint(tmp_path, max_shard_size="60KB", tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    config = load_config(tmp_path)
    loaded = open_checkpoint(tmp_path).load(config, DType.float32)
    assert set(loaded) == set(expected_tensors(config))
    state = model.state_dict()
    assert_same(loaded, {name: state[name] for name in loaded})


@pytest.mark.slow
def test_arrays_outlive_the_checkpoint_and_what_older_ones_carry_is_ignored(tiny):
    folder, _, tensors = tiny
    config = read_config(folder, tie_word_embeddings=True)
    older = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | older, folder / SINGLE_FILE)  # lm_head.weight too
    del tensors["lm_head.weight"]
    loaded = open_checkpoint(folder).load(config, DType.float32)
    (folder / SINGLE_FILE).unlink()
    gc.collect()
    assert_same(loaded, tensors)


@pytest.mark.parametrize("changed", [None, "value", "dtype", "shape"])
def test_a_head_beside_tied_embeddings_makes_the_logits_if_it_differs(tiny, monkeypatch, changed):
    """As transformers 5 does it, whatever `tie_word_embeddings` is; heads are compared in blocks of a few rows."""
    folder, _, tensors = tiny
    monkeypatch.setattr(weights, "_BLOCK_BYTES", 1000)
    read_config(folder, tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"].clone()
    if changed == "value":
        head[-1, -1] += 1
    head = head.half() if changed == "dtype" else head[:-1] if changed == "shape" else head
    save_file(tensors | {"lm_head.weight": head}, folder / SINGLE_FILE)
    source = open_source(folder)
    assert source.config.tie_word_embeddings == (changed is None)
    if changed == "shape":
        refused(source.load, DType.float32, match=r"lm_head\.weight: expected shape \[259, 48\], got \[258, 48\]")
    else:
        loaded = source.load(DType.float32)
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert_same(loaded, {name: theirs[name] for name in loaded})


def test_layers_that_draft_are_not_read_where_the_config_names_them(tiny):
    folder, _, tensors = tiny
    after = {
        "model.layers.2.eh_proj.weight": torch.ones(2),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.ones(2),
    }
    save_file(tensors | after, folder / SINGLE_FILE)
    assert_same(open_checkpoint(folder).load(read_config(folder, num_nextn_predict_layers=2), DType.float32), tensors)
    refuse(folder, read_config(folder, num_nextn_predict_layers=1), "model.layers.3.* is no part of the model")


def test_progress_counts_bytes(tiny):
    folder, config, tensors = tiny
    save_file(tensors, folder / SINGLE_FILE)
    seen = []
    open_checkpoint(folder).load(config, DType.bfloat16, lambda done, total: seen.append((done, total)))
    total = sum(2 * tensor.numel() for tensor in tensors.values())
    assert len(seen) == len(tensors)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_progress_bar_is_for_terminals(monkeypatch, capfd, terminal):
    class Stderr(io.StringIO):
        def isatty(self):
            return terminal

    stderr = Stderr()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with progress_bar("loading weights") as progress:
        progress(1, 2)
        progress(2, 2)
    assert ("loading weights" in stderr.getvalue()) if terminal else (stderr.getvalue() == "")
    assert capfd.readouterr() == ("", "")


def refuse(folder, config, message, dtype=DType.float32):
    refused(lambda: open_checkpoint(folder).load(config, dtype), match=message)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12\n",
        b"PK\x03\x04" + bytes(100),
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]" + bytes(9),
        (50).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":4}}' + bytes(4),
        raw_safetensors({"a": ("F32", (2,), bytes(8))}) + b"more",
        raw_safetensors({"a": ("F32", (3,), bytes(8))}),
        raw_safetensors({"a": ("F99", (2,), bytes(8))}),
    ],
)
def test_a_file_that_is_not_safetensors(tiny, content):
    folder, config, _ = tiny
    (folder / SINGLE_FILE).write_bytes(content)
    refuse(folder, config, rf"{SINGLE_FILE}: not a safetensors file: ")


@pytest.mark.parametrize("left", [9, 300, -1])
def test_a_file_cut_short(tiny, left):
    folder, config, tensors = tiny
    save_file(tensors, folder / SINGLE_FILE)
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(content[:left])
    # Of a file that ends inside its header, only the header's end is known.
    whole = len(content) if left == -1 else 8 + int.from_bytes(content[:8], "little")
    found = len(content[:left])
    refuse(folder, config, rf"{SINGLE_FILE}: cut short: expected {whole} bytes, got {found}$")


UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({UP: None}, f"tensor {UP} is missing$"),
        ({UP: torch.zeros(48, 64)}, rf"{SINGLE_FILE}: tensor {UP}: expected shape \[64, 48\], got \[48, 64\]$"),
        ({UP: torch.zeros(64 * 48)}, r"expected shape \[64, 48\], got \[3072\]$"),
        *(
            ({UP: torch.zeros(64, 48).to(dtype)}, f"tensor {UP}: expected dtype F32 or BF16 or F16, got {stored}$")
            for dtype, stored in ((torch.int8, "I8"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3"))
        ),
        ({BIAS: torch.zeros(64)}, f"tensor {BIAS} is no part of the model"),
    ],
    ids=range(7),
)
def test_tensors_that_do_not_fit_the_config(tiny, change, message):
    folder, config, tensors = tiny
    held = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    save_file(held, folder / SINGLE_FILE)
    refuse(folder, config, message)
    refuse(folder, config, "cannot be loaded as int8", DType.int8)


NO_INDEX = (
    *("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../one.safetensors"}}'),
)


@pytest.fixture
def sharded(tiny):
    """Two shards and their index."""
    folder, config, tensors = tiny
    names = list(tensors)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for shard, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    index = {name: shard for shard, held in parts.items() for name in held}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return folder, config, tensors, index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({INDEX_FILE: text}, rf"{INDEX_FILE}: no weight_map") for text in NO_INDEX),
        ({"two.safetensors": None}, rf"{INDEX_FILE}: shard two\.safetensors is missing"),
        ({"two.safetensors": lambda whole: whole[:-100]}, r"two\.safetensors: cut short: expected \d+ bytes, got \d+$"),
        ({"one.safetensors": "two.safetensors"}, r"tensor \S+ is in both one\.safetensors and two\.safetensors$"),
        *(
            ({INDEX_FILE: {name: shard}}, rf"{INDEX_FILE}: tensor {name} is not in {shard}$")
            for name, shard in ((NORM, "one.safetensors"), ("model.other.weight", "two.safetensors"))
        ),
    ],
    ids=range(11),
)
def test_broken_shards_are_refused(sharded, change, message):
    folder, config, tensors, index = sharded
    assert_same(open_checkpoint(folder).load(config, DType.float32), tensors)
    for name, content in change.items():
        file = folder / name
        if content is None:
            file.unlink()
        elif callable(content):
            file.write_bytes(content(file.read_bytes()))
        elif isinstance(content, dict):
            file.write_text(json.dumps({"weight_map": index | content}))
        else:
            file.write_bytes((folder / content).read_bytes() if name != INDEX_FILE else content.encode())
    refuse(folder, config, message)


def test_projections_that_shared_layers_have_and_do_not_use(tmp_path):
    """Gemma 4's own files have K and V of layers that see those of others; transformers writes none."""
    make_case("gemma4", tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    unused = {f"model.layers.3.self_attn.{name}.weight": torch.ones(16, 64) for name in ("k_proj", "v_proj")}
    save_file(tensors | unused, tmp_path / SINGLE_FILE)
    config = load_config(tmp_path)
    assert not open_checkpoint(tmp_path).load(config, DType.float32).keys() & unused.keys()
    save_file(tensors | {name.replace("3", "7"): tensor for name, tensor in unused.items()}, tmp_path / SINGLE_FILE)
    refused(open_checkpoint(tmp_path).load, config, DType.float32, match="layers.7.self_attn.k_proj.weight is no part")
