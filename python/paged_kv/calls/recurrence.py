"""The recurrences of FlashInfer's `gdn` and `mamba` modules over arrays on the host: checked arguments, one kernel.

Letters in shapes: T rows of B requests, Hk key heads, H heads of values and states, K and V dimensions of keys and
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paged_kv.arrays import devices
from paged_kv.arrays.host import HOST
from paged_kv.calls.host_arrays import Floats
from paged_kv.errors import ContractError, ShapeError
from paged_kv.runtime.host_calls import recur

STATE_DTYPES = ("float32", "bfloat16")


class Recurred(NamedTuple):
    """The results of `recurrence`."""

    o: Floats
    """`[T, H, V]`."""
    after: Floats
    """`[B, H, K, V]`: the state of each request after its rows."""
    between: list[list[Floats]]
    """The states `[H, K, V]` of each request after every so many rows."""


def recurrence(
    kind: Literal["delta_rule", "selective_scan"],
    q: Floats,
    k: Floats,
    v: Floats,
    decays: Floats,
    rates: Floats,
    before: Floats | None,
    counts: Sequence[int],
    *,
    scale: float = 1.0,
    normed: bool = False,
    every: int = 0,
) -> Recurred:
    """The rows of each request, one after the other, from its state `before` `[B, H, K, V]`, zeros where it is None.

    Args:
        kind: `S = d S`, then with the delta rule `S = S + k (r (v - S^T k))^T`, else `S = S + k (r v)^T`; `o = S^T q`.
        q, k: `[T, Hk, K]`; Hk divides H, and neighbours share a key head.
        v: `[T, H, V]`.
        decays, rates: d and r, `[T, H]`.
        before: The states at first.
        counts: The rows of each request.
        scale: Multiplies q.
        normed: q and k are divided by their lengths.
        every: Also gives the states after each so many rows of a request; 0: none.
    """
    rows, heads, width = v.shape
    key_dim = q.shape[2]
    o = np.zeros((rows, heads, width), np.float32)
    after = np.zeros((len(counts), heads, key_dim, width), np.float32) if before is None else before.copy()
    ends = [[*range(every, count + 1, every)] if every else [] for count in counts]
    saves = [
        [*each, *([count] if not each or each[-1] != count else [])] for each, count in zip(ends, counts, strict=True)
    ]
    busy = [request for request, count in enumerate(counts) if count]
    between = [[state] * len(each) for state, each in zip(after, ends, strict=True)]  # right where they are empty
    if busy and heads and width and key_dim:
        slots = len(busy) + sum(len(saves[request]) for request in busy)
        matrices = np.zeros((slots, heads, -(-width // 16), key_dim, 16), np.float32)
        matrices[: len(busy)] = _blocks(after[busy])
        of_saves = [len(saves[request]) for request in busy]
        x = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=1)
        recur(
            kind,
            o,
            np.ascontiguousarray(x, np.float32),
            np.ascontiguousarray(decays, np.float32),
            np.ascontiguousarray(rates, np.float32),
            matrices,
            offsets=_offsets(counts[request] for request in busy),
            sources=np.arange(len(busy), dtype=np.int32),
            save_offsets=_offsets(of_saves),
            save_counts=np.array([count for request in busy for count in saves[request]], np.int32),
            save_slots=np.arange(len(busy), slots, dtype=np.int32),
            key_heads=q.shape[1],
            scale=scale,
            normed=normed,
        )
        saved = np.split(_matrices(matrices[len(busy) :], width), np.cumsum(of_saves)[:-1])
        for request, states in zip(busy, saved, strict=True):
            after[request] = states[-1]
            between[request] = list(states[: len(ends[request])])
    return Recurred(o, after, between)


def _offsets(counts: Any) -> npt.NDArray[np.uint32]:
    return np.concatenate([[0], np.cumsum([*counts])]).astype(np.uint32)


def _blocks(states: Floats) -> Floats:
    """States `[n, H, K, V]` in blocks of 16 columns, `[n, H, blocks, K, 16]`."""
    width = states.shape[-1]
    padded = np.pad(states, [(0, 0)] * 3 + [(0, -width % 16)])
    return padded.reshape(*states.shape[:3], -1, 16).transpose(0, 1, 3, 2, 4)


def _matrices(blocks: Floats, width: int) -> Floats:
    """The states of blocks."""
    n, heads, count, key_dim, _ = blocks.shape
    return blocks.transpose(0, 1, 3, 2, 4).reshape(n, heads, key_dim, 16 * count)[..., :width]


def require_host(arrays: Mapping[str, Any]) -> None:
    """Refuses arrays on a GPU.

    Raises:
        ContractTypeError: one of them is.
    """
    for name, array in arrays.items():
        if array is not None:
            devices.require_host(array, name, "recurrences run on the CPU alone")


def softplus(x: Floats) -> Floats:
    """`ln(1 + exp(x))`."""
    with np.errstate(invalid="ignore"):
        return np.logaddexp(x, 0, dtype=np.float32)


def sigmoid(x: Floats) -> Floats:
    """`1 / (1 + exp(-x))`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def like(array: Any, result: Floats) -> Any:
    """The result in the dtype and the kind of an array."""
    with np.errstate(over="ignore", invalid="ignore"):
        return HOST.like(array, result.astype(HOST.view(array, "q").dtype))


class StateSlots(NamedTuple):
    """The slots of the states that each request reads and writes."""

    sources: npt.NDArray[np.int32]
    """`[B]`, the slot that each request reads."""
    targets: npt.NDArray[np.int32]
    """`[B]`, the slot that it writes."""
    busy: npt.NDArray[np.int64]
    """The requests that are no padding, in ascending order."""

    @staticmethod
    def of(requests: int, available: int, padding: int, *, are_written: bool, **indices: Any) -> StateSlots:
        """The slots of two arguments: those that are read, else the first B, and those that are written, else the same.

        Args:
            requests: B.
            available: S, the slots there are.
            padding: The slot of a request that is padding.
            are_written: Whether states are written: then no two requests have one slot.
            indices: Both arguments `[B]` by their names; or None.

        Raises:
            ContractTypeError, ShapeError, PageTableError: an argument is no array of B integers.
            ContractError: a slot is none of those there are, or written twice.
        """
        (read_name, read), (written_name, written) = indices.items()
        first = np.arange(requests, dtype=np.int32)
        sources = first if read is None else _slots(read_name, read, requests, available, padding)
        targets = sources if written is None else _slots(written_name, written, requests, available, padding)
        busy = np.flatnonzero((sources != padding) & (targets != padding))
        slots, counts = np.unique(targets[busy], return_counts=True)
        if are_written and (counts > 1).any():
            name = read_name if written is None else written_name
            raise ContractError(f"{name}: slot {slots[counts > 1][0]} is written by {counts.max()} requests")
        return StateSlots(sources, targets, busy)


def _slots(name: str, array: Any, requests: int, available: int, padding: int) -> npt.NDArray[np.int32]:
    """The slot of each request; `padding` where it has none.

    Raises:
        ContractTypeError, ShapeError, PageTableError: it is no array of as many integers as requests.
        ContractError: a slot is none of those there are.
    """
    slots = np.asarray(HOST.indices(array, name))
    if len(slots) != requests:
        raise ShapeError(f"{name}: expected {requests} slots, got {len(slots)}")
    wrong = (slots != padding) & ((slots < 0) | (slots >= available))
    if wrong.any():
        request = int(wrong.argmax())
        raise ContractError(f"{name}: request {request}: expected a slot of [0, {available}), got {slots[request]}")
    return slots
