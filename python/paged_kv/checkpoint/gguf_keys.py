"""The table of GGUF's metadata keys: the effect of each on a model of an architecture that this package opens.

A key of the architecture's own prefix (`llama.` and so on) is in one of four rows:

- used: `USED`, and what the family adds (`gguf_families.py`);
- without effect on the logits: `WITHOUT_EFFECT`;
- without effect at some values, refused at others: `NEUTRAL`, and values that another key has;
- refused: every other one, known to llama.cpp or not.

The keys are those of llama.cpp's `LLM_KV_NAMES`; what they do is what its loader of the architecture does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.gguf_header import GgufHeader, Strings
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.fields import MAX_SIZE

USED = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
"""Keys that every family uses."""

WINDOWS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
"""Keys that families with windows use."""

WITHOUT_EFFECT = frozenset({
    # Of norms that the family, or all families here, have not.
    "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    # Of embeddings and classifiers; their tensors are refused.
    "classifier.output_labels", "classifier.pooling_type", "pooling_type",
    # Of images: text adds zeros there.
    "deepstack_mapping", "n_deepstack_layers",
    # Whether the model was trained with its scaling; Granite has another use for it.
    "rope.scaling.finetuned",
})  # fmt: skip

OF_WINDOWED_LAYERS = frozenset({
    "attention.key_length_swa", "attention.sliding_window_pattern", "attention.value_length_swa",
    "rope.dimension_count_swa", "rope.freq_base_swa",
})  # fmt: skip
"""Keys without effect where no layer has a window."""

_NONE = (0,)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": _NONE,
    "attention.max_alibi_bias": _NONE,
    "attention.output_scale": _NONE,
    "attention.recurrent_layers": _NONE,
    "attention.rope_pattern": (1,),
    "attention.shared_kv_layers": _NONE,
    "attention.sliding_window": _NONE,
    "attention.temperature_length": _NONE,
    "attention.temperature_scale": _NONE,
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": _NONE,
    "embedding_scale": (0, 1),
    "expert_chunk_feed_forward_length": _NONE,
    "expert_count": _NONE,
    "expert_feed_forward_length": _NONE,
    # A softmax over all experts whose chosen weights are divided by their sum is one over the chosen ones (3).
    "expert_gating_func": (0, 1, 3),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": _NONE,
    "expert_shared_feed_forward_length": _NONE,
    "expert_used_count": _NONE,
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": _NONE,
    "full_attention_interval": _NONE,
    "interleave_moe_layer_step": _NONE,
    "leading_dense_block_count": _NONE,
    "logit_scale": (0, 1),
    "moe_every_n_layers": _NONE,
    "nextn_predict_layers": _NONE,
    "residual_scale": (0, 1),
    "rope.dimension_sections": _NONE,
    "rope.scaling.alpha": _NONE,
    # -1 is not set; 1 is YaRN's own.
    "rope.scaling.yarn_ext_factor": (-1, 1),
    # llama.cpp reads it for other architectures alone, Mistral's own code for its models: they would differ.
    "rope.scaling.yarn_log_multiplier": _NONE,
    "router_logit_softcapping": _NONE,
    "swiglu_clamp_exp": _NONE,
    "swiglu_clamp_shexp": _NONE,
    "use_parallel_residual": (False,),
}
"""Values without effect; of an array, of all its elements."""

GENERAL: Mapping[str, tuple[Any, ...]] = {"general.type": ("model",), "general.quantization_version": (2,)}
"""The same for keys of all architectures. Others of `general.` describe the model, or are read with the header."""

FOREIGN = ("adapter.", "xielu.")
"""Prefixes of keys that change a model of any architecture."""


class Metadata:
    """The metadata of one architecture, by names without its prefix. Only keys that are in use can be read."""

    def __init__(self, header: GgufHeader, prefix: str, uses: Collection[str]) -> None:
        self.header = header
        self.prefix = prefix
        self._uses = frozenset(uses) | USED

    def error(self, name: str, problem: str) -> CheckpointError:
        return self._error(f"{self.prefix}.{name}", problem)

    def get(self, name: str) -> Any:
        """The value as it is in the file, None where there is none."""
        assert name in self._uses, name
        return self.header.metadata.get(f"{self.prefix}.{name}")

    def scalar(self, name: str) -> Any:
        """A number or a string; of an array with a number for each layer, the one that all of them have."""
        value = self.get(name)
        if isinstance(value, Strings):
            raise self.error(name, "expected one value")
        if not isinstance(value, np.ndarray):
            return value
        if value.size == 0 or not np.all(value == value[0]):
            raise self.error(name, "expected the same for all layers")
        layers = self.header.metadata.get(f"{self.prefix}.block_count")
        if not isinstance(layers, int) or value.size != layers:
            raise self.error(name, "expected as many numbers as layers")
        return value[0].item()

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer from `least` to `most`; `default` where there is none."""
        value = self.scalar(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
            kind = "a positive integer below 2^31" if least else "an integer from 0 to 2^31 - 1"
            raise self.error(name, f"expected {kind}")
        if value > most:
            raise self.error(name, f"expected at most {most}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number; `default` where there is none."""
        value = self.scalar(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, "expected a finite number")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false, which it is where there is none."""
        value = self.scalar(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "expected true or false")
        return bool(value)

    def check(self, same: Mapping[str, tuple[Any, ...]], *, without_effect: Collection[str] = ()) -> None:
        """Refuses every key whose value would change the results, unless it is in use.

        Args:
            same: Values without effect in this file; they come before the rows of the table.
            without_effect: Keys without effect in this file.

        Raises:
            CheckpointError: there is such a key; the message names it and its value.
        """
        for key, value in self.header.metadata.items():
            name = key.removeprefix(f"{self.prefix}.")
            if key in GENERAL:
                values = GENERAL[key]
            elif name in without_effect:
                continue
            elif name in same:
                values = same[name]
            elif key.startswith(FOREIGN):
                raise self._error(key, f"not supported for {self.prefix}")
            elif name == key or name in self._uses or name in WITHOUT_EFFECT:
                continue
            elif name in NEUTRAL:
                values = NEUTRAL[name]
            else:
                raise self._error(key, f"unknown key of {self.prefix}, which may change the results")
            if not _all_in(value, values):
                expected = " or ".join(dict.fromkeys(map(shown, values)))
                raise self._error(key, f"expected {expected} for {self.prefix}")

    def _error(self, key: str, problem: str) -> CheckpointError:
        value = self.header.metadata.get(key)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        return CheckpointError(f"{self.header.file}: {printable(key)}: {problem}, got {shown(value)}")


def _all_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value, or each of an array, is one of `values`, to the digits of float32."""
    if isinstance(value, Strings):
        return False
    entries = value.tolist() if isinstance(value, np.ndarray) else [value]
    return all(any(_same(entry, other) for other in values) for entry in entries)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return math.isclose(one, other, rel_tol=1e-6)
