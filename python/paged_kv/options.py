"""The options of an attention call, checked once and packed as the op takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from paged_kv.errors import ContractError, ContractTypeError


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
            if value is None:
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
