"""A mixture of experts in place of an MLP: each token goes to a few of many small MLPs, and to one that all share."""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops

from paged_kv.graphs.models.mixture import ClampedUnits, Experts
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.models.tensors import CHOICE_BIAS
from paged_kv.graphs.paged_cache import constant

LESS = 1e30
"""Minus this is less than any score."""


def chosen_experts(parameters: Parameters, x: TensorValue, at: str) -> TensorValue:
    """The weighted sum of what the experts that each row of `x` `[N, hidden]` chooses make of it: `[N, hidden]`.

    `at` names the mixture. Of equal scores the expert of the lowest index is chosen first. Weights and sum are float32.
    """
    experts = parameters.config.experts
    assert experts is not None
    # The router is float32, whatever the model's dtype.
    (logits,) = parameters.linear(ops.cast(x, DType.float32), f"{at}.{experts.router}")  # [N, E]
    bias = parameters.values.get(f"{at}.{experts.router}.{CHOICE_BIAS}")
    weights, chosen = choose(ops.sigmoid(logits) if experts.sigmoid else ops.softmax(logits), experts, bias)
    of_each = _expert_mlps(parameters, x, chosen, f"{at}.experts")  # [N, chosen, hidden]
    weighted = ops.cast(of_each, DType.float32) * ops.unsqueeze(weights, -1)
    return ops.cast(ops.squeeze(ops.sum(weighted, axis=1), 1), x.dtype)


def choose(scores: TensorValue, experts: Experts, bias: TensorValue | None = None) -> tuple[TensorValue, TensorValue]:
    """Weights float32 and indices int32 of each token's experts, both `[N, chosen]`, from scores `[N, E]` float32.

    `bias` `[E]` float32 is added to the scores by which they are chosen, not to their weights.
    """
    by = scores if bias is None else scores + bias
    if experts.groups > 1:
        by = _of_greatest_groups(by, experts)
    weights, chosen = ops.top_k(by, experts.chosen, axis=-1)
    if bias is not None:
        weights = ops.squeeze(ops.sum(_is_one_of(chosen, experts.count) * ops.unsqueeze(scores, 1), axis=2), 2)
    if experts.sums_to_one:
        weights = weights / ops.sum(weights, axis=-1)
    return weights * experts.scale, ops.cast(chosen, DType.int32)


def _of_greatest_groups(scores: TensorValue, experts: Experts) -> TensorValue:
    """The scores, or what is less than any score for experts of all groups but the `chosen_groups` greatest ones."""
    tokens, count = scores.shape[0], experts.groups
    grouped = ops.reshape(scores, [tokens, count, experts.count // count])
    of_groups = ops.sum(ops.top_k(grouped, 2, axis=-1)[0], axis=2) if experts.sigmoid else ops.max(grouped, axis=2)
    _, chosen = ops.top_k(ops.squeeze(of_groups, 2), experts.chosen_groups, axis=-1)
    mask = ops.reshape(ops.sum(_is_one_of(chosen, count), axis=1), [tokens, count, 1])  # 1 of a chosen group, else 0
    return ops.reshape(grouped * mask + (mask - 1.0) * LESS, [tokens, experts.count])


def _is_one_of(chosen: TensorValue, count: int) -> TensorValue:
    """`[N, C]` indices -> `[N, C, count]` float32: 1 where it is the index, else 0."""
    indices = constant(np.arange(count, dtype=np.int64).reshape(1, 1, count), chosen.device)
    return ops.cast(ops.equal(ops.unsqueeze(ops.cast(chosen, DType.int64), 2), indices), DType.float32)


def _expert_mlps(parameters: Parameters, x: TensorValue, chosen: TensorValue, at: str) -> TensorValue:
    experts = parameters.config.experts
    assert experts is not None
    if experts.apart:
        gate, up = parameters.experts(x, chosen, f"{at}.gate_proj", f"{at}.up_proj")
    else:
        (gate_up,) = parameters.experts(x, chosen, f"{at}.gate_up_proj")
        gate, up = ops.split(gate_up, [int(gate_up.shape[2]) // 2] * 2, axis=-1)
    gated = ops.silu(gate) * up if experts.units is None else _clamped(gate, up, experts.units)
    return parameters.experts(gated, chosen, f"{at}.down_proj")[0]


def _clamped(gate: TensorValue, up: TensorValue, units: ClampedUnits) -> TensorValue:
    """The units in float32, rounded once."""
    gate, up, dtype = ops.cast(gate, DType.float32), ops.cast(up, DType.float32), gate.dtype
    limit = constant(np.array([units.limit], np.float32), gate.device)
    gate, up = ops.min(gate, limit), ops.max(ops.min(up, limit), -limit)
    return ops.cast((up + 1.0) * gate * ops.sigmoid(gate * units.alpha), dtype)
