"""A Llama decode step as a MAX graph; one graph prefills and decodes."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorValue, Weight, ops

from paged_kv.engine.config import LlamaConfig, expected_tensors
from paged_kv.graphs import ops as paged
from paged_kv.graphs.inputs import graph_inputs, input_types
from paged_kv.graphs.layers import Projection, Rotary, Rows, paged_attention
from paged_kv.graphs.ops import PagedCache, kernels

STEP = "llama_step"


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
            # The loader aligns to the dtype; MAX's default would ask for more.
            name: graph.add_weight(Weight(name, dtype, shape, device, align=dtype.size_in_bytes))
            for name, shape in shapes.items()
        }

        def linear(name: str) -> Projection:
            return lambda x: paged.linear(x, weights[f"{name}.weight"])

        def norm(name: str, x: TensorValue) -> TensorValue:
            return rms_norm(x, weights[f"{name}.weight"], config.rms_norm_eps)

        step = graph_inputs(graph.inputs)
        cache = PagedCache.of(step.blocks, step.lookup_table)
        rows = Rows.of(step.row_offsets, step.cache_lengths, step.tokens)
        rotary = Rotary.of(rows.positions, config.inverse_frequencies())

        x = ops.gather(weights["model.embed_tokens.weight"], step.tokens, axis=0)  # [T, hidden]
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            x = x + paged_attention(
                norm(f"{at}.input_layernorm", x),
                cache,
                rows,
                rotary,
                layer,
                q_proj=linear(f"{at}.self_attn.q_proj"),
                k_proj=linear(f"{at}.self_attn.k_proj"),
                v_proj=linear(f"{at}.self_attn.v_proj"),
                o_proj=linear(f"{at}.self_attn.o_proj"),
                head_dim=config.head_dim,
            )
            h = norm(f"{at}.post_attention_layernorm", x)
            gate = ops.silu(linear(f"{at}.mlp.gate_proj")(h))
            x = x + linear(f"{at}.mlp.down_proj")(gate * linear(f"{at}.mlp.up_proj")(h))

        last = ops.cast(step.row_offsets[1:], DType.int64) - 1
        x = norm("model.norm", ops.gather(x, last, axis=0))  # [B, hidden]
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        graph.output(ops.cast(linear(head)(x), DType.float32))


def rms_norm(x: TensorValue, weight: TensorValue, eps: float) -> TensorValue:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in float32 and rounded once before the weight."""
    wide = ops.cast(x, DType.float32)
    scale = ops.rsqrt(ops.mean(wide * wide, axis=-1) + eps)
    return weight * ops.cast(wide * scale, x.dtype)
