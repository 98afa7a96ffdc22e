"""Mamba-2 over new tokens: FlashInfer's `mamba` module on arrays of the host.

Letters in shapes: S slots of states, B requests of T tokens, H heads, G groups of them that share B and C, P
dimensions of a head, N rows of its state.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.recurrence import (
    STATE_DTYPES,
    Written,
    check_distinct,
    checked,
    floats,
    like,
    recurrence,
    require_host,
    sigmoid,
    slots,
    softplus,
    write_all,
)
from paged_kv.errors import ContractError, ShapeError

__all__ = ["selective_state_update"]


def selective_state_update(
    state: Any,
    x: ArrayT,
    dt: SupportsDLPack,
    A: SupportsDLPack,
    B: SupportsDLPack,
    C: SupportsDLPack,
    D: SupportsDLPack,
    z: SupportsDLPack | None = None,
    dt_bias: SupportsDLPack | None = None,
    dt_softplus: bool = False,
    state_batch_indices: SupportsDLPack | None = None,
    pad_slot_id: int = -1,
    state_scale: None = None,
    out: Any = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: None = None,
    intermediate_state_indices: None = None,
    intermediate_state_scales: None = None,
    rand_seed: None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: SupportsDLPack | None = None,
    cu_seqlens: None = None,
    num_accepted_tokens: None = None,
    backend: str = "auto",
) -> ArrayT:
    """One or several tokens of each request of a Mamba-2 layer: `t = dt + dt_bias`, its softplus where `dt_softplus`;
    `S = exp(A t) S + B (t x)^T`, `y = S^T C + D x`, times `silu(z)` where there is z; sums in float32.

    A, dt and dt_bias have one number for each head, as Mamba-2's models have them; FlashInfer's shapes repeat it.

    Args:
        state: `[S, H, P, N]` float32 or bfloat16; the states after the tokens replace those before.
        x: `[B, H, P]` or `[B, T, H, P]` float32, bfloat16 or float16, as all but the state.
        dt: Like x.
        A: `[H, P, N]`.
        B, C: `[B, G, N]` or `[B, T, G, N]`; G divides H.
        D: `[H, P]`.
        z: Like x.
        dt_bias: `[H, P]`.
        dt_softplus: As said.
        state_batch_indices: `[B]`: the slot of each request; the first B ones where it is None.
        pad_slot_id: The slot of a request that is padding: its outputs are 0.
        out: Like x, written to; a new array of x's dtype where it is None.
        disable_state_update: States are left as they were.
        dst_state_batch_indices: `[B]`: the slot that each request writes; the one that it reads where it is None.
        philox_rounds, cache_steps, algorithm, backend: Accepted, without effect.
        state_scale, intermediate_states_buffer, intermediate_state_indices, intermediate_state_scales, rand_seed,
            cu_seqlens, num_accepted_tokens: None alone.

    Returns:
        y, like x.

    Raises:
        ContractTypeError, ShapeError, PageTableError: an argument is no array of these dtypes and shapes, or lies on a
            GPU.
        ContractError: an argument is not None that must be; A, dt or dt_bias differs within a head; a slot is none of
            those there are, or written twice; an array that is written is read-only, or shares memory with another.
    """
    del philox_rounds, cache_steps, algorithm, backend
    refused = {
        "state_scale": state_scale,
        "intermediate_states_buffer": intermediate_states_buffer,
        "intermediate_state_indices": intermediate_state_indices,
        "intermediate_state_scales": intermediate_state_scales,
        "rand_seed": rand_seed,
        "cu_seqlens": cu_seqlens,
        "num_accepted_tokens": num_accepted_tokens,
    }
    for name, value in refused.items():
        if value is not None:
            raise ContractError(f"{name} must be None")
    read = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    require_host({**read, "state": state, "out": out})
    rank = HOST.view(x, "x").ndim
    if rank not in (3, 4):
        raise ShapeError(f"x: {rank} dimensions, expected [B, H, P] or [B, T, H, P]")
    given = checked("x", x, [None] * rank).shape
    requests, heads, width = given[0], *given[-2:]
    tokens = given[1] if rank == 4 else 1
    outer = given[: rank - 2]
    held = Written.of("state", state, [None, heads, width, None], STATE_DTYPES)
    available, state_size = held.view.shape[0], held.view.shape[3]
    checked("dt", dt, given)  # before anything is copied
    inputs, steps = (floats(name, read[name], given) for name in ("x", "dt"))
    of_b, of_c = (floats(name, read[name], [*outer, None, state_size]) for name in "BC")
    groups = of_b.shape[-2]
    if of_c.shape != of_b.shape or not groups or heads % groups:
        raise ShapeError(f"B: {groups} groups and C: {of_c.shape[-2]}, expected one number that divides {heads} heads")
    rates = _of_heads("A", floats("A", A, [heads, width, state_size]), 1)
    steps = _of_heads("dt", steps, rank - 1)
    if dt_bias is not None:
        steps = steps + _of_heads("dt_bias", floats("dt_bias", dt_bias, [heads, width]), 1)
    if flag("dt_softplus", dt_softplus):
        steps = softplus(steps)
    padding = integer("pad_slot_id", pad_slot_id, -LARGEST_INDEX - 1, LARGEST_INDEX)
    sources = np.arange(requests, dtype=np.int32)
    if state_batch_indices is not None:
        sources = slots("state_batch_indices", state_batch_indices, requests, available, padding)
    elif requests > available:
        raise ShapeError(f"state: {available} slots for {requests} requests")
    targets = sources
    if dst_state_batch_indices is not None:
        targets = slots("dst_state_batch_indices", dst_state_batch_indices, requests, available, padding)
    busy = np.flatnonzero((sources != padding) & (targets != padding))
    updates = not flag("disable_state_update", disable_state_update)
    if updates:
        name = "state_batch_indices" if dst_state_batch_indices is None else "dst_state_batch_indices"
        check_distinct(name, targets[busy])
    into = None if out is None else Written.of("out", out, given)

    def rows(array: Any) -> Any:
        return array[busy].reshape(len(busy) * tokens, *array.shape[len(outer) :])

    with np.errstate(over="ignore", invalid="ignore"):
        decays = np.exp(rates * steps)
    found = recurrence(
        "selective_scan",
        rows(of_c),
        rows(of_b),
        rows(inputs),
        rows(decays),
        rows(steps),
        held.view[sources[busy]].astype(np.float32).swapaxes(2, 3),
        [tokens] * len(busy),
    )
    y = np.zeros(given, np.float32)
    y[busy] = found.o.reshape(len(busy), *given[1:])
    with np.errstate(over="ignore", invalid="ignore"):
        y += floats("D", D, [heads, width]) * inputs
        if z is not None:
            gate = floats("z", z, given)
            y *= gate * sigmoid(gate)
    idle = np.ones(requests, bool)
    idle[busy] = False
    y[idle] = 0
    results: list[tuple[Written, Any, Any]] = [] if into is None else [(into, ..., y)]
    if updates:
        results.append((held, targets[busy], found.after.swapaxes(2, 3)))
    else:
        read["state"] = state
    write_all(results, read)
    return like(x, y) if out is None else out


def _of_heads(name: str, array: Any, axis: int) -> Any:
    """The one number of each head, which an array repeats in its axes from `axis` on.

    Raises:
        ContractError: the numbers differ.
    """
    flat = array.reshape(*array.shape[:axis], math.prod(array.shape[axis:]))
    if not flat.shape[-1]:
        return np.zeros(flat.shape[:-1], np.float32)
    if not np.array_equal(flat, np.broadcast_to(flat[..., :1], flat.shape), equal_nan=True):
        raise ContractError(f"{name}: differs within a head, one number for each is expected")
    return flat[..., 0]
