"""Sampling: FlashInfer's `sampling` module on arrays of the host, by the engine's own sampler (`paged_kv.categorical`).

Letters in shapes: U rows of V tokens, R samples. Probabilities and logits are float32, float16 or bfloat16; rows of
probabilities need not sum to 1, and shares such as `top_p` are of their sum. Of equal probabilities the lowest ids are
kept. `top_k`, `top_p`, `min_p` and `temperature` are one number, or an array of one for each of the U rows. Results
have the kind of the first argument. `enable_pdl`, `is_deterministic` and `deterministic` are accepted, without effect:
everything here is deterministic.

Raises: `ContractTypeError`, `ShapeError` or `ContractError` for what is no array on the host of such a dtype and shape,
a number that is out of range, a row of probabilities with NaN, infinite or negative ones or a sum of 0, and a row of
logits with NaN or +inf, or only -inf.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import LARGEST_INDEX, flag, integer, one_of, shown
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import DTYPES, is_float
from paged_kv.arrays.host import HOST
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.calls.host_arrays import Written, checked, write_all
from paged_kv.calls.scalars import is_array
from paged_kv.categorical import Floats, draw, in_threads, largest, nucleus, uniform, weights_of
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.options import check_number

__all__ = [
    "Draws",
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

Rows: TypeAlias = npt.NDArray[Any]
PerRow: TypeAlias = SupportsDLPack | float
_ORDERS = ("top_k_first", "joint")
_LARGEST_SEED = 2**64 - 1
_TINY = 2.0**-126
_RANGES = {
    "temperature": ("a positive number", _TINY, float("inf")),
    "top_p": ("a number above 0 and at most 1", _TINY, 1.0),
    "min_p": ("a number from 0 to 1", 0.0, 1.0),
}


@dataclass(frozen=True)
class Draws:
    """The last arguments of the calls that draw, in this order."""

    indices: SupportsDLPack | None = None
    """`[R]` int32 or int64: the row of each sample, whose tokens have that dtype; None: sample i is of row i, int32."""
    deterministic: bool = True
    generator: Any = None
    """A `torch.Generator` or a `numpy.random.Generator` that gives the seed where that is None; None: torch's own for
    tensors, the system's entropy for other arrays."""
    check_nan: bool = False
    """True: NaN is refused even with `return_valid`."""
    seed: Any = None
    """Sample i draws with number `offset` of the stream of `seed` and i, as sample i of an engine's request with that
    seed at its token `offset`. An integer from 0 to 2^64 - 1, or `[1]` or `[R]` of int64 or uint64."""
    offset: Any = None
    """As `seed`; None: 0."""
    return_valid: bool = False
    """True: also returns `[R]` bool, false for samples of rows that would be refused, whose token is 0."""

    def numbers(self, like: Any, samples: int) -> list[Callable[[int], float]]:
        """For each sample a function of j: the j-th number from [0, 1) that it draws with."""
        seeds = _integers("seed", self._seed(like) if self.seed is None else self.seed, samples)
        places = _integers("offset", 0 if self.offset is None else self.offset, samples)
        return [
            lambda j, seed=seed, at=at, i=i: uniform(seed, i, at + j)  # type: ignore[misc]
            for i, (seed, at) in enumerate(zip(seeds, places, strict=True))
        ]

    def _seed(self, like: Any) -> int:
        torch: Any = sys.modules.get("torch")
        generator = self.generator
        if isinstance(generator, np.random.Generator):
            return int(generator.integers(2**63))
        if torch is not None and isinstance(like if generator is None else generator, torch.Tensor | torch.Generator):
            device = "cpu" if generator is None else generator.device
            return int(torch.randint(2**63 - 1, (1,), generator=generator, dtype=torch.int64, device=device))
        if generator is not None:
            raise ContractTypeError(f"generator: expected one of torch or NumPy, got {shown(generator)}")
        return secrets.randbits(63)


def softmax(logits: ArrayT, temperature: PerRow | None = None, enable_pdl: bool | None = None) -> ArrayT:
    """Probabilities `[U, V]` float32 of logits `[U, V]`, divided by a positive `temperature` (None: 1).

    Computed in float64 and rounded once.
    """
    del enable_pdl
    rows = _rows("logits", logits)
    heat = _per_row("temperature", 1.0 if temperature is None else temperature, rows)
    return _each_row(logits, "logits", rows, lambda row, i: _shares(weights_of(row, heat[i])), np.float32)


def sampling_from_probs(probs: ArrayT, *args: Any, **options: Any) -> Any:
    """A token of each row of probabilities.

    Args:
        probs: `[U, V]`.
        args, options: Those of `Draws`, in its order.

    Returns:
        Tokens `[R]`; and with `return_valid` whether each is valid.
    """
    return _sampled("probs", probs, Draws(*args, **options))


def sampling_from_logits(logits: ArrayT, *args: Any, **options: Any) -> Any:
    """`sampling_from_probs` of the softmax of logits `[U, V]`."""
    return _sampled("logits", logits, Draws(*args, **options))


def top_p_sampling_from_probs(probs: ArrayT, top_p: PerRow, *args: Any, **options: Any) -> Any:
    """`sampling_from_probs` of the fewest most likely tokens that sum to at least `top_p`, above 0 and at most 1."""
    return _sampled("probs", probs, Draws(*args, **options), top_p=top_p)


def top_k_sampling_from_probs(probs: ArrayT, top_k: SupportsDLPack | int, *args: Any, **options: Any) -> Any:
    """`sampling_from_probs` of the `top_k` most likely tokens, at least 1; V and more keep all."""
    return _sampled("probs", probs, Draws(*args, **options), top_k=top_k)


def min_p_sampling_from_probs(probs: ArrayT, min_p: PerRow, *args: Any, **options: Any) -> Any:
    """`sampling_from_probs` of tokens at least `min_p` times, from 0 to 1, as likely as the most likely one."""
    return _sampled("probs", probs, Draws(*args, **options), min_p=min_p)


def top_k_top_p_sampling_from_probs(
    probs: ArrayT,
    top_k: SupportsDLPack | int,
    top_p: PerRow,
    indices: SupportsDLPack | None = None,
    filter_apply_order: str = "top_k_first",
    *args: Any,
    **options: Any,
) -> Any:
    """`sampling_from_probs` of tokens that both `top_k` and `top_p` keep.

    Args:
        filter_apply_order: "top_k_first": `top_p` is a share of what `top_k` keeps; "joint": of the whole row.
        args, options: Those of `Draws` after `indices`.
    """
    one_of("filter_apply_order", filter_apply_order, _ORDERS)
    joint = filter_apply_order == "joint"
    return _sampled("probs", probs, Draws(indices, *args, **options), top_k=top_k, top_p=top_p, joint=joint)


def top_k_top_p_sampling_from_logits(
    logits: ArrayT,
    top_k: SupportsDLPack | int,
    top_p: PerRow,
    indices: SupportsDLPack | None = None,
    filter_apply_order: str = "top_k_first",
    *args: Any,
    **options: Any,
) -> Any:
    """`top_k_top_p_sampling_from_probs` of the softmax of logits `[U, V]`."""
    one_of("filter_apply_order", filter_apply_order, _ORDERS)
    joint = filter_apply_order == "joint"
    return _sampled("logits", logits, Draws(indices, *args, **options), top_k=top_k, top_p=top_p, joint=joint)


def top_p_renorm_probs(probs: ArrayT, top_p: PerRow, is_deterministic: bool = False) -> ArrayT:
    """The probabilities that `top_p` keeps, divided by their sum, and 0: `[U, V]` in the dtype of `probs`."""
    del is_deterministic
    return _renormed(probs, "top_p", top_p)


def top_k_renorm_probs(probs: ArrayT, top_k: SupportsDLPack | int, is_deterministic: bool = False) -> ArrayT:
    """The `top_k` largest probabilities, divided by their sum, and 0: `[U, V]` in the dtype of `probs`."""
    del is_deterministic
    return _renormed(probs, "top_k", top_k)


def top_k_mask_logits(logits: ArrayT, top_k: SupportsDLPack | int) -> ArrayT:
    """The `top_k` largest logits, and -inf: `[U, V]` in the dtype of `logits`."""
    rows = _rows("logits", logits)
    counts = _per_row("top_k", top_k, rows)
    return _each_row(logits, "logits", rows, lambda row, i: _only(row, largest(row, counts[i]), -np.inf))


def chain_speculative_sampling(
    draft_probs: ArrayT,
    draft_token_ids: SupportsDLPack,
    target_probs: SupportsDLPack,
    maybe_output_accepted_token_num: Any = None,
    maybe_output_emitted_draft_token_num: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    seed: Any = None,
    offset: Any = None,
) -> tuple[ArrayT, Any, Any]:
    """Accepts drafts by speculative sampling (arXiv 2302.01318): tokens have the distribution of the target.

    Draft j of a request is accepted where `u p < q`, with a random number u and its probabilities p by the draft and q
    by the target. The first that is not is replaced by a draw from `max(q - p, 0)`; after all a token is drawn from the
    target's last row.

    Args:
        draft_probs: `[R, n, V]`.
        draft_token_ids: `[R, n]`, any integers from 0 to V - 1.
        target_probs: `[R, n + 1, V]`.
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: `[R]` int32, to which the counts are
            added, and which are returned; None: new ones.
        deterministic, generator, seed, offset: As in `Draws`; a request draws with n + 1 numbers from `offset` on.

    Returns:
        Tokens `[R, n + 1]` int32, -1 after the last; how many drafts would be accepted each by itself `[R]`; and how
        many were emitted `[R]`.
    """
    drafts = _rows("draft_probs", draft_probs, 3)
    batch, n, size = drafts.shape
    targets = _rows("target_probs", target_probs, 3)
    if targets.shape != (batch, n + 1, size):
        raise ShapeError(f"target_probs: expected shape {[batch, n + 1, size]}, got {list(targets.shape)}")
    _require_host(draft_token_ids, "draft_token_ids")
    ids = HOST.indices(draft_token_ids, "draft_token_ids", 2)
    if ids.shape != (batch, n):
        raise ShapeError(f"draft_token_ids: expected shape {[batch, n]}, got {list(ids.shape)}")
    _check_below("draft_token_ids", ids, size)
    for name, rows in (("draft_probs", drafts), ("target_probs", targets)):
        _valid(name, rows.reshape(-1, size))
    tokens, counts = np.full((batch, n + 1), -1, np.int32), np.zeros((2, batch), np.int32)
    numbers = Draws(None, deterministic, generator, False, seed, offset).numbers(draft_probs, batch)
    for r, number in enumerate(numbers):
        at = np.arange(n)
        p, q = drafts[r, at, ids[r]].astype(np.float64), targets[r, at, ids[r]].astype(np.float64)
        accepted = np.array([number(j) for j in range(n)]) * p < q
        emitted = n if accepted.all() else int(accepted.argmin())
        weights = target = targets[r, emitted].astype(np.float64)
        if emitted < n:
            weights = np.maximum(target - drafts[r, emitted], 0)
        if not weights.any():  # the two differ by rounding alone
            weights = target
        tokens[r, :emitted], tokens[r, emitted] = ids[r, :emitted], draw(weights / weights.max(), number(n))
        counts[:, r] = accepted.sum(), emitted
    outs = {
        "maybe_output_accepted_token_num": maybe_output_accepted_token_num,
        "maybe_output_emitted_draft_token_num": maybe_output_emitted_draft_token_num,
    }
    written = [None if out is None else Written.of(name, out, [batch], ["int32"]) for name, out in outs.items()]
    read = {"draft_probs": draft_probs, "draft_token_ids": draft_token_ids, "target_probs": target_probs}
    write_all([(into, ..., into.view + new) for into, new in zip(written, counts, strict=True) if into], read)
    of_accepted, of_emitted = (
        HOST.like(draft_probs, new) if out is None else out for out, new in zip(outs.values(), counts, strict=True)
    )
    return HOST.like(draft_probs, tokens), of_accepted, of_emitted


def _sampled(
    name: str,
    array: Any,
    draws: Draws,
    *,
    top_k: Any = LARGEST_INDEX,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    joint: bool = False,
) -> Any:
    """A token of each sample, of those that are kept of its row."""
    rows, is_logits = _rows(name, array), name == "logits"
    counts, shares, least = (
        _per_row(what, value, rows) for what, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p))
    )
    of = np.arange(len(rows), dtype=np.int32)
    if draws.indices is not None:
        _require_host(draws.indices, "indices")
        of = checked("indices", draws.indices, [None], ["int32", "int64"])
        _check_below("indices", of, len(rows))
    returns_valid, checks_nan = flag("return_valid", draws.return_valid), flag("check_nan", draws.check_nan)
    valid = _valid(name, rows, refuse=not returns_valid or (checks_nan and bool(np.isnan(rows).any())))

    def token(sample: int, number: Callable[[int], float]) -> int:
        i = int(of[sample])
        if not valid[i]:
            return 0
        row = rows[i]
        weights = weights_of(row, 1.0) if is_logits else row.astype(np.float64) / float(row.max())
        count, share = counts[i], shares[i]
        if joint and share < 1:
            count, share = min(count, nucleus(weights, float(weights.sum()), share)[0]), 1.0
        if count == row.size:
            return draw(weights, number(0), top_p=share, min_p=least[i])
        ids = largest(row, count)
        return int(ids[draw(weights[ids], number(0), top_p=share, min_p=least[i])])

    numbers = draws.numbers(array, len(of))
    calls = [partial(token, sample, number) for sample, number in enumerate(numbers)]
    tokens = HOST.like(array, np.array(in_threads(calls, len(calls), rows.shape[1]), of.dtype))
    return (tokens, HOST.like(array, valid[of])) if returns_valid else tokens


def _require_host(array: Any, name: str) -> None:
    devices.require_host(array, name, "sampling runs on the CPU alone")


def _rows(name: str, array: Any, ndim: int = 2) -> Rows:
    """Rows of at least one token, as float32."""
    _require_host(array, name)
    view = checked(name, array, [None] * ndim)
    if not view.shape[-1]:
        raise ShapeError(f"{name}: expected at least one token, got shape {list(view.shape)}")
    return view if view.dtype == np.float32 else view.astype(np.float32)


def _valid(name: str, rows: Rows, refuse: bool = True) -> npt.NDArray[np.bool_]:
    """Whether each row can be drawn from; where `refuse`, all can.

    Raises:
        ContractError: a row cannot, and `refuse`.
    """
    if name == "logits":
        legal, wrong = "logits", "NaN or +inf, or all of them -inf"
        valid = np.array([np.isfinite(row.max()) for row in rows], bool)
    else:
        legal, wrong = "probabilities", "NaN, negative or infinite ones, or a sum of 0"
        valid = np.array([row.min() >= 0 and 0 < row.max() < np.inf for row in rows], bool)
    if refuse and not valid.all():
        raise ContractError(f"{name}: row {int(valid.argmin())}: expected {legal}, got {wrong}")
    return valid


def _each_row(array: Any, name: str, rows: Rows, make: Callable[[Rows, int], Rows], dtype: Any = None) -> Any:
    """What `make` gives of each valid row, in the kind of `array` and its dtype where `dtype` is None."""
    _valid(name, rows)
    result = np.empty(rows.shape, np.float32)
    for i, row in enumerate(rows):
        result[i] = make(row, i)
    return HOST.like(array, HOST.astype(result, dtype or HOST.view(array, name).dtype))


def _shares(weights: Floats) -> Floats:
    return weights / weights.sum()


def _renormed(probs: Any, name: str, value: Any) -> Any:
    rows = _rows("probs", probs)
    numbers = _per_row(name, value, rows)

    def renormed(row: Rows, i: int) -> Floats:
        weights, count = row.astype(np.float64), numbers[i]
        if name == "top_p":
            count = nucleus(weights, float(weights.sum()), count)[0] if count < 1 else row.size
        return _shares(_only(weights, largest(row, count), 0))

    return _each_row(probs, "probs", rows, renormed)


def _only(row: Rows, ids: npt.NDArray[np.int64], other: float) -> Rows:
    """A row with another number in all places but `ids`."""
    result = np.full_like(row, other)
    result[ids] = row[ids]
    return result


def _per_row(name: str, value: Any, rows: Rows) -> Sequence[Any]:
    """A number for each row, checked; `top_k` is at most V."""
    if not is_array(value):
        return [_number(name, value, rows)] * len(rows)
    _require_host(value, name)
    view = checked(name, value, [len(rows)], [each for each in DTYPES if each != "bool"])
    numbers = (view.astype(np.float64) if is_float(view.dtype) else view).tolist()
    return [_number(name, number, rows) for number in numbers]


def _number(name: str, value: Any, rows: Rows) -> float:
    if name == "top_k":
        return min(integer(name, value, 1), rows.shape[1])
    check_number(name, value)  # which refuses what is nearer to 0 than _TINY
    words, least, most = _RANGES[name]
    if not least <= value <= most:
        raise ContractError(f"{name}: expected {words}, got {shown(value)}")
    return float(value)


def _check_below(name: str, indices: Rows, most: int) -> None:
    wrong = (indices < 0) | (indices >= most)
    if wrong.any():
        raise ContractError(f"{name}: expected 0 to {most - 1}, got {indices[wrong][0]}")


def _integers(name: str, value: Any, samples: int) -> list[int]:
    """A seed or an offset of each sample."""
    if not is_array(value):
        return [integer(name, value, 0, _LARGEST_SEED)] * samples
    _require_host(value, name)
    view = checked(name, value, [None], ["int64", "uint64"])
    if len(view) not in (1, samples) or view.min(initial=0) < 0:
        raise ShapeError(f"{name}: expected 1 or {samples} entries from 0 on, got {len(view)}")
    return [int(number) for number in np.broadcast_to(view, samples)]
