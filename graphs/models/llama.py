"""The Llama family: its configuration, its weights, and its step as a MAX graph; one graph prefills and decodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorValue, Weight, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.inputs import graph_inputs, input_types
from paged_kv.graphs.layers import AttentionWeights, Rotary, StepRows, paged_attention
from paged_kv.graphs.ops import PagedCache, kernels

STEP = "llama_step"

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than the trained one.

    `linear` uses `factor` alone. The other three fields belong to `llama3`.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama model, and what generation needs to know of it."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    """Its name in `config.json`, and in the registry of families."""
    model_type: ClassVar[str] = "llama"

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None

    def inverse_frequencies(self) -> npt.NDArray[np.float32]:
        """The rotary frequency of each pair of dimensions, `[head_dim / 2]` float32, scaling included.

        Follows transformers' float32 steps: nearly all frequencies are bit-equal to its own, the rest one rounding off.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        # The power is rounded once, from float64: NumPy's float32 power is less exact than torch's.
        powers = np.power(np.float64(np.float32(self.rope_theta)), exponents.astype(np.float64)).astype(np.float32)
        frequencies = np.float32(1) / powers
        scaling = self.rope_scaling
        factor = np.float32(scaling.factor)
        if scaling.rope_type == "default":
            return frequencies
        if scaling.rope_type == "linear":
            return frequencies / factor

        # Llama 3: long waves are stretched, short ones kept, and those between are blended.
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        context = scaling.original_max_position_embeddings
        wavelengths = np.float32(2 * math.pi) * (1 / frequencies)  # torch divides a scalar by an array in two steps
        blend = (np.float32(context) * (1 / wavelengths) - np.float32(low)) / np.float32(high - low)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
        is_long = wavelengths > np.float32(context / low)
        is_short = wavelengths < np.float32(context / high)
        return np.where(is_long, frequencies / factor, np.where(is_short, frequencies, blended))


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and shape of every weight of the model; linear layers are `[out, in]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def cache_shape(config: LlamaConfig, pages: int | str, page_size: int) -> list[int | str]:
    """`[pages, 2, layers, page_size, Hk, D]`: one buffer for the K and V of every layer."""
    return [pages, 2, config.num_hidden_layers, page_size, config.num_key_value_heads, config.head_dim]


def build_step(
    config: LlamaConfig, dtype: DType, page_size: int, module: Module, device: DeviceRef | None = None
) -> None:
    """Adds the graph `STEP` to `module`: `DecodeInputs` -> logits `[B, vocab]` float32 after each request's last token.

    Batch, tokens and lengths are symbolic. Weights keep their checkpoint names and are bound when the model is
    initialised, from the host's memory. All inputs and the logits lie on `device`, the CPU where it is None; on a GPU
    the linear layers are MAX's matmul.
    """
    device = device or DeviceRef.CPU()
    shapes = expected_tensors(config)
    types = input_types(dtype, cache_shape(config, "pages", page_size), device)
    with Graph(STEP, input_types=types.flatten(), custom_extensions=[kernels()], module=module) as graph:
        weights = {
            # The loader aligns to the dtype; MAX's default alignment is larger.
            name: graph.add_weight(Weight(name, dtype, shape, device, align=dtype.size_in_bytes))
            for name, shape in shapes.items()
        }

        def weight(name: str) -> TensorValue:
            return weights[f"{name}.weight"]

        def norm(name: str, x: TensorValue) -> TensorValue:
            return rms_norm(x, weight(name), config.rms_norm_eps)

        step = graph_inputs(graph.inputs)
        cache = PagedCache.of(step.blocks, step.lookup_table)
        rows = StepRows.of(step.row_offsets, step.cache_lengths, step.tokens)
        rotary = Rotary.of(rows.positions, config.inverse_frequencies())
        last = ops.cast(step.row_offsets[1:], DType.int64) - 1  # [B]: the last row of each request
        last = last.rebind(step.cache_lengths.shape)

        x = ops.gather(weight("model.embed_tokens"), step.tokens, axis=0)  # [T, hidden]
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            # Of the last layer only these rows reach the logits: of the others it has K and V alone.
            wanted = last if layer + 1 == config.num_hidden_layers else None
            attention = AttentionWeights(*(weight(f"{at}.self_attn.{name}_proj") for name in "qkvo"))
            h = norm(f"{at}.input_layernorm", x)
            o = paged_attention(h, cache, rows, rotary, layer, attention, head_dim=config.head_dim, wanted=wanted)
            x = o + (x if wanted is None else ops.gather(x, wanted, axis=0))
            h = norm(f"{at}.post_attention_layernorm", x)
            gate, up = paged.linear_group(h, [weight(f"{at}.mlp.{name}_proj") for name in ("gate", "up")])
            x = x + paged.linear(ops.silu(gate) * up, weight(f"{at}.mlp.down_proj"))

        head = weight("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        graph.output(ops.cast(paged.linear(norm("model.norm", x), head), DType.float32))  # [B, vocab]


def rms_norm(x: TensorValue, weight: TensorValue, eps: float) -> TensorValue:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in float32 and rounded once before the weight."""
    wide = ops.cast(x, DType.float32)
    scale = ops.rsqrt(ops.mean(wide * wide, axis=-1) + eps)
    return weight * ops.cast(wide * scale, x.dtype)
