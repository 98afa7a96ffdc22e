"""The attention of one layer: projections to q, k and v, what a family does to their heads, the cache, the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from max.dtype import DType
from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.layers import Rotary, StepRows
from paged_kv.graphs.models.config import QkNorm, QueryGrowth
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.ops import PagedCache


def attention(
    parameters: Parameters,
    cache: PagedCache,
    rows: StepRows,
    x: TensorValue,
    rotary: Rotary | None,
    layer: int,
    output_rows: TensorValue | None,
) -> TensorValue:
    """The attention of `x` `[T, hidden]` over everything its requests have cached and these tokens themselves.

    Of several devices, it is the part that comes from the device's heads. Keys enter the cache rotated, by positions
    and then as `config.cache_rotation` says. Only `output_rows` `[N]` are computed where it is not None.
    """
    config, at = parameters.config, f"model.layers.{layer}.self_attn"
    heads, head_dim = config.num_attention_heads, config.heads_of(layer)[1]
    q, *kv = _projections(parameters, x, layer, output_rows)
    q_rows, q_rotary, gate = rows, rotary, None
    if output_rows is not None:
        q_rows, q_rotary = rows.of_rows(output_rows), None if rotary is None else rotary.of_rows(output_rows)
    if config.attention_gate:
        q, gate = (paged.take_columns(q, first, head_dim, groups=heads) for first in (0, head_dim))
    if kv:
        k_heads = _Heads(parameters, rotary, head_dim, f"{at}.k_norm")
        k, v = k_heads.of(kv[0]), k_heads.split(kv[-1])
        v = parameters.norm(None, v) if config.v_norm else v
        if cache.kv_format is None:
            k, v = ops.cast(k, cache.dtype), ops.cast(v, cache.dtype)
        paged.append(cache, k, v, rows.batch, rows.positions, layer=config.cache_layer(layer))
    q = _Heads(parameters, q_rotary, head_dim, f"{at}.q_norm").of(q)
    growth = config.layer_growth(layer)
    o = q_rows.attend(
        cache,
        q if growth is None else _grown(q, q_rows.positions, growth),
        layer=config.cache_layer(layer),
        sm_scale=config.sm_scale,
        logits_soft_cap=config.attention_cap,
        window_left=config.window_left(layer),
        sinks=ops.cast(parameters.values[f"{at}.sinks"], DType.float32) if config.sinks else None,
    )
    o = ops.reshape(o, [o.shape[0], heads * head_dim])
    return parameters.linear(o if gate is None else paged.gate_units(gate, o, "sigmoid"), f"{at}.o_proj")[0]


def _projections(
    parameters: Parameters, x: TensorValue, layer: int, output_rows: TensorValue | None
) -> list[TensorValue]:
    """Q of `output_rows`, of all rows where it is None, and all rows of what K and V are made of: of both by
    themselves, of both in one (V is made of K's), or of neither (the layer sees the K and V of another).
    """
    config, at = parameters.config, f"model.layers.{layer}.self_attn"
    if config.fused_qkv:
        kv_heads, head_dim = config.heads_of(layer)
        sizes = [heads * head_dim for heads in (config.num_attention_heads, kv_heads, kv_heads)]
        q, *kv = paged.split_columns(parameters.linear(x, f"{at}.qkv_proj")[0], sizes)
        return [q if output_rows is None else paged.take_rows(q, output_rows), *kv]
    names = [f"{at}.{name}_proj" for name in config.kv_projections(layer)]
    if output_rows is None:
        return parameters.linear(x, f"{at}.q_proj", *names)
    kv = parameters.linear(x, *names) if names else []
    return [parameters.linear(paged.take_rows(x, output_rows), f"{at}.q_proj")[0], *kv]


@dataclass(frozen=True)
class _Heads:
    """The heads of q, or of k, of one layer, which are made of a projection `[T, H * D]` in the steps of its family."""

    parameters: Parameters
    rotary: Rotary | None
    """The rotation of their rows; None in a layer without one."""
    head_dim: int
    norm: str
    """The name of their norm."""

    def of(self, y: TensorValue) -> TensorValue:
        """The heads `[T, H, D]`, as they meet in the scores."""
        config = self.parameters.config
        for step in _STEPS[config.qk_norm]:
            y = step(self, y)
        return y if config.cache_rotation is None else paged.hadamard(y)

    def split(self, y: TensorValue) -> TensorValue:
        return ops.reshape(y, [y.shape[0], int(y.shape[1]) // self.head_dim, self.head_dim])

    def normed(self, y: TensorValue) -> TensorValue:
        return self.parameters.norm(self.norm, y)

    def normed_if_rotated(self, y: TensorValue) -> TensorValue:
        return y if self.rotary is None else self.parameters.norm(None, y)

    def rotated(self, y: TensorValue) -> TensorValue:
        if self.rotary is None:
            return y
        return self.rotary.of_pairs(y) if self.parameters.config.rotates_neighbours else self.rotary(y)


_STEPS: dict[QkNorm | None, tuple[Callable[[_Heads, TensorValue], TensorValue], ...]] = {
    None: (_Heads.split, _Heads.rotated),
    "all_heads": (_Heads.normed, _Heads.split, _Heads.rotated),
    "head": (_Heads.split, _Heads.normed, _Heads.rotated),
    "head, rotated": (_Heads.split, _Heads.rotated, _Heads.normed),
    "head, rotated, no weights": (_Heads.split, _Heads.rotated, _Heads.normed_if_rotated),
}


def _grown(q: TensorValue, positions: TensorValue, by: QueryGrowth) -> TensorValue:
    """Queries `[T, Hq, D]` times their growth, which is rounded to their dtype first."""
    contexts = ops.floor((ops.cast(positions, DType.float32) + float(by.first)) / float(by.context))
    growth = ops.cast(ops.log1p(contexts) * by.beta + 1.0, q.dtype)
    rows, heads, head_dim = q.shape
    grown = paged.gate_units(ops.reshape(growth, [rows, 1]), ops.reshape(q, [rows, int(heads) * int(head_dim)]), "none")
    return ops.reshape(grown, q.shape)
