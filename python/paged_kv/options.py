"""What every room agrees on: limits, dtype names, the mark of an unused table entry, and the options of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from paged_kv.errors import ContractError, ContractTypeError, ShapeError

Q_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes of queries, outputs, weights and activations."""
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
KV_DTYPES = (*Q_DTYPES, *FLOAT8_DTYPES)
"""Names of the dtypes of a cache; attention takes the dtype of q, or float8 under any of `Q_DTYPES`."""

HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 512
HEAD_DIMS = f"multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
"""What a head_dim must be, for messages."""

NO_PAGE = 0xFFFFFFFF
"""The page id that fills the entries of a lookup table past a request's pages."""


def is_head_dim(value: int) -> bool:
    """Whether the kernels take this head_dim."""
    return 0 < value <= MAX_HEAD_DIM and value % HEAD_DIM_MULTIPLE == 0


def check_head_dim(name: str, value: int) -> None:
    """Refuses a head_dim, called `name` in the message, that the kernels do not take.

    Raises:
        ShapeError: it is not a multiple of 8 from 8 to 512.
    """
    if not is_head_dim(value):
        raise ShapeError(f"{name} must be a {HEAD_DIMS}, not {value}")


def alibi_slopes(num_heads: int) -> npt.NDArray[np.float32]:
    """The ALiBi slope of each of `num_heads` heads, `[num_heads]` float32, rounded once from float64.

    With n the largest power of two up to `num_heads`, head h < n has 2^(-8 (h + 1) / n); the rest take every other
    slope of a model of 2n heads, 2^(-4 (2 (h - n) + 1) / n).
    """
    n = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (h + 1) / n) for h in range(n)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / n) for h in range(num_heads - n)]
    return np.array(slopes, np.float32)


@dataclass(frozen=True)
class AttentionOptions:
    """What happens between q . k and the output; the formula is in `mojo_ops/attention/README.md`.

    Raises:
        ContractError: a value is not finite or out of range.
        ContractTypeError: a value is not a number.
    """

    sm_scale: float | None = None
    """Multiplies q . k; `1 / sqrt(head_dim)` where None."""
    window_left: int = -1
    """Keeps the last `window_left + 1` tokens; -1 keeps all."""
    logits_soft_cap: float = 0.0
    """Makes a score x into `cap * tanh(x / cap)`; 0 is off."""
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Calibration scales of quantised q, K and V: the stored value times its scale is the meant one."""
    rope_theta: float | None = None
    """Base of a rotary embedding of q and of the cached, un-rotated keys; None where keys are stored as used."""
    rope_scale: float = 1.0
    """Divides the rotary frequencies."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise ContractTypeError(f"{field.name} must be a number, not {type(value).__name__}")
            if not math.isfinite(value):
                raise ContractError(f"{field.name} must be finite, not {value}")
        if isinstance(self.window_left, float | np.floating):
            raise ContractTypeError(f"window_left must be an integer, not {self.window_left}")
        if not -1 <= self.window_left < 2**31:
            raise ContractError(f"window_left must be at least -1 (-1 = off) and below 2^31, not {self.window_left}")
        if self.logits_soft_cap < 0:
            raise ContractError(f"logits_soft_cap must be at least 0 (0 = off), not {self.logits_soft_cap}")
        for name in ("rope_theta", "rope_scale"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ContractError(f"{name} must be positive, not {value}")

    def numbers(self, head_dim: int) -> npt.NDArray[np.float32]:
        """The op's `options` operand, `[5]`: scale of q . k, soft cap, v_scale, rope_theta (0 = off), rope_scale."""
        scale = 1 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale
        return np.array(
            [
                scale * self.q_scale * self.k_scale,
                self.logits_soft_cap,
                self.v_scale,
                self.rope_theta or 0.0,
                self.rope_scale,
            ],
            np.float32,
        )
