"""The cases: a seed and a number make one call, its arguments and what was done to them, each time the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from hostile.calls_attention import Single, Wrapper
from hostile.calls_cascade import Levels, SharedPrefix
from hostile.calls_mla import Latent
from hostile.calls_page import Append, AppendLatent, Positions, SeqLens
from hostile.calls_recurrences import NewTokens, Prompts
from hostile.calls_states import Functional, Merge
from hostile.calls_torch import TorchAppend, TorchAttention, TorchGather, TorchLinear
from hostile.memory import Memory, values
from hostile.model import Expected, Invalid
from hostile.objects import objects
from hostile.pools import Manager, Pool
from hostile.transforms import BENIGN, OF_ARRAYS, Arguments, Change
from paged_kv.errors import ContractError, ContractTypeError
from support.compare import assert_close, assert_lse_close

CALLS: list[Any] = [
    *(Wrapper("decode"), Wrapper("decode"), Wrapper("decode"), Single("decode"), Single("decode")),
    *(Append("at"), Append("last"), Append("dense"), AppendLatent("at"), AppendLatent("dense")),
    *(Merge("two"), Merge("many"), Merge("in_place"), Positions(), SeqLens(), Functional(), Functional()),
    *(Pool(), Manager()),
    *(Wrapper("paged"), Wrapper("paged"), Wrapper("ragged"), Wrapper("mixed"), Single("prefill")),
    *(Levels(), Levels(), SharedPrefix("decode"), SharedPrefix("prefill"), Latent()),
    *(TorchAttention(), TorchAttention(), TorchAppend(), TorchGather(), TorchLinear()),
    *(NewTokens("gated_delta_rule_decode"), NewTokens("gated_delta_rule_decode_pretranspose")),
    *(NewTokens("selective_state_update"), Prompts()),
]
MOST_CHARACTERS = 1500
"""The longest line of an error's message."""


class Wrong(Exception):
    """A case that is neither right nor refused."""


class Case:
    """One generated case. `describe` says what it is, `run` raises `Wrong` or what the call should not have raised."""

    def __init__(self, seed: int, number: int) -> None:
        self._seeds = [seed, number]
        self.call = CALLS[self._rng(0).integers(len(CALLS))]
        self.has_to_work = True
        self.done: list[str] = []

    def describe(self) -> str:
        if not isinstance(self.call, Pool | Manager):
            self._build()
        return f"{self.call.name}: {'; '.join(self.done) or 'as it should be'}"

    def run(self) -> str:
        """Return whether it was "right" or "refused"."""
        if isinstance(self.call, Pool | Manager):
            self.call.run(self._rng(1))
            return "right"
        (ours, given), (theirs, modelled) = self._build(), self._build()
        states: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for act, expect in self.call.steps():
            before = ours.contents()
            if before != theirs.contents():
                raise Wrong("the memories differ before the step: a fault of the harness")
            found = self._attempt(act, {name: argument.value for name, argument in given.items()}, states[0])
            if found is None:
                if ours.contents() != before:
                    raise Wrong("refused, but something was written")
                return "refused"
            states[1].pop("written", None)
            try:
                expected = expect(modelled, states[1])
            except Invalid as reason:
                raise Wrong(f"accepted, though invalid: {reason}") from reason
            self._compare(found, expected)
            for view, wanted in states[1].get("written", ()):
                name = next(n for n, argument in modelled.items() if argument.view is view)
                self._compare([given[name].view], [wanted])
                view[...] = given[name].view
            if ours.contents() != theirs.contents():
                raise Wrong("other memory was written than should be")
        return "right"

    def _attempt(self, act: Callable[..., Any], given: dict[str, Any], state: dict[str, Any]) -> list[Any] | None:
        """The results of a step; None where it was refused, as it may be."""
        try:
            found = act(given, state)
            return [] if found is None else found
        except (ContractError, ContractTypeError) as error:
            message = str(error)
            if not message or "\n" in message or len(message) > MOST_CHARACTERS:
                raise Wrong(f"a message of {len(message)} characters: {message[:300]!r}") from error
            if self.has_to_work:
                raise Wrong(f"a valid call was refused: {type(error).__name__}: {message}") from error
            return None

    def _compare(self, found: list[Any], expected: list[Expected]) -> None:
        if len(found) != len(expected):
            raise Wrong(f"{len(found)} results, expected {len(expected)}")
        for i, (result, wanted) in enumerate(zip(found, expected, strict=True)):
            actual = values(result)
            if actual.dtype != wanted.dtype or actual.shape != wanted.values.shape:
                raise Wrong(f"result {i}: {actual.dtype} {actual.shape}, not {wanted.dtype} {wanted.values.shape}")
            if wanted.dtype == bool:  # of up to 2^31 elements, eight bytes each in float64
                if not np.array_equal(actual, wanted.values):
                    raise Wrong(f"result {i}: {actual[:100].tolist()!r} instead of {wanted.values[:100].tolist()!r}")
                continue
            unknown = np.isnan(wanted.values)
            a, e = (np.where(unknown, 0.0, x.astype(np.float64)) for x in (actual, wanted.values))
            try:
                if wanted.is_lse:
                    for one, other, tolerance in zip(
                        a.flat, e.flat, np.broadcast_to(wanted.tolerance, e.shape).flat, strict=True
                    ):
                        assert_lse_close(np.array(one), np.array(other), tol=float(tolerance), what=f"result {i}")
                elif not np.any(wanted.tolerance) or wanted.dtype.kind in "iu":
                    if not np.array_equal(a, e):
                        raise Wrong(f"result {i}: {a.tolist()!r:.300} instead of {e.tolist()!r:.300}")
                else:
                    rel = np.broadcast_to(np.asarray(wanted.tolerance), e.shape[:-1])
                    for at in np.ndindex(e.shape[:-1]):
                        assert_close(a[at], e[at], rel=float(rel[at]), what=f"result {i}, row {at}")
            except AssertionError as error:
                raise Wrong(str(error)) from error

    def _build(self) -> tuple[Memory, Arguments]:
        """The arguments in fresh memory; which transformations were made goes to `done`."""
        rng, memory = self._rng(1), Memory()
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            given = self.call.arguments(rng, memory)
            self.done, self.has_to_work = [], True
            for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
                arrays = [name for name, argument in given.items() if argument.view is not None]
                name = str(
                    rng.choice(arrays if arrays and rng.random() < 0.7 else [name for name in given if name[0] != "_"])
                )
                seed = int(rng.integers(2**32))
                self._transform(Change(np.random.default_rng(seed), memory, given, name))
        return memory, given

    def _transform(self, change: Change) -> None:
        if change.argument.view is None:
            things = objects()
            number = int(change.rng.integers(len(things)))
            change.argument.value, label, benign = things[number](), f"thing {number}", False
        elif change.argument.view.size > 10**6:  # by a stride of 0: it cannot be copied
            return
        else:
            transform = OF_ARRAYS[change.rng.integers(len(OF_ARRAYS))]
            try:
                made = transform(change)
            except (
                TypeError,
                ValueError,
                OverflowError,
            ):  # of what another transformation left, NumPy cannot make this
                made = None
            if made is None:
                return
            label, benign = f"{transform.__name__}: {made}", transform in BENIGN
            if self.call.name.startswith("torch_"):  # an operator takes nothing else
                benign = benign and change.argument.kind == "torch"
        self.done.append(f"{change.name}: {label}")
        self.has_to_work &= benign

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([*self._seeds, stream])
