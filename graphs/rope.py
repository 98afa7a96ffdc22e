"""Rotary position embedding: the frequency of each pair of dimensions, and how long contexts stretch it.

Every scaling follows transformers' float32 steps: nearly all frequencies are bit-equal to its own, the rest one
rounding off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Frequencies = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """All frequencies divided by one factor (position interpolation)."""

    factor: float

    def stretch(self, plain: Frequencies, rope: Rope) -> Frequencies:
        del rope
        return plain / np.float32(self.factor)


@dataclass(frozen=True)
class Proportional:
    """The first pairs turn as if all did; the others do not turn."""

    pairs: int
    factor: float = 1.0

    def stretch(self, plain: Frequencies, rope: Rope) -> Frequencies:
        del rope
        stretched = plain / np.float32(self.factor)
        stretched[self.pairs :] = 0
        return stretched


@dataclass(frozen=True)
class Llama3:
    """Long waves are stretched, short ones kept, and those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretch(self, plain: Frequencies, rope: Rope) -> Frequencies:
        del rope
        factor, low, high = np.float32(self.factor), self.low_freq_factor, self.high_freq_factor
        context = self.original_max_position_embeddings
        wavelengths = np.float32(2 * math.pi) * (1 / plain)  # torch divides a scalar by an array in two steps
        blend = (np.float32(context) * (1 / wavelengths) - np.float32(low)) / np.float32(high - low)
        blended = (1 - blend) * plain / factor + blend * plain
        is_long = wavelengths > np.float32(context / low)
        is_short = wavelengths < np.float32(context / high)
        return np.where(is_long, plain / factor, np.where(is_short, plain, blended))


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): frequencies that turn less than `beta_slow` times are stretched, those that turn more
    than `beta_fast` times kept, with a ramp between; attention is sharpened by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @staticmethod
    def sharpening(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
        """The attention factor where a configuration names none."""
        if mscale and mscale_all_dim:
            return Yarn.grown(factor, mscale) / Yarn.grown(factor, mscale_all_dim)
        return Yarn.grown(factor, 1.0)

    @staticmethod
    def grown(factor: float, scale: float) -> float:
        """Return how much longer queries or keys are made for contexts `factor` times as long."""
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    def stretch(self, plain: Frequencies, rope: Rope) -> Frequencies:
        low, high = (self._dimension(turns, rope) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dims - 1)
        span = high - low if high != low else 0.001
        ramp = (np.arange(rope.dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(span)
        plain_share = 1 - np.clip(ramp, np.float32(0), np.float32(1))
        stretched = np.float32(1) / (np.float32(self.factor) * rope.powers())
        return stretched * (1 - plain_share) + plain * plain_share

    def _dimension(self, turns: float, rope: Rope) -> float:
        """The dimension whose wave turns so many times over the original context."""
        context = self.original_max_position_embeddings
        return rope.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Phi-3): a factor for each pair, one set for positions within the original context, one past it.

    transformers takes the second set for all positions as soon as one is past; with keys that stay in a cache that
    would rotate them in two ways, so each position here has its own set for good, as in MAX.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    @staticmethod
    def sharpening(factor: float, original_max_position_embeddings: int) -> float:
        """The attention factor where a configuration names none."""
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))

    def stretch(self, plain: Frequencies, rope: Rope) -> Frequencies:
        del plain
        return _divided(rope, self.short_factor)

    def stretch_past(self, rope: Rope) -> Frequencies:
        """The frequencies of positions from `original_max_position_embeddings` on."""
        return _divided(rope, self.long_factor)


Scaling = Linear | Proportional | Llama3 | Yarn | LongRope


@dataclass(frozen=True)
class Rope:
    """The rotation of one kind of layer."""

    dims: int
    """Dimensions of a head that are rotated, the first ones; all of head_dim but in a few families."""
    theta: float = 10000.0
    scaling: Scaling | None = None

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return getattr(self.scaling, "attention_factor", 1.0)

    def inverse_frequencies(self) -> Frequencies:
        """The frequency of each pair of dimensions, `[dims / 2]` float32, scaling included."""
        plain = np.float32(1) / self.powers()
        return plain if self.scaling is None else self.scaling.stretch(plain, self)

    def past(self) -> tuple[int, Frequencies] | None:
        """A position, and the frequencies from it on, where they differ from those before."""
        if not isinstance(self.scaling, LongRope):
            return None
        return self.scaling.original_max_position_embeddings, self.scaling.stretch_past(self)

    def powers(self) -> Frequencies:
        """Theta ** (2 i / dims): the inverse of the frequencies without scaling."""
        exponents = np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims)
        # The power is rounded once, from float64: NumPy's float32 power is less exact than torch's.
        return np.power(np.float64(np.float32(self.theta)), exponents.astype(np.float64)).astype(np.float32)


def _divided(rope: Rope, factors: tuple[float, ...]) -> Frequencies:
    return np.float32(1) / (np.asarray(factors, np.float32) * rope.powers())
