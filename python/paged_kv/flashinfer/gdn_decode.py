"""Gated DeltaNet over new tokens: FlashInfer's `gdn_decode` module on arrays of the host.

Letters in shapes: B requests of T tokens, Hk heads of q and k, H of v and of states, K and V dimensions of keys and
values; S slots of a pool of states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import flag
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.host_arrays import Written, checked, floats, write_all
from paged_kv.calls.recurrence import STATE_DTYPES, StateSlots, like, recurrence, require_host, sigmoid, softplus
from paged_kv.calls.scalars import checked_number
from paged_kv.errors import ContractError, ShapeError

__all__ = ["gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose"]


def gated_delta_rule_decode_pretranspose(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    state: Any,
    A_log: SupportsDLPack,
    a: SupportsDLPack,
    dt_bias: SupportsDLPack,
    b: SupportsDLPack,
    scale: float | None = None,
    output: Any = None,
    use_qk_l2norm: bool = True,
    initial_state: Any = None,
    initial_state_indices: SupportsDLPack | None = None,
    output_state_indices: SupportsDLPack | None = None,
    *,
    intermediate_states_buffer: Any = None,
    disable_state_update: bool = False,
) -> tuple[ArrayT, Any]:
    """The gated delta rule over one or several tokens of each request: `S = d S`, `S = S + k (r (v - S^T k))^T`,
    `o = scale S^T q`, with `d = exp(-exp(A_log) softplus(a + dt_bias))` and `r = sigmoid(b)`; sums in float32.

    Args:
        q, k: `[B, T, Hk, K]` float32, bfloat16 or float16; Hk divides H.
        v: `[B, T, H, V]`.
        state: `[B, H, V, K]` float32 or bfloat16, replaced by the states after the tokens; None with a pool.
        A_log, dt_bias: `[H]`.
        a, b: `[B, T, H]`.
        scale: 1 / sqrt(K) where it is None.
        output: `[B, T, H, V]`, written to; a new array of q's dtype where it is None.
        use_qk_l2norm: q and k are divided by their lengths first.
        initial_state: A pool `[S, H, V, K]` of states in place of `state`.
        initial_state_indices: `[B]`: the slot that each request reads; -1 for a request that is padding, whose outputs
            are 0.
        output_state_indices: `[B]`: the slot that it writes; the one that it reads where it is None.
        intermediate_states_buffer: `[B, T, H, V, K]`, written to: the state after each token.
        disable_state_update: States are left as they were.

    Returns:
        `(o, states)`: o `[B, T, H, V]`, and `state` or the pool.

    Raises:
        ContractTypeError, ShapeError, PageTableError: an argument is no array of these dtypes and shapes, or lies on a
            GPU.
        ContractError: there is not either a state or a pool with slots; a slot is none of the pool's, or written
            twice; an array that is written is read-only, or shares memory with another argument.
    """
    return _decode(
        *(q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm),
        *(initial_state, initial_state_indices, output_state_indices, intermediate_states_buffer, disable_state_update),
    )


def gated_delta_rule_decode(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    state: Any,
    A_log: SupportsDLPack,
    a: SupportsDLPack,
    dt_bias: SupportsDLPack,
    b: SupportsDLPack,
    scale: float | None = None,
    output: Any = None,
    use_qk_l2norm: bool = True,
) -> tuple[ArrayT, Any]:
    """`gated_delta_rule_decode_pretranspose` of states `[B, H, K, V]`, which are replaced.

    Args, returns and raises as there.
    """
    return _decode(q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, keys_first=True)


def _decode(
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    A_log: Any,
    a: Any,
    dt_bias: Any,
    b: Any,
    scale: Any,
    output: Any,
    use_qk_l2norm: Any,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    output_state_indices: Any = None,
    intermediate_states_buffer: Any = None,
    disable_state_update: Any = False,
    *,
    keys_first: bool = False,
) -> tuple[Any, Any]:
    """Both calls; states are `[..., K, V]` where `keys_first`, else `[..., V, K]`."""
    if (initial_state is None) == (state is None) or (initial_state is None) != (initial_state_indices is None):
        raise ContractError("state: expected either state, or initial_state with initial_state_indices")
    if output_state_indices is not None and initial_state is None:
        raise ContractError("output_state_indices: expected None without initial_state, whose slots they are")
    read = {"q": q, "k": k, "v": v, "A_log": A_log, "a": a, "dt_bias": dt_bias, "b": b}
    pool = {"state": state, "initial_state": initial_state, "intermediate_states_buffer": intermediate_states_buffer}
    require_host({**read, **pool, "output": output})
    requests, tokens, key_heads, key_dim = checked("q", q, [None] * 4).shape
    for name in "qkv":  # before anything is copied
        checked(name, read[name], [requests, tokens, *((key_heads, key_dim) if name != "v" else (None, None))])
    queries, keys = (floats(name, read[name], [requests, tokens, key_heads, key_dim]) for name in "qk")
    values = floats("v", v, [requests, tokens, None, None])
    heads, width = values.shape[2:]
    if not key_heads or heads % key_heads:
        raise ShapeError(f"v: expected a multiple of the {key_heads} heads of q and k, got {heads}")
    decays, rates = (floats(name, read[name], [requests, tokens, heads]) for name in "ab")
    rate_of, bias = (floats(name, read[name], [heads]) for name in ("A_log", "dt_bias"))
    name, states = ("state", state) if initial_state is None else ("initial_state", initial_state)
    of_state = [heads, key_dim, width] if keys_first else [heads, width, key_dim]
    held = Written.of(name, states, [requests if initial_state is None else None, *of_state], STATE_DTYPES)
    updates = not flag("disable_state_update", disable_state_update)
    indices = {"initial_state_indices": initial_state_indices, "output_state_indices": output_state_indices}
    sources, targets, busy = StateSlots.of(requests, len(held.view), -1, are_written=updates, **indices)
    shape = [requests, tokens, heads, width]
    into = None if output is None else Written.of("output", output, shape)
    between = None
    if intermediate_states_buffer is not None:
        places = [requests, tokens, *of_state]
        between = Written.of("intermediate_states_buffer", intermediate_states_buffer, places, STATE_DTYPES)
    factor = (key_dim or 1) ** -0.5 if scale is None else checked_number(scale, "scale")

    def rows(x: Any) -> Any:
        return x[busy].reshape(len(busy) * tokens, *x.shape[2:])

    def turned(x: Any) -> Any:
        return x if keys_first else x.swapaxes(-1, -2)

    with np.errstate(over="ignore", invalid="ignore"):
        decays = np.exp(-np.exp(rate_of) * softplus(decays + bias))
    walked = recurrence(
        "delta_rule",
        rows(queries),
        rows(keys),
        rows(values),
        rows(decays),
        rows(sigmoid(rates)),
        turned(held.view[sources[busy]].astype(np.float32)),
        [tokens] * len(busy),
        scale=factor,
        normed=flag("use_qk_l2norm", use_qk_l2norm),
        every=0 if between is None else 1,
    )
    o = np.zeros(shape, np.float32)
    o[busy] = walked.o.reshape(len(busy), *shape[1:])
    results: list[tuple[Written, Any, Any]] = [] if into is None else [(into, ..., o)]
    if updates:
        results.append((held, targets[busy], turned(walked.after)))
    else:
        read[name] = states
    if between is not None and tokens and len(busy):
        results.append((between, busy, turned(np.array(walked.between))))
    write_all(results, read)
    return (like(q, o) if output is None else output), states
