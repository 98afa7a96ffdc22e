"""A mixture of experts in place of an MLP: each token goes to a few of many small MLPs, and to one that all share."""

from __future__ import annotations

from typing import Literal

import numpy as np
from max.dtype import DType
from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.models.mixture import ClampedUnits
from paged_kv.graphs.models.parameters import Parameters, times
from paged_kv.graphs.models.tensors import CHOICE_BIAS
from paged_kv.graphs.paged_cache import constant


def chosen_experts(
    parameters: Parameters, x: TensorValue, at: str, of_router: TensorValue | None = None
) -> TensorValue:
    """The weighted sum of what the experts that each row of `x` `[N, hidden]` chooses make of it: `[N, hidden]`.

    `at` names the mixture; its router sees `of_router` `[N, hidden]`, normed, where that is not x. Of equal scores the
    expert of the lowest index is chosen first, but where scores scale the input (MAX's top_k chooses there). Weights
    and sum are float32.
    """
    experts = parameters.config.experts
    assert experts is not None
    # The router is float32, whatever the model's dtype.
    router = f"{at}.{experts.router}"
    seen = x
    if of_router is not None:
        normed = paged.rms_norm(of_router, parameters.values[f"{router}.scale"], parameters.config.norm_eps)
        seen = times(normed, parameters.config.hidden_size**-0.5)
    (logits,) = parameters.linear(paged.widened(seen), router)  # [N, E]
    if experts.scales_input:
        return _of_scaled_inputs(parameters, x, logits, f"{at}.experts")
    weights, chosen = paged.choose_experts(
        logits,
        experts.chosen,
        bias=parameters.values.get(f"{at}.{experts.router}.{CHOICE_BIAS}"),
        groups=experts.groups,
        chosen_groups=experts.chosen_groups,
        sigmoid=experts.sigmoid,
        sum_to_one=experts.sums_to_one,
        scale=experts.scale,
        jitter=experts.jitter or 0,
    )
    if of_router is not None:
        weights = weights * paged.widened(ops.gather(parameters.values[f"{router}.per_expert_scale"], chosen, axis=0))
    return paged.weighted_sum(_expert_mlps(parameters, x, chosen, f"{at}.experts"), weights)


def _of_scaled_inputs(parameters: Parameters, x: TensorValue, logits: TensorValue, at: str) -> TensorValue:
    experts = parameters.config.experts
    assert experts is not None
    scores, chosen = paged.choose_experts(logits, experts.chosen, sigmoid=True)
    scales = ops.cast(scores, x.dtype)
    rows, hidden = x.shape

    def of_choice(index: int) -> TensorValue:
        scale, expert = (paged.take_columns(each, index, 1) for each in (scales, chosen))
        scaled = ops.reshape(paged.gate_units(scale, x, "none"), [rows, 1, hidden])
        return ops.reshape(_expert_mlps(parameters, scaled, expert, at), [rows, hidden])

    return sum((of_choice(index) for index in range(1, experts.chosen)), of_choice(0))


def _expert_mlps(parameters: Parameters, x: TensorValue, chosen: TensorValue, at: str) -> TensorValue:
    experts = parameters.config.experts
    assert experts is not None
    tokens, choices = chosen.shape
    if not experts.gated:
        up = ops.reshape(parameters.experts(x, chosen, f"{at}.up_proj")[0], [tokens * choices, experts.inner])
        units = ops.reshape(paged.gate_units(up, up, "relu"), [tokens, choices, experts.inner])
        return parameters.experts(units, chosen, f"{at}.down_proj")[0]
    if experts.separate_gate_up:
        gate, up = parameters.experts(x, chosen, f"{at}.gate_proj", f"{at}.up_proj")
        if experts.units is None:
            gate, up = (ops.reshape(part, [tokens * choices, experts.inner]) for part in (gate, up))
            units = paged.gate_units(gate, up, _activation(parameters))
        else:
            units = _clamped(gate, up, experts.units)
    else:
        (gate_up,) = parameters.experts(x, chosen, f"{at}.gate_up_proj")
        flat = ops.reshape(gate_up, [tokens * choices, 2 * experts.inner])
        clamped = None if experts.units is None else (experts.units.alpha, experts.units.limit)
        if _activation(parameters) == "silu":
            units = paged.gate_halves(flat, clamped)
        else:
            gate, up = paged.split_columns(flat, [experts.inner] * 2)
            units = paged.gate_units(gate, up, _activation(parameters))
    units = ops.reshape(units, [tokens, choices, experts.inner])
    return parameters.experts(units, chosen, f"{at}.down_proj")[0]


def _activation(parameters: Parameters) -> Literal["silu", "gelu_tanh"]:
    return "gelu_tanh" if parameters.config.activation == "gelu_tanh" else "silu"


def _clamped(gate: TensorValue, up: TensorValue, units: ClampedUnits) -> TensorValue:
    """The units in float32, rounded once."""
    gate, up, dtype = ops.cast(gate, DType.float32), ops.cast(up, DType.float32), gate.dtype
    most, least = (constant(np.array([limit], np.float32), gate.device) for limit in (units.limit, -units.limit))
    gate, up = ops.min(gate, most), ops.max(ops.min(up, most), least)
    return ops.cast((up + 1.0) * gate * ops.sigmoid(gate * units.alpha), dtype)
