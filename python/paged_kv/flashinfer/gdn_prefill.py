"""Gated DeltaNet over prompts: FlashInfer's `gdn_prefill` module on arrays of the host.

Letters in shapes: T rows of B sequences, Hq, Hk and Hv heads of q, k and v, H the greater of Hq and Hv, K and V
dimensions of keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.offsets import check_offsets
from paged_kv.calls.recurrence import (
    STATE_DTYPES,
    Written,
    checked,
    floats,
    like,
    recurrence,
    require_host,
    write_all,
)
from paged_kv.calls.scalars import checked_number
from paged_kv.errors import ContractError, ShapeError

__all__ = ["chunk_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack | None = None,
    beta: SupportsDLPack | None = None,
    scale: float | None = None,
    initial_state: SupportsDLPack | None = None,
    output_final_state: bool = False,
    cu_seqlens: SupportsDLPack | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Any = None,
    output_state: Any = None,
    state_checkpoints: Any = None,
    checkpoint_cu_starts: SupportsDLPack | None = None,
    checkpoint_every_n_tokens: int = 0,
) -> Any:
    """The gated delta rule (arXiv:2412.06464) over the rows of each sequence: `S = g S`,
    `S = S + k (beta (v - S^T k))^T`, `o = scale S^T q`, all sums in float32.

    Args:
        q: `[T, Hq, K]` float32, bfloat16 or float16, as k and v; Hq = Hk where Hv is a multiple of them, else Hq is a
            multiple of Hk = Hv.
        k: `[T, Hk, K]`.
        v: `[T, Hv, V]`.
        g: `[T, H]` float32, the decay itself; 1 where it is None.
        beta: `[T, H]` float32; 1 where it is None.
        scale: 1 / sqrt(K) where it is None or 0.
        initial_state: `[B, H, V, K]` float32 or bfloat16; zeros where it is None.
        output_final_state: The states after the last rows are returned too.
        cu_seqlens: `[B + 1]` integers from 0 to T: sequence b has the rows from one to the next. All rows are one
            sequence where it is None (FlashInfer wants it).
        use_qk_l2norm_in_kernel: q and k are divided by their lengths first.
        output: `[T, H, V]`, of q's dtype, written to; a new array where it is None.
        output_state: `[B, H, V, K]` float32 or bfloat16, written to; a new array where it is None.
        state_checkpoints: `[C, H, V, K]` float32 or bfloat16, written to: the state of each sequence after every
            `checkpoint_every_n_tokens` rows.
        checkpoint_cu_starts: `[B + 1]` integers: the places of a sequence's checkpoints among them.
        checkpoint_every_n_tokens: 0 for none; any number (FlashInfer's are multiples of 64).

    Returns:
        o `[T, H, V]` in q's dtype and kind, or `(o, final_state)`.

    Raises:
        ContractTypeError, ShapeError: an argument is no array of these dtypes and shapes, or lies on a GPU.
        PageTableError, ContractError: offsets do not ascend or end elsewhere; checkpoints do not have as many places
            as they are; an array that is written is read-only, or shares memory with another argument.
    """
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    require_host({**given, "output": output, "output_state": output_state, "state_checkpoints": state_checkpoints})
    rows, _, key_dim = checked("q", q, [None] * 3).shape
    shapes = {"q": [None] * 3, "k": [rows, None, key_dim], "v": [rows, None, None]}
    _check_heads(*(checked(name, given[name], shape).shape[1] for name, shape in shapes.items()))
    queries, keys, values = _grouped(*(floats(name, given[name], shape) for name, shape in shapes.items()))
    heads, width = values.shape[1:]
    ones = np.ones((rows, heads), np.float32)
    decays = ones if g is None else floats("g", g, [rows, heads], ("float32",))
    rates = ones if beta is None else floats("beta", beta, [rows, heads], ("float32",))
    counts = [rows]
    if cu_seqlens is not None:
        offsets = HOST.indices(cu_seqlens, "cu_seqlens")
        check_offsets(offsets, "cu_seqlens")
        if offsets[-1] != rows:
            raise ShapeError(f"cu_seqlens: ends with {offsets[-1]}, q has {rows} rows")
        counts = np.diff(offsets).tolist()
    of_state = [heads, width, key_dim]
    before = None
    if initial_state is not None:
        before = floats("initial_state", initial_state, [len(counts), *of_state], STATE_DTYPES).swapaxes(2, 3)
    every = integer("checkpoint_every_n_tokens", checkpoint_every_n_tokens, 0, LARGEST_INDEX)
    wanted = flag("output_final_state", output_final_state)
    factor = (key_dim or 1) ** -0.5 if scale is None else checked_number(scale, "scale") or (key_dim or 1) ** -0.5
    into = None if output is None else Written.of("output", output, [rows, heads, width])
    state = None
    if output_state is not None:
        state = Written.of("output_state", output_state, [len(counts), *of_state], STATE_DTYPES)
    places = _places(every, counts, state_checkpoints, checkpoint_cu_starts)
    kept = None
    if places is not None:
        kept = Written.of("state_checkpoints", state_checkpoints, [None, *of_state], STATE_DTYPES)
        if len(kept.view) < places[-1]:
            raise ShapeError(f"state_checkpoints: {len(kept.view)} states, checkpoint_cu_starts ends with {places[-1]}")
    found = recurrence(
        "delta_rule",
        queries,
        keys,
        values,
        decays,
        rates,
        before,
        counts,
        scale=factor,
        normed=flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        every=every,
    )
    after = np.ascontiguousarray(found.after.swapaxes(2, 3))
    results: list[tuple[Written, Any, Any]] = [] if into is None else [(into, ..., found.o)]
    if state is not None and wanted:
        results.append((state, ..., after))
    if kept is not None and places is not None and places[-1]:
        flat = np.stack([each.swapaxes(1, 2) for of_sequence in found.between for each in of_sequence])
        results.append((kept, slice(places[-1]), flat))
    write_all(results, given)
    o = like(q, found.o) if output is None else output
    if not wanted:
        return o
    return o, (HOST.like(q, after) if output_state is None else output_state)


def _grouped(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Q, k and v with as many heads of q as of k, which divide those of v."""
    if q.shape[1] == k.shape[1]:
        return q, k, v
    return q, *(np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))


def _check_heads(of_q: int, of_k: int, of_v: int) -> None:
    """Refuses numbers of heads that do not fit.

    Raises:
        ShapeError: as said.
    """
    is_of_values, is_of_queries = of_q == of_k and of_v, of_k == of_v and of_q
    if not of_k or not ((is_of_values and of_v % of_q == 0) or (is_of_queries and of_q % of_k == 0)):
        raise ShapeError(f"k: {of_k} heads, with {of_q} of q and {of_v} of v")


def _places(every: int, counts: list[int], checkpoints: Any, starts: Any) -> list[int] | None:
    """The places of checkpoints, `[B + 1]`; None where there are none."""
    if not every:
        if checkpoints is not None or starts is not None:
            raise ContractError("checkpoint_every_n_tokens is 0, and there are state_checkpoints or their places")
        return None
    if checkpoints is None or starts is None:
        raise ContractError("state_checkpoints and checkpoint_cu_starts are needed where checkpoint_every_n_tokens is")
    places = HOST.indices(starts, "checkpoint_cu_starts").tolist()
    expected = np.concatenate([[0], np.cumsum([count // every for count in counts])]).tolist()
    if places != expected:
        raise ContractError(f"checkpoint_cu_starts is {places}, with {every} tokens apart they are {expected}")
    return expected
