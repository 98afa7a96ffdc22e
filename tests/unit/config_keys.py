"""Every key of a family's configuration, changed: what transformers makes of it, and what this package does."""

import copy
import inspect
import re
import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights

from paged_kv.checkpoint.config import config_of
from paged_kv.engine.step import StepGraph
from paged_kv.errors import CheckpointError
from support.checkpoints import CONFIG
from support.families import BASE, CASES, LATENT_CASES

TOKENS = np.random.default_rng(0).integers(0, 256, (1, 40))
NOT_OF_LOGITS = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
LEGACY = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"),
    *("rope_local_base_freq", "sliding_window_pattern"),
)
"""Keys of older files that no class of transformers names any more."""
WORDS = (
    *("silu", "gelu", "gelu_pytorch_tanh", "relu2", "relu", "sigmoid", "softmax", "rope", "nope", "all", "vision"),
    *("greedy", "group_limited_greedy", "noaux_tc", "full_attention", "sliding_attention", "linear_attention", "conv"),
)
ROPES = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)  # fmt: skip
OF_ROPES = {
    "factor": 2.0, "partial_rotary_factor": 0.5, "attention_factor": 1.7, "mscale": 0.7, "mscale_all_dim": 0.5,
    "beta_fast": 4.0, "beta_slow": 0.1, "truncate": False, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
    "alpha": 8.0, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4, "rope_theta": 123.0,
    "type": "linear",
}  # fmt: skip
"""Keys that a rotation may have, and values to add."""
DROPPED = object()


class Case:
    """A family's tiny configuration as transformers saves it."""

    def __init__(self, name):
        family, overrides = (CASES | LATENT_CASES)[name]
        of_text = "Text" if family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5") else ""
        self.config_class = getattr(transformers, f"{family}{of_text}Config")
        self.model_class = getattr(transformers, f"{family}ForCausalLM")
        values = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        self.values = self.config_class(**(values | tokens | BASE | overrides)).to_dict()
        self.values["architectures"] = [self.model_class.__name__]
        self.geometry = self.geometry_of(self.values)
        self.config = self.config_of(self.values)
        self.read: set[str] = set()
        self.result = self.run(_recording(self.config_of(self.values), self.read))

    def config_of(self, values):
        """Transformers' configuration; None where it refuses it, with errors of many kinds."""
        try:
            return self.config_class.from_dict(copy.deepcopy(values))
        except Exception:
            return None

    def geometry_of(self, values):
        """All that a step is built of: the same geometry is the same graph and the same weights."""
        config = config_of(copy.deepcopy(values), "config.json")
        if config.max_position_embeddings < TOKENS.size:
            raise CheckpointError("the text is longer than the context")
        return replace(StepGraph.of(config, None).geometry, draft_layers=0)

    def normal_geometry(self, config):
        """The same of the configuration as transformers saves it, or the words with which that is refused."""
        try:
            return self.geometry_of(config.to_dict() | {"architectures": self.values["architectures"]})
        except CheckpointError as error:
            return f"refused as transformers saves it: {error}"

    def is_read(self, config):
        """Tell if transformers' model reads something that is different in `config`: else its logits are the same."""
        ours, theirs = vars(self.config), vars(config)
        return any(ours.get(key, DROPPED) != theirs.get(key, DROPPED) for key in self.read)

    def run(self, config):
        """The logits of transformers by weights of names and shapes alone, and the shapes; None: no model."""
        try:
            with no_init_weights(), torch.no_grad():
                model = self.model_class(config).eval()
                tensors = model.state_dict()
                for name, tensor in tensors.items():
                    tensor.copy_(_weight(name, tuple(tensor.shape)))
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                return model(torch.from_numpy(TOKENS), use_cache=False).logits.numpy(), shapes
        except Exception:  # of many kinds, where sizes do not fit each other
            return None

    def keys(self):
        """The keys that transformers' class has, those that its model asks for, and those of older files."""
        source = inspect.getsource(inspect.getmodule(self.model_class))
        asked = re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)
        of_all = set(transformers.PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
        known = {*self.values, *self.config_class.attribute_map, *asked, *LEGACY}
        return sorted(key for key in known - of_all - NOT_OF_LOGITS if not key.endswith("_token_id"))

    def changes(self):
        """Each key in dotted form, and the configurations in which it is changed."""
        for key in self.keys():
            for shown, value in _changes(key, self.values.get(key)):
                changed = copy.deepcopy(self.values)
                if value is DROPPED:
                    changed.pop(key, None)
                else:
                    changed[key] = value
                if changed != self.values:
                    yield shown, changed


def _recording(config, read):
    """The configuration, which adds the name of each attribute that is read to `read`."""

    class Recording(type(config)):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    config.__class__ = Recording
    return config


@cache
def _weight(name, shape):
    """As `make_checkpoint` has them: every weight matters, and states last."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode()))
    noise = torch.randn(shape, generator=generator)
    if len(shape) != 1:
        return noise / shape[-1] ** 0.5
    return (0.3 * noise if "e_score" in name else 1 + 0.3 * noise) - (4 if name.endswith("A_log") else 0)


def _changes(key, value):
    """The values that a key may become: with its name, and those of keys inside."""
    if value is not None:
        yield f"{key}, dropped", DROPPED
        yield f"{key}, null", None
    if key in ("rope_parameters", "rope_scaling"):
        for rope in ROPES:
            yield f"{key} = {rope}", rope
            yield f"{key} = {rope} and theta", rope | {"rope_theta": 500.0}
    if not isinstance(value, dict):
        yield from ((key, changed) for changed in _values(value))
        return
    more = OF_ROPES if "rope_type" in value or "type" in value else {}
    for inner in sorted({*value, *more}):
        changes = [] if inner not in more or more[inner] == value.get(inner) else [(inner, more[inner])]
        for shown, changed in [*changes, *_changes(inner, value.get(inner))]:
            rest = {name: each for name, each in value.items() if name != inner}
            yield f"{key}.{shown}", rest if changed is DROPPED else rest | {inner: changed}


def _values(value):
    """Other values of the same type, and of any where there is none."""
    if value is None:
        return [True, False, 1, 2, 8, 0.5, [0], [1, 0]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, value // 2, 0, 1]
    if isinstance(value, float):
        return [value * 1.5, value * 0.5, 0.0, 1.0]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if isinstance(value, list):
        turned = [value[::-1], value[:1] * len(value), value[-1:] * len(value), []]
        numbers = all(isinstance(each, int | float) for each in value)
        return [*turned, [each * 2 + (each == 0) for each in value]] if numbers else turned
    return []
