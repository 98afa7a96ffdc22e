"""Dtypes of every library: names, NumPy's (`ml_dtypes`) and MAX's.

NumPy has no bfloat16 or float8: those are `ml_dtypes` dtypes, which DLPack does not carry, so their bytes travel and
the receiver is told their type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from max.dtype import DType

from paged_kv.arguments import shown
from paged_kv.errors import ContractTypeError
from paged_kv.kv_formats import CODE_DTYPES

EXTENDED = {
    np.dtype(ml_dtypes.bfloat16): DType.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): DType.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): DType.float8_e5m2,
}
"""The dtypes that NumPy itself lacks, and MAX's of each."""

FROM_MAX = {dtype: numpy for numpy, dtype in EXTENDED.items()}
"""The same the other way round."""

RAW = {dtype: np.dtype(f"u{dtype.itemsize}") for dtype in EXTENDED}
"""The unsigned integer that carries each of them."""

DTYPES = {
    dtype.name: dtype
    for dtype in [
        *map(np.dtype, "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()),
        *EXTENDED,
    ]
}
"""Every dtype that comes in, by name."""

SUPPORTED = frozenset(DTYPES.values())

CACHE_DTYPES = DTYPES | {name: np.dtype(getattr(ml_dtypes, name)) for name in CODE_DTYPES if name not in DTYPES}
"""The names of a cache's dtypes: those of codes too, which lie in arrays of another dtype."""

_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def dtype_of(dtype: Any, name: str, legal: Mapping[str, np.dtype[Any]] = DTYPES) -> np.dtype[Any]:
    """The NumPy (`ml_dtypes`) dtype that is meant by a name, or by a dtype of NumPy, torch, JAX or MAX.

    Names are "float16", "bfloat16", "float8_e4m3fn" and the like, "torch." in front or not.

    Raises:
        ContractTypeError: it is none of `legal`, the supported dtypes.
    """
    hit: np.dtype[Any] | None = None
    kind = type(dtype)
    if isinstance(dtype, str) or (kind.__module__, kind.__name__) == ("torch", "dtype"):
        short = str(dtype).removeprefix("torch.")
        hit = legal.get(_ALIASES.get(short, short))
    elif (
        isinstance(dtype, type | np.dtype | DType) or kind_of_dtype(dtype) == "jax"
    ):  # NumPy prints others, see `shown`
        try:
            hit = legal.get(dtype.name) if isinstance(dtype, DType) else np.dtype(dtype)
        except Exception:  # an object's own `dtype` may raise anything
            hit = None
    if hit is None or hit not in legal.values():
        raise ContractTypeError(f"{name}: {shown(dtype)} is none of {', '.join(legal)}")
    return hit


def cache_dtype_of(dtype: Any, name: str) -> np.dtype[Any]:
    """`dtype_of` for a cache: `CODE_DTYPES`, as names or as any library's dtypes, stand for codes with scales."""
    return dtype_of(dtype, name, CACHE_DTYPES)


def kind_of_dtype(dtype: Any) -> str:
    """Whose dtype it is: "torch", "jax" (`jax.numpy.float32`, which is no NumPy dtype), else "numpy"."""
    owner = type(dtype).__module__.partition(".")[0]
    return owner if owner in ("torch", "jax") else "numpy"


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy (or `ml_dtypes`) dtype of a MAX dtype."""
    return FROM_MAX.get(dtype) or np.dtype(dtype.to_numpy())


def max_dtype(dtype: np.dtype[Any]) -> DType:
    """The MAX dtype of a NumPy (or `ml_dtypes`) dtype."""
    return EXTENDED.get(dtype) or DType.from_numpy(dtype)


def is_float8(dtype: np.dtype[Any]) -> bool:
    """Return whether it is float8_e4m3fn or float8_e5m2."""
    return "float8" in dtype.name


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether it holds floating-point numbers, bfloat16 and float8 included."""
    return "float" in dtype.name
