"""From logits to the next token: greedy, or temperature and nucleus (top-p) sampling with a stream per request."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import integer, shown
from paged_kv.errors import ContractError, ContractTypeError, ShapeError


class Sampler:
    """Chooses one token a request and step.

    `temperature` 0 takes the most likely token, the lowest id among equals. Otherwise logits are divided by it, and
    `top_p` keeps the smallest set of most likely tokens whose probabilities sum to at least that much. Each request
    draws from its own random stream, made from `seed` and its number: one draw a token, so that its text does not
    depend on the requests beside it.

    Raises:
        ContractTypeError: `temperature` or `top_p` is no number, or `seed` no integer.
        ContractError: `temperature` is negative or not finite, `top_p` is outside (0, 1], or `seed` is negative.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        for name, value in (("temperature", temperature), ("top_p", top_p)):
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise ContractTypeError(f"{name} must be a number, not {type(value).__name__}")
        if not 0 <= temperature <= sys.float_info.max:
            raise ContractError(f"temperature must be 0 or a positive number, not {shown(temperature)}")
        if not 0 < top_p <= 1:
            raise ContractError(f"top_p must be above 0 and at most 1, not {shown(top_p)}")
        seed = integer("seed", seed, 0)
        self._temperature = temperature
        self._top_p = top_p
        self._seed = seed
        self._streams: dict[int, np.random.Generator] = {}

    def __call__(self, logits: npt.NDArray[np.float32], requests: Sequence[int]) -> list[int]:
        """The next token of each row of logits `[B, V]`; `requests` has the number of each row's request.

        Raises:
            ShapeError: `logits` is not of two dimensions with a row per request and at least one column.
            ContractError: a row holds NaN or +inf, or only -inf; the message names its request. No stream advanced.
        """
        if logits.ndim != 2 or logits.shape[0] != len(requests) or logits.shape[1] == 0:
            raise ShapeError(f"logits must be [{len(requests)}, vocabulary], not {list(logits.shape)}")
        # The largest logit of a row is finite exactly when the row can be sampled.
        for request, largest in zip(requests, logits.max(axis=1), strict=True):
            if not np.isfinite(largest):
                raise ContractError(f"request {request}: its logits hold NaN or +inf, or are all -inf")
        if self._temperature == 0:
            return [int(token) for token in logits.argmax(axis=1)]
        return [self._draw(row, request) for row, request in zip(logits, requests, strict=True)]

    def _draw(self, logits: npt.NDArray[np.float32], request: int) -> int:
        """One token from the nucleus of one row `[V]`, by inverting its cumulative distribution."""
        scores = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # far below the largest at a tiny temperature: -inf, probability 0
            weights = np.exp((scores - scores.max()) / self._temperature)
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        # The token that reaches top_p is the last one in.
        nucleus = cumulative[: np.searchsorted(cumulative, self._top_p * cumulative[-1]) + 1]
        draw = self._stream(request).random() * nucleus[-1]
        return int(order[np.searchsorted(nucleus, draw, side="right")])

    def _stream(self, request: int) -> np.random.Generator:
        if request not in self._streams:
            seeds = np.random.SeedSequence(self._seed, spawn_key=(request,))
            self._streams[request] = np.random.Generator(np.random.PCG64(seeds))
        return self._streams[request]
