"""Categorical distributions over a vocabulary: the tokens that top-k, top-p, min-p and typical-p keep, and drawing one.

The most likely tokens come first, of equals the lowest id; each of top-k, top-p and min-p keeps a beginning of that
order, typical-p some of it, and one number from [0, 1) chooses by its cumulative distribution. No row is sorted as a
whole but for typical-p. Weights `[V]` are probabilities as multiples of the largest one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Logits: TypeAlias = npt.NDArray[np.float32]
ResultT = TypeVar("ResultT")

_ROWS_A_THREAD = 1 << 18
"""Logits of the rows that make a thread of their own worth its start, some 0.1 ms."""


def in_threads(calls: Sequence[Callable[[], ResultT]], num_drawn: int, vocab_size: int) -> list[ResultT]:
    """The results of calls, of which so many draw from a row of `vocab_size`: in threads where that is worth it."""
    threads = min(num_drawn, os.cpu_count() or 1, num_drawn * vocab_size // _ROWS_A_THREAD)
    if threads < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(threads) as pool:  # NumPy computes without the interpreter's lock
        return list(pool.map(lambda call: call(), calls))


def uniform(seed: int, index: int, place: int) -> float:
    """The number from [0, 1) at a place of a stream: that of a seed and an index."""
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,)))
    stream.advance(place)
    return float(np.random.Generator(stream).random())


def draw(weights: Floats, number: float, *, top_p: float = 1.0, min_p: float = 0.0, typical_p: float = 1.0) -> int:
    """The token of `[V]` weights that a number from [0, 1) draws, of those that the options keep.

    `top_p` and `typical_p` are from above 0 to 1, `min_p` from 0 to 1; each looks at what those before it keep.
    """
    total = mass = float(weights.sum())
    count, likely = weights.size, weights
    if top_p < 1:
        count, mass = nucleus(weights, total, top_p)
    if min_p > 0:
        above = np.compress(weights >= min_p, weights)
        if above.size < count:
            count, likely, total = above.size, above, float(above.sum())
            mass = total
    if typical_p < 1:
        return _draw_typical(weights, count, typical_p, number)
    rank, value, _ = _reach(likely, total, number * mass)
    if rank >= count or value == 0:  # by rounding
        rank = min(count, int(np.count_nonzero(weights))) - 1
        value = np.sort(weights)[-1 - rank]
    places = np.flatnonzero(weights == value)
    return int(places[0 if places.size == 1 else rank - np.count_nonzero(weights > value)])


def nucleus(weights: Floats, total: float, top_p: float) -> tuple[int, float]:
    """The size of the smallest set of largest weights whose sum is at least `top_p` of the total, and that sum."""
    rank, _, mass = _reach(weights, total, float(np.nextafter(top_p * total, 0)))
    return rank + 1, mass


def _draw_typical(weights: Floats, count: int, typical_p: float, uniform: float) -> int:
    """A token of those that `typical_p` keeps of the `count` most likely ones."""
    order = np.argsort(-weights, kind="stable")[: min(count, int(np.count_nonzero(weights)))]
    likely = weights[order]
    shares, logs = likely / likely.sum(), np.log(likely) - np.log(likely.sum())
    distances = np.abs(logs - shares @ logs)
    nearest = np.argsort(distances, kind="stable")
    last = int(np.searchsorted(np.cumsum(shares[nearest]), typical_p))
    is_typical = distances <= distances[nearest[min(last, nearest.size - 1)]]
    sums = np.cumsum(shares[is_typical])
    rank = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(order[is_typical][min(rank, sums.size - 1)])


def weights_of(scores: Logits, temperature: float) -> Floats:
    """The weights of `[V]` scores, some of them finite, at a temperature above 0."""
    weights = np.subtract(scores, scores.max(), dtype=np.float64)
    if temperature != 1:
        with np.errstate(over="ignore"):  # far below the largest at a tiny temperature: -inf, probability 0
            weights /= temperature
    return np.exp(weights, out=weights)


_SMALL = 4096
"""So many weights are sorted."""
_SAMPLE = 1024
_MARGIN = 64
"""Weights of a sample, on either side of the guess: four standard deviations, where the weights are alike."""


def _reach(weights: Floats, total: float, mass: float) -> tuple[int, float, float]:
    """The first of some weights, from the largest down, at which their running sum exceeds `mass`.

    A sample says about which it is. The weights around it are sorted; of those above it only the sum is wanted.

    Args:
        weights: In any order; finite, none below 0.
        total: Their sum.
        mass: Below it.

    Returns:
        Its rank from 0, the weight, the running sum with it.
    """
    rank, above, rest = 0, 0.0, weights
    while (size := rest.size) > _SMALL:
        sample = np.sort(rest[:: size // _SAMPLE])[::-1]
        sums = np.cumsum(sample)
        share = (mass - above) / total if total > mass - above else 1.0  # not above 1 but by rounding
        guess = int(np.searchsorted(sums, sums[-1] * share))
        high, low = sample[max(guess - _MARGIN, 0)], sample[min(guess + _MARGIN, sample.size - 1)]
        # compress, not rest[is_upper]: that one branches at each weight, which takes up to eight times as long.
        is_upper = rest > high
        in_upper, others = int(np.count_nonzero(is_upper)), rest
        if in_upper <= size // 2:
            sum_of_upper = float(np.compress(is_upper, rest).sum())
        else:
            others = np.compress(~is_upper, rest)
            sum_of_upper = total - float(others.sum())
        if above + sum_of_upper > mass:
            rest, total = np.compress(is_upper, rest), sum_of_upper
        else:
            rank, above, total = rank + in_upper, above + sum_of_upper, total - sum_of_upper
            band = np.compress((others <= high) & (others >= low), others)
            sum_of_band = float(band.sum())
            if above + sum_of_band > mass or in_upper + band.size == size:
                if high == low > 0:  # all of them are equal
                    place = min(int((mass - above) / high), band.size - 1)
                    return rank + place, float(high), above + (place + 1) * float(high)
                rest, total = band, sum_of_band
            else:
                rank, above, total = rank + band.size, above + sum_of_band, total - sum_of_band
                rest = np.compress(others < low, others)
        if rest.size > size // 2:  # the sample misled
            half = rest.size // 2
            rest = np.partition(rest, half)
            sum_of_upper = float(rest[half:].sum())
            if above + sum_of_upper > mass:
                rest, total = rest[half:], sum_of_upper
            else:
                rank, above, total = rank + rest.size - half, above + sum_of_upper, total - sum_of_upper
                rest = rest[:half]
    rest = np.sort(rest)[::-1]
    sums = above + np.cumsum(rest)
    place = min(int(np.searchsorted(sums, mass, side="right")), rest.size - 1)
    return rank + place, float(rest[place]), float(sums[place])


def largest(scores: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest scores, of equals the lowest, in ascending order."""
    bar = np.partition(scores, -count)[-count]
    above = np.flatnonzero(scores > bar)
    return np.sort(np.concatenate([above, np.flatnonzero(scores == bar)[: count - above.size]]))
