"""Gated DeltaNet over prompts: FlashInfer's `gdn_prefill` module on arrays of the host.

Letters in shapes: T rows of B sequences, Hq, Hk and Hv heads of q, k and v, H the greater of Hq and Hv, K and V
dimensions of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer, shown
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.host_arrays import Floats, Written, checked, floats, write_all
from paged_kv.calls.offsets import check_offsets
from paged_kv.calls.recurrence import STATE_DTYPES, like, recurrence, require_host
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
    read = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    require_host({**read, "output": output, "output_state": output_state, "state_checkpoints": state_checkpoints})
    queries, keys, values = _checked_qkv(read)
    (rows, _, key_dim), (heads, width) = queries.shape, values.shape[1:]
    ones = np.ones((rows, heads), np.float32)
    decays = ones if g is None else floats("g", g, [rows, heads], ("float32",))
    rates = ones if beta is None else floats("beta", beta, [rows, heads], ("float32",))
    counts, of_state = _counts(cu_seqlens, rows), [heads, width, key_dim]
    before = None
    if initial_state is not None:
        before = floats("initial_state", initial_state, [len(counts), *of_state], STATE_DTYPES).swapaxes(2, 3)
    every = integer("checkpoint_every_n_tokens", checkpoint_every_n_tokens, 0, LARGEST_INDEX)
    returns_states = flag("output_final_state", output_final_state)
    factor = (key_dim or 1) ** -0.5 if scale is None else checked_number(scale, "scale") or (key_dim or 1) ** -0.5
    into = None if output is None else Written.of("output", output, [rows, heads, width])
    state = None
    if output_state is not None:
        state = Written.of("output_state", output_state, [len(counts), *of_state], STATE_DTYPES)
    checkpoints, num_checkpoints = _checkpoints(every, counts, state_checkpoints, checkpoint_cu_starts, of_state)
    normed = flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    gates = decays, rates, before, counts
    walked = recurrence("delta_rule", queries, keys, values, *gates, scale=factor, normed=normed, every=every)
    after = np.ascontiguousarray(walked.after.swapaxes(2, 3))
    results: list[tuple[Written, Any, Any]] = [] if into is None else [(into, ..., walked.o)]
    if state is not None and returns_states:
        results.append((state, ..., after))
    if checkpoints is not None and num_checkpoints:
        flat = np.stack([each.swapaxes(1, 2) for of_sequence in walked.between for each in of_sequence])
        results.append((checkpoints, slice(num_checkpoints), flat))
    write_all(results, read)
    o = like(q, walked.o) if output is None else output
    if not returns_states:
        return o
    return o, (HOST.like(q, after) if output_state is None else output_state)


def _checked_qkv(arrays: Mapping[str, Any]) -> tuple[Floats, Floats, Floats]:
    """Q, k and v as float32, with as many heads of q as of k, which divide those of v.

    Raises:
        ContractTypeError, ShapeError: they are no arrays of these dtypes and shapes, or their heads do not fit.
    """
    rows, q_heads, key_dim = checked("q", arrays["q"], [None] * 3).shape
    shapes = {"q": [rows, None, key_dim], "k": [rows, None, key_dim], "v": [rows, None, None]}
    k_heads, v_heads = (checked(name, arrays[name], shapes[name]).shape[1] for name in "kv")
    is_of_values, is_of_queries = q_heads == k_heads and v_heads, k_heads == v_heads and q_heads
    if not k_heads or not ((is_of_values and v_heads % q_heads == 0) or (is_of_queries and q_heads % k_heads == 0)):
        raise ShapeError(f"k: expected heads that fit {q_heads} of q and {v_heads} of v, got {k_heads}")
    q, k, v = (floats(name, arrays[name], shape) for name, shape in shapes.items())
    if q_heads != k_heads:
        k, v = (np.repeat(x, q_heads // k_heads, axis=1) for x in (k, v))
    return q, k, v


def _counts(cu_seqlens: Any, rows: int) -> list[int]:
    """The rows of each sequence.

    Raises:
        ContractTypeError, ShapeError, PageTableError: `cu_seqlens` is no array of offsets that end at `rows`.
    """
    if cu_seqlens is None:
        return [rows]
    offsets = HOST.indices(cu_seqlens, "cu_seqlens")
    check_offsets(offsets, "cu_seqlens")
    if offsets[-1] != rows:
        raise ShapeError(f"cu_seqlens: expected an end at q's {rows} rows, got {offsets[-1]}")
    counts: list[int] = np.diff(offsets).tolist()
    return counts


def _checkpoints(
    every: int, counts: list[int], checkpoints: Any, starts: Any, of_state: list[int]
) -> tuple[Written | None, int]:
    """The array that takes a state `of_state` after each `every` rows of a sequence, and how many it takes.

    Raises:
        ContractTypeError, ShapeError: an argument is no array of these dtypes and shapes.
        ContractError: one is missing, or `starts` is not the first checkpoint of each sequence.
    """
    if not every:
        for name, array in (("state_checkpoints", checkpoints), ("checkpoint_cu_starts", starts)):
            if array is not None:
                raise ContractError(f"{name}: expected None where checkpoint_every_n_tokens is 0")
        return None, 0
    if checkpoints is None or starts is None:
        name = "state_checkpoints" if checkpoints is None else "checkpoint_cu_starts"
        raise ContractError(f"{name}: expected an array where checkpoint_every_n_tokens is {every}, got None")
    places = HOST.indices(starts, "checkpoint_cu_starts").tolist()
    expected = np.concatenate([[0], np.cumsum([count // every for count in counts])]).tolist()
    if places != expected:
        raise ContractError(f"checkpoint_cu_starts: expected {shown(expected)}, got {shown(places)}")
    written = Written.of("state_checkpoints", checkpoints, [None, *of_state], STATE_DTYPES)
    if len(written.view) < places[-1]:
        raise ShapeError(f"state_checkpoints: expected at least {places[-1]} states, got {len(written.view)}")
    return written, places[-1]
