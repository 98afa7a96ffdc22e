"""Recurrent layers in a step: a convolution over the last tokens, a matrix state for each head, a gated norm."""

from __future__ import annotations

from typing import Literal

from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.models.recurrence import Recurrence
from paged_kv.graphs.models.tensors import RECURRENT
from paged_kv.graphs.ops import States


def recurrent_layer(parameters: Parameters, states: States, x: TensorValue, layer: int) -> TensorValue:
    """Return what a recurrent layer makes of `x` `[T, hidden]`, as `x`; the states of its requests are replaced."""
    recurrence = parameters.config.recurrence
    assert recurrence is not None
    at, states = f"model.layers.{layer}.{RECURRENT[recurrence.kind]}", states.of_layer(recurrence.index(layer))
    make = {"gated delta": _gated_delta, "mamba2": _mamba2, "convolution": _convolution}[recurrence.kind]
    return parameters.linear(make(parameters, recurrence, states, x, at), f"{at}.out_proj")[0]


def _gated_delta(
    parameters: Parameters, recurrence: Recurrence, states: States, x: TensorValue, at: str
) -> TensorValue:
    """Gated DeltaNet: a head's state S forgets, then learns what it lacks of v at k, and is read at q."""
    names = ("in_proj_qkv", "in_proj_z", *(("in_proj_ba",) if recurrence.fused_gates else ("in_proj_b", "in_proj_a")))
    qkv, z, *gates = parameters.linear(x, *(f"{at}.{name}" for name in names))
    b, a = _split_gates(gates[0], recurrence) if recurrence.fused_gates else gates
    o = paged.gated_delta_rule(
        states,
        _convolved(parameters, states, qkv, at, "silu"),
        paged.widened(a),
        paged.widened(b),
        parameters.values[f"{at}.A_log"],
        parameters.values[f"{at}.dt_bias"],
        key_heads=recurrence.key_heads,
        key_dim=recurrence.key_dim,
        tiled=recurrence.tiled,
    )
    return paged.gated_norm(o, z, parameters.values[f"{at}.norm.weight"], parameters.config.norm_eps)


def _split_gates(gates: TensorValue, recurrence: Recurrence) -> list[TensorValue]:
    """B and a `[T, heads]` of gates `[T, 2 heads]` that have those of each key head side by side."""
    group = recurrence.heads // recurrence.key_heads
    return [paged.take_columns(gates, first, group, groups=recurrence.key_heads) for first in (0, group)]


def _mamba2(parameters: Parameters, recurrence: Recurrence, states: States, x: TensorValue, at: str) -> TensorValue:
    """Mamba-2: a head's state forgets by its time step, and adds the outer product of x and B; C reads it."""
    mixed = parameters.linear(x, f"{at}.in_proj")[0]
    z, xbc, dt = paged.split_columns(mixed, [recurrence.inner, recurrence.channels, recurrence.heads])
    y = paged.selective_scan(
        states,
        _convolved(parameters, states, xbc, at, "silu"),
        paged.widened(dt),
        parameters.values[f"{at}.A_log"],
        parameters.values[f"{at}.D"],
        parameters.values[f"{at}.dt_bias"],
        groups=recurrence.key_heads,
        state_size=recurrence.key_dim,
        dt_range=recurrence.dt_range,
    )
    weight, eps = parameters.values[f"{at}.norm.weight"], parameters.config.norm_eps
    return paged.gated_norm(y, z, weight, eps, groups=recurrence.norm_groups, gate_first=True)


def _convolution(
    parameters: Parameters, recurrence: Recurrence, states: States, x: TensorValue, at: str
) -> TensorValue:
    """A gated convolution (LFM2): `C * conv(B * x)`."""
    before, after, inner = paged.split_columns(parameters.linear(x, f"{at}.in_proj")[0], [recurrence.channels] * 3)
    y = _convolved(parameters, states, paged.gate_units(before, inner, "none"), at, "none")
    return paged.gate_units(after, y if y.dtype == x.dtype else ops.cast(y, x.dtype), "none")


def _convolved(
    parameters: Parameters, states: States, x: TensorValue, at: str, activation: Literal["silu", "none"]
) -> TensorValue:
    """The causal convolution of each channel of `x` `[T, C]`, in float32."""
    bias = parameters.values.get(f"{at}.conv1d.bias")
    return paged.causal_conv1d(states, x, parameters.values[f"{at}.conv1d.weight"], bias, activation=activation)
