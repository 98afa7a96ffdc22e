"""The merges of a SentencePiece vocabulary, where a merge is any way to make a token of two others.

A vocabulary of 262,144 tokens has 1.2 million places to cut one in two, so all parts are looked up at once, by hashes
in NumPy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_BASE = 0x9E3779B97F4A7C15
"""The hash of a text is the sum of (code + 1) * _BASE^i over its characters, i from 1 on, modulo 2^64."""


def merges_by_score(
    tokens: list[str], scores: npt.NDArray[np.floating[Any]], is_made: npt.NDArray[np.bool_]
) -> list[tuple[str, str]]:
    """All ways to make a token of two; the best score first. Of one token's, and of equal scores, first what has the
    longer left part, then the longer right part, as transformers orders them; then in the order of the tokens.

    Args:
        tokens: `[V]`, each of them once, of at most 65,536 characters. Empty ones are no parts.
        scores: `[V]`, finite.
        is_made: `[V]`, the tokens that are made by merges.

    Raises:
        ValueError: two texts have one hash, which only texts made for this have.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    starts = np.cumsum(lengths) - lengths
    table = _HashTable("".join(tokens), starts, lengths)
    # In this order of tokens, and from the last cut of each on, merges are sorted already but for equal scores.
    made = np.flatnonzero(is_made & (lengths > 1))
    made = made[np.argsort(-scores[made].astype(np.float64), kind="stable")]
    cuts = lengths[made] - 1
    token = np.repeat(made, cuts)
    left_size = np.repeat(np.cumsum(cuts), cuts) - np.arange(len(token))
    left = table.find(starts[token], left_size)
    token, left_size, left = (each[left >= 0] for each in (token, left_size, left))
    right = table.find(starts[token] + left_size, lengths[token] - left_size)
    token, left, right = (each[right >= 0] for each in (token, left, right))
    place = np.zeros(len(token), np.int64)
    np.cumsum(scores[token[1:]] != scores[token[:-1]], out=place[1:])
    sizes = 65536 - lengths[left] << 16 | 65536 - lengths[right]
    order = np.argsort(place << 34 | sizes, kind="stable")
    # Where two texts had one hash, a pair would make another token, whose pair it is too, or none: `BPE` refuses that.
    both = np.sort(left * len(tokens) + right)
    if np.any(both[1:] == both[:-1]):
        raise ValueError("two texts of tokens have one hash")
    texts = np.array(tokens, object)
    return list(zip(texts[left[order]].tolist(), texts[right[order]].tolist(), strict=True))


class _HashTable:
    """Finds those parts of a text that are listed, by hashes with open addressing."""

    def __init__(self, text: str, starts: Indices, lengths: Indices) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        powers, self._inverse = (
            np.cumprod(np.append(np.uint64(1), np.full(len(text), base, np.uint64)))
            for base in (_BASE, pow(_BASE, -1, 1 << 64))
        )
        self._sums = np.zeros(len(text) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * powers[1:], out=self._sums[1:])
        bits = 3 + len(starts).bit_length()
        self._shift, self._mask = np.uint64(64 - bits), (1 << bits) - 1
        self._slots = np.full(1 << bits, -1, np.int64)
        self._hashes = self._hash(starts, lengths)
        waiting = np.flatnonzero(lengths)
        slot = (self._hashes[waiting] >> self._shift).astype(np.int64)
        while len(waiting):
            free = self._slots[slot] < 0
            self._slots[slot[free]] = waiting[free]
            displaced = self._slots[slot] != waiting
            waiting, slot = waiting[displaced], slot[displaced] + 1 & self._mask

    def find(self, start: Indices, size: Indices) -> Indices:
        """The index of a listed text with the hash of `size` characters from `start` on; -1 where there is none."""
        keys = self._hash(start, size)
        indices = np.full(len(keys), -1, np.int64)
        waiting, slot = np.arange(len(keys)), (keys >> self._shift).astype(np.int64)
        while len(waiting):
            listed = self._slots[slot]
            same = (listed >= 0) & (self._hashes[listed] == keys[waiting])
            indices[waiting[same]] = listed[same]
            others = (listed >= 0) & ~same
            waiting, slot = waiting[others], slot[others] + 1 & self._mask
        return indices

    def _hash(self, start: Indices, size: Indices) -> npt.NDArray[np.uint64]:
        return (self._sums[start + size] - self._sums[start]) * self._inverse[start]
