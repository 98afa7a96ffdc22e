"""Mamba-2 over new tokens: FlashInfer's `mamba` module on arrays of the host.

Letters in shapes: S slots of states, B requests of T tokens, H heads, G groups of them that share B and C, P
dimensions of a head, N rows of its state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.host_arrays import Floats, Written, checked, floats, write_all
from paged_kv.calls.recurrence import STATE_DTYPES, StateSlots, like, recurrence, require_host, sigmoid, softplus
from paged_kv.errors import ContractError, ShapeError
from paged_kv.flashinfer.kernel_arguments import refuse_unsupported

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
        dt_softplus: Whether t is the softplus.
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
    refuse_unsupported(state_scale=state_scale, intermediate_states_buffer=intermediate_states_buffer)
    refuse_unsupported(intermediate_state_indices=intermediate_state_indices, rand_seed=rand_seed)
    refuse_unsupported(intermediate_state_scales=intermediate_state_scales, cu_seqlens=cu_seqlens)
    refuse_unsupported(num_accepted_tokens=num_accepted_tokens)
    read = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    require_host({**read, "state": state, "out": out})
    shape = _shape_of(x)
    held = Written.of("state", state, [None, *shape[-2:], None], STATE_DTYPES)
    inputs = _Inputs.of(read, shape, held.view.shape[3], flag("dt_softplus", dt_softplus))
    available, padding = len(held.view), integer("pad_slot_id", pad_slot_id, -LARGEST_INDEX - 1, LARGEST_INDEX)
    if state_batch_indices is None and shape[0] > available:
        raise ShapeError(f"state: expected a slot for each of {shape[0]} requests, got {available}")
    updates = not flag("disable_state_update", disable_state_update)
    indices = {"state_batch_indices": state_batch_indices, "dst_state_batch_indices": dst_state_batch_indices}
    sources, targets, busy = StateSlots.of(shape[0], available, padding, are_written=updates, **indices)
    into = None if out is None else Written.of("out", out, shape)
    y, after = inputs.scan(held.view[sources[busy]].astype(np.float32), busy)
    results: list[tuple[Written, Any, Any]] = [] if into is None else [(into, ..., y)]
    if updates:
        results.append((held, targets[busy], after))
    write_all(results, read if updates else {**read, "state": state})
    return like(x, y) if out is None else out


def _shape_of(x: Any) -> tuple[int, ...]:
    """`[B, H, P]` or `[B, T, H, P]`.

    Raises:
        ContractTypeError, ShapeError: x is no such array of floats.
    """
    rank = HOST.view(x, "x").ndim
    if rank not in (3, 4):
        raise ShapeError(f"x: expected [B, H, P] or [B, T, H, P], got {rank} dimensions")
    return checked("x", x, [None] * rank).shape


@dataclass(frozen=True, eq=False)
class _Inputs:
    """The arguments of a call as float32. Letters in shapes: `...` B, or B and T."""

    x: Floats
    """`[..., H, P]`."""
    steps: Floats
    """t, `[..., H]`."""
    rates: Floats
    """A, `[H]`."""
    keys: Floats
    """B, `[..., G, N]`."""
    queries: Floats
    """C, `[..., G, N]`."""
    skip: Floats
    """D, `[H, P]`."""
    z: Floats | None
    """`[..., H, P]`."""

    @staticmethod
    def of(arrays: Mapping[str, Any], shape: Sequence[int], state_size: int, has_softplus: bool) -> _Inputs:
        """The arguments by their names, checked; `shape` is that of x, and `state_size` is N.

        Raises:
            ContractTypeError, ShapeError: an argument is no array of these dtypes and shapes.
            ContractError: A, dt or dt_bias differs within a head.
        """
        outer, (heads, width) = shape[:-2], shape[-2:]
        for name in ("dt", "z"):  # before anything is copied
            if arrays[name] is not None:
                checked(name, arrays[name], shape)
        x, steps = (floats(name, arrays[name], shape) for name in ("x", "dt"))
        keys, queries = (floats(name, arrays[name], [*outer, None, state_size]) for name in "BC")
        groups, of_c = keys.shape[-2], queries.shape[-2]
        if groups != of_c or not groups or heads % groups:
            raise ShapeError(f"B: expected as many groups as C's {of_c}, which divide {heads} heads, got {groups}")
        rates = _of_heads("A", floats("A", arrays["A"], [heads, width, state_size]), 1)
        steps = _of_heads("dt", steps, len(outer) + 1)
        if arrays["dt_bias"] is not None:
            steps = steps + _of_heads("dt_bias", floats("dt_bias", arrays["dt_bias"], [heads, width]), 1)
        skip = floats("D", arrays["D"], [heads, width])
        z = None if arrays["z"] is None else floats("z", arrays["z"], shape)
        return _Inputs(x, softplus(steps) if has_softplus else steps, rates, keys, queries, skip, z)

    def scan(self, states: Floats, busy: Any) -> tuple[Floats, Floats]:
        """Y like x, 0 where a request is not `busy`, and the states `[busy, H, P, N]` after the tokens."""
        shape = self.x.shape
        tokens = shape[1] if len(shape) == 4 else 1

        def rows(array: Floats) -> Floats:
            return array[busy].reshape(len(busy) * tokens, *array.shape[len(shape) - 2 :])

        with np.errstate(over="ignore", invalid="ignore"):
            decays = np.exp(self.rates * self.steps)
        q, k, v, decays, rates = (rows(array) for array in (self.queries, self.keys, self.x, decays, self.steps))
        counts = [tokens] * len(busy)
        scanned = recurrence("selective_scan", q, k, v, decays, rates, states.swapaxes(2, 3), counts)
        y = np.zeros(shape, np.float32)
        y[busy] = scanned.o.reshape(len(busy), *shape[1:])
        with np.errstate(over="ignore", invalid="ignore"):
            y += self.skip * self.x
            if self.z is not None:
                y *= self.z * sigmoid(self.z)
        idle = np.ones(shape[0], bool)
        idle[busy] = False
        y[idle] = 0
        return y, scanned.after.swapaxes(2, 3)


def _of_heads(name: str, array: Any, axis: int) -> Any:
    """The one number of each head, which an array repeats in its axes from `axis` on.

    Raises:
        ContractError: the numbers differ.
    """
    flat = array.reshape(*array.shape[:axis], math.prod(array.shape[axis:]))
    if not flat.shape[-1]:
        return np.zeros(flat.shape[:-1], np.float32)
    if not np.array_equal(flat, np.broadcast_to(flat[..., :1], flat.shape), equal_nan=True):
        raise ContractError(f"{name}: expected one number for each head, got several")
    return flat[..., 0]
