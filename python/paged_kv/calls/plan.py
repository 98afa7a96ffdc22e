"""What every run of one plan has in common, and what is refused of a call: shapes, dtypes and options.

Letters in shapes: B requests, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from max.dtype import DType

from paged_kv.arguments import integer
from paged_kv.arrays.gpu import Facts, to_tensor
from paged_kv.arrays.host import as_numpy
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.options import AttentionOptions
from paged_kv.runtime.variants import Variant

Array = npt.NDArray[Any]

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")

_FP8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): DType.float8_e4m3fn,
    np.dtype(ml_dtypes.float8_e5m2): DType.float8_e5m2,
}
WIDE = {
    np.dtype(np.float32): DType.float32,
    np.dtype(np.float16): DType.float16,
    np.dtype(ml_dtypes.bfloat16): DType.bfloat16,
}


@dataclass(frozen=True)
class Problem:
    """What every run of one plan has in common.

    Raises:
        ContractTypeError: a size is no integer, or a dtype or pair of dtypes is not supported.
        ShapeError: Hq is no multiple of Hk, or head_dim is not supported.
        ContractError: another size is below 1, or the pos_encoding_mode is unknown.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: np.dtype[Any]
    """float32, float16 or bfloat16."""
    kv_dtype: np.dtype[Any]
    """`q_dtype`, or either float8 with any of the three."""
    pos_encoding_mode: str
    options: AttentionOptions
    """`rope_theta` is used only by ROPE_LLAMA; the scales of q, k and v are a run's."""
    dtype_names: tuple[str, str] = ("q_data_type", "kv_data_type")
    """What messages call the two dtypes."""

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.num_qo_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_qo_heads: {self.num_qo_heads} is no multiple of num_kv_heads, which is {self.num_kv_heads}"
            )
        if self.head_dim % 8 or self.head_dim > 512:
            raise ShapeError(f"head_dim must be a multiple of 8 from 8 to 512, not {self.head_dim}")
        if self.q_dtype not in WIDE:
            raise ContractTypeError(f"{self.dtype_names[0]}: {self.q_dtype.name} is none of {names(WIDE)}")
        if self.kv_dtype != self.q_dtype and self.kv_dtype not in _FP8:
            legal = f"equal q's {self.q_dtype.name} or be one of {names(_FP8)}"
            raise ContractTypeError(f"{self.dtype_names[1]}: {self.kv_dtype.name} must {legal}")
        if self.pos_encoding_mode not in POS_ENCODING_MODES:
            raise ContractError(
                f"pos_encoding_mode must be one of {', '.join(POS_ENCODING_MODES)}, not {self.pos_encoding_mode!r}"
            )

    def __str__(self) -> str:
        heads = f"{self.num_qo_heads} query and {self.num_kv_heads} KV heads of {self.head_dim}"
        dtypes = f"q {self.q_dtype.name}, kv {self.kv_dtype.name}"
        return f"{heads}, pages of {self.page_size}, {dtypes}, {self.pos_encoding_mode}"

    @property
    def variant(self) -> Variant:
        """The compiled graph that answers it."""
        return Variant("attention", WIDE[self.q_dtype], (WIDE | _FP8)[self.kv_dtype])


def check_layout(kv_layout: str) -> None:
    """Refuses an unknown layout."""
    if kv_layout not in ("NHD", "HND"):
        raise ContractError(f"kv_layout must be 'NHD' or 'HND', not {kv_layout!r}")


def check_array(name: str, array: Array | Facts, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuses an array of another shape or dtype than planned."""
    if array.dtype != dtype:
        raise ContractTypeError(f"{name}: dtype {array.dtype.name}, planned {dtype.name}")
    if array.shape != shape:
        letters = ("B", "num_qo_heads", "head_dim")[: len(shape)]
        raise ShapeError(f"{name}: shape {list(array.shape)}, planned [{', '.join(letters)}] = {list(shape)}")


def writable(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A view of an array that results are to be written to, checked."""
    view = as_numpy(array, name)
    check_array(name, view, shape, dtype)
    if not view.flags.writeable:
        raise ContractError(f"{name} is read-only, and is to be written")
    return view


def writable_on_gpu(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """The tensor over an array that results are to be written to, checked."""
    tensor = to_tensor(array, name)
    check_array(name, Facts.of(tensor, name), shape, dtype)
    return tensor


def attention_options(
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
) -> AttentionOptions:
    """The options with FlashInfer's meaning of None."""
    return AttentionOptions(
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=0.0 if logits_soft_cap is None else logits_soft_cap,
        rope_scale=1.0 if rope_scale is None else rope_scale,
        rope_theta=1e4 if rope_theta is None else rope_theta,
    )


def names(dtypes: Iterable[np.dtype[Any]]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)
