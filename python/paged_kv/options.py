"""Names and limits that every package shares: limits, dtype names, the mark of an unused table entry, and the options
of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import one_of, shown
from paged_kv.call_layouts import LATENT_OPTIONS, SOFTMAX_OPTIONS
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.kv_formats import CODE_DTYPES, TABLE, Codes

Q_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes of queries, outputs, weights and activations."""
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
KV_DTYPES = (*Q_DTYPES, *FLOAT8_DTYPES)
"""Names of the dtypes of a cache; attention takes the dtype of q, or float8 under any of `Q_DTYPES`."""

CacheRotation = Literal["hadamard"]
CACHE_ROTATIONS: tuple[CacheRotation, ...] = ("hadamard",)
"""Rotations of q and k before a cache, so that few bits keep more of k."""

HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 512
HEAD_DIMS = f"multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
"""The rule for head_dim, for messages."""

LEAST_NORMAL = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
"""Options of attention are float32: 0, or between these two in magnitude, 1.2e-38 and 3.4e38."""
MAX_FREQUENCY = 1000.0
"""The fastest rotary frequency in radians a token: beyond it, angles of float64 are off by 1e-6 after 10^6 tokens."""

NO_PAGE = 0xFFFFFFFF
"""The page id that fills the entries of a lookup table past a request's pages."""


def is_head_dim(value: int) -> bool:
    """Return whether the kernels take this head_dim."""
    return 0 < value <= MAX_HEAD_DIM and value % HEAD_DIM_MULTIPLE == 0


def check_head_dim(name: str, value: int) -> None:
    """Refuses a head_dim, called `name` in the message, that the kernels do not take.

    Raises:
        ShapeError: it is not a multiple of 8 from 8 to 512.
    """
    if not is_head_dim(value):
        raise ShapeError(f"{name}: expected a {HEAD_DIMS}, got {value}")


def check_kv_format(value: Any) -> None:
    """Refuses a `kv_format` that names no codes; None is a cache without codes.

    Raises:
        ContractError: as said.
    """
    one_of("kv_format", value, (None, *CODE_DTYPES))


def stored_dtype(dtype: str) -> str:
    """The dtype of a cache's array: of codes that of their memory, of others their own."""
    codes = TABLE.get(dtype)
    return dtype if codes is None else codes.memory


def stored_head(dtype: str, head_dim: int) -> int:
    """The last dimension of a cache's array: head_dim, or the stored numbers of a head of codes and its scale.

    Raises:
        ShapeError: codes of a head_dim that is no multiple of 8, or below the format's least.

    Examples:
        >>> stored_head("bfloat16", 128), stored_head("int8", 128), stored_head("int4", 128)
        (128, 132, 68)
    """
    codes = TABLE.get(dtype)
    if codes is None:
        return head_dim
    if head_dim % HEAD_DIM_MULTIPLE or head_dim < codes.least_head:
        raise ShapeError(f"head_dim: expected a {_multiple_of(codes)} for {dtype} codes, got {head_dim}")
    return head_dim // codes.per_number + _scale_numbers(codes)


def stored_elements(dtype: str, size: int, name: str = "cache") -> int:
    """The elements of a head whose last dimension is `size`: the inverse of `stored_head`.

    Raises:
        ShapeError: no head of codes is stored in so many numbers; the message calls the cache `name`.

    Examples:
        >>> stored_elements("int8", 132), stored_elements("int4", 68)
        (128, 128)
    """
    codes = TABLE.get(dtype)
    if codes is None:
        return size
    elements = (size - _scale_numbers(codes)) * codes.per_number
    if elements % HEAD_DIM_MULTIPLE or elements < codes.least_head:
        stored = size * np.dtype(codes.memory).itemsize
        raise ShapeError(f"{name}: heads of {stored} bytes are no {dtype} codes of a {_multiple_of(codes)} and a scale")
    return elements


def _scale_numbers(codes: Codes) -> int:
    return np.dtype(np.float32).itemsize // np.dtype(codes.memory).itemsize


def _multiple_of(codes: Codes) -> str:
    return f"multiple of {HEAD_DIM_MULTIPLE} from {codes.least_head} on"


def alibi_slopes(num_heads: int) -> npt.NDArray[np.float32]:
    """The ALiBi slope of each of `num_heads` heads, `[num_heads]` float32, rounded once from float64.

    With n the largest power of two up to `num_heads`, head h < n has 2^(-8 (h + 1) / n); the rest take every other
    slope of a model of 2n heads, 2^(-4 (2 (h - n) + 1) / n).

    Examples:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    n = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (h + 1) / n) for h in range(n)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / n) for h in range(num_heads - n)]
    return np.array(slopes, np.float32)


@dataclass
class ProcessChoices:
    """The choices that hold for every call of the process."""

    deterministic: bool = False
    """The choice of `runtime.determinism.set_deterministic`."""


CHOICES = ProcessChoices()


class AttentionArguments(TypedDict, total=False):
    """The fields of `AttentionOptions` as keyword arguments of a function."""

    sm_scale: float | None
    window_left: int
    logits_soft_cap: float
    q_scale: float
    k_scale: float
    v_scale: float
    rope_theta: float | None
    rope_scale: float


@dataclass(frozen=True)
class AttentionOptions:
    """Options between q . k and the output; the formula is in `mojo_ops/attention/README.md`.

    The kernels take float32: each number, and the product of `sm_scale`, `q_scale` and `k_scale`, is 0 or from 1.2e-38
    to 3.4e38 in magnitude.

    Raises:
        ContractError: a value is not finite or out of range.
        ContractTypeError: a value is not a number.
    """

    sm_scale: float | None = None
    """Multiplies q . k; `1 / sqrt(head_dim)` where None."""
    window_left: int = -1
    """Keeps the last `window_left + 1` tokens; -1 keeps all."""
    logits_soft_cap: float = 0.0
    """Makes a score x into `cap * tanh(x / cap)`; 0 is off. Not negative."""
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Calibration scales of quantised q, K and V: the stored value times its scale is the meant one."""
    rope_theta: float | None = None
    """Base of a rotary embedding of q and of the cached, un-rotated keys; None where keys are stored as used."""
    rope_scale: float = 1.0
    """Divides the rotary frequencies. The fastest, `max(1, 1 / rope_theta) / rope_scale`, is at most 1000 radians a
    token."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.name == "window_left":
                _check_is_number("window_left", value)
            else:
                check_number(field.name, value)
        if isinstance(self.window_left, float | np.floating):
            raise ContractTypeError(f"window_left: expected an integer, got {self.window_left}")
        if not -1 <= self.window_left < 2**31:
            raise ContractError(
                f"window_left: expected at least -1 (-1 = off) and below 2^31, got {shown(self.window_left)}"
            )
        if self.logits_soft_cap < 0:
            raise ContractError(f"logits_soft_cap: expected at least 0 (0 = off), got {self.logits_soft_cap}")
        for name in ("rope_theta", "rope_scale"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ContractError(f"{name}: expected a positive number, got {value}")
        frequency = max(1.0, 1.0 / float(self.rope_theta or 1.0)) / float(self.rope_scale)
        if frequency > MAX_FREQUENCY:
            raise ContractError(
                f"rope_theta {self.rope_theta} and rope_scale {self.rope_scale} rotate by {frequency:g} radians a"
                f" token: max(1, 1 / rope_theta) / rope_scale: expected at most {MAX_FREQUENCY:g}"
            )

    def numbers(self, head_dim: int) -> npt.NDArray[np.float32]:
        """The op's `options` operand, `[6]`: scale of q . k, soft cap, v_scale, rope_theta (0 = off), rope_scale, and
        1 where `CHOICES.deterministic`.

        Raises:
            ContractError: the product of the scales of q . k is out of range.
        """
        sm_scale = 1 / math.sqrt(head_dim) if self.sm_scale is None else float(self.sm_scale)
        q_scale, k_scale = float(self.q_scale), float(self.k_scale)
        scale = sm_scale * q_scale * k_scale
        if not (LEAST_NORMAL <= abs(scale) <= LARGEST or 0 in (sm_scale, q_scale, k_scale)):
            raise ContractError(
                f"sm_scale * q_scale * k_scale: expected 0 or from {LEAST_NORMAL:.2g} to {LARGEST:.2g} in magnitude"
                f" (float32), not {sm_scale:g} * {q_scale:g} * {k_scale:g}"
            )
        numbers = SOFTMAX_OPTIONS.flat(
            scale=scale,
            soft_cap=self.logits_soft_cap,
            v_scale=self.v_scale,
            rope_theta=self.rope_theta or 0.0,
            rope_scale=self.rope_scale,
            deterministic=CHOICES.deterministic,
        )
        return np.array(numbers, np.float32)


@dataclass(frozen=True)
class LatentOptions:
    """Options between the dot products of latent attention and its output.

    Raises:
        ContractError: a value is not finite or out of range; of the cache's scales, not positive.
        ContractTypeError: a value is not a number.
    """

    sm_scale: float
    """Multiplies q . k."""
    ckv_scale: float = 1.0
    kpe_scale: float = 1.0
    """Calibration scales of a quantised cache: the stored value times its scale is the meant one."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name, getattr(self, field.name))
        for name in ("ckv_scale", "kpe_scale"):
            if getattr(self, name) <= 0:
                raise ContractError(f"{name}: expected a positive number, got {getattr(self, name)}")

    def numbers(self) -> npt.NDArray[np.float32]:
        """The op's `options` operand, `[4]`: the scale of q_pe . kpe, what q_nope . ckv is scaled by beside it, o's, 1
        where `CHOICES.deterministic`.

        Raises:
            ContractError: a product or a ratio of the scales is out of range.
        """
        sm_scale, ckv_scale, kpe_scale = (float(getattr(self, field.name)) for field in fields(self))
        for name, value in (
            ("sm_scale * ckv_scale", sm_scale * ckv_scale),
            ("sm_scale * kpe_scale", sm_scale * kpe_scale),
            ("ckv_scale / kpe_scale", ckv_scale / kpe_scale),
        ):
            if sm_scale != 0 or "/" in name:
                check_number(name, value)
        scale = sm_scale * kpe_scale
        numbers = LATENT_OPTIONS.flat(
            scale=scale, latent_scale=ckv_scale / kpe_scale, v_scale=ckv_scale, deterministic=CHOICES.deterministic
        )
        return np.array(numbers, np.float32)


def _check_is_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ContractTypeError(f"{name}: expected a number, got {type(value).__name__}")


def check_number(name: str, value: Any) -> None:
    """Refuses what is no number, and one that float32 has neither as a normal number nor as 0.

    Raises:
        ContractTypeError, ContractError: as said; the message calls it `name`.
    """
    _check_is_number(name, value)
    number = value if isinstance(value, int) else float(value)
    if LEAST_NORMAL <= abs(number) <= LARGEST or number == 0:
        return
    if isinstance(number, float) and not math.isfinite(number):
        raise ContractError(f"{name}: expected a finite number, got {number}")
    shown = f"{number:g}" if isinstance(number, float) or abs(number) < 10**300 else "a number past 1e300"
    raise ContractError(
        f"{name}: expected 0 or from {LEAST_NORMAL:.2g} to {LARGEST:.2g} in magnitude (float32), got {shown}"
    )
