"""Everything that all runs of one plan share, and what is refused of a call: shapes, dtypes and options.

Letters in shapes: B requests, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer, one_of
from paged_kv.arrays.dtypes import DTYPES, cache_dtype_of, dtype_of, max_dtype
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.types import ArrayDevice, DTypeLike
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.options import (
    FLOAT8_DTYPES,
    KV_DTYPES,
    Q_DTYPES,
    AttentionOptions,
    check_head_dim,
    stored_dtype,
    stored_head,
)
from paged_kv.runtime.variants import Op, Variant

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")

_SIZES = {
    "num_qo_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": LARGEST_INDEX,
    "head_dim_vo": LARGEST_INDEX,
    "page_size": LARGEST_INDEX,
    "q_len_per_req": 2**16,
}
"""The most that each may be. ALiBi's slopes are made for all query heads by `plan`, which sees no array of so many."""
_PAGE = ("page_size", "num_kv_heads", "head_dim")
_OPTIONAL_SIZES = ("head_dim_vo", "page_size")


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that all runs of one plan share.

    Raises:
        ContractTypeError: a size is no integer, or a dtype or pair of dtypes is not supported.
        ShapeError: Hq is no multiple of Hk, or head_dim is not supported, of int4 codes below 16; or V of codes is not
            as wide as K.
        ContractError: a size is below 1, there are over 65536 heads, page_size or head_dim is above 2^31 - 1, or the
            pos_encoding_mode is unknown.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int | None
    """None where K and V are not paged."""
    q_dtype: np.dtype[Any]
    """float32, float16 or bfloat16, or either float8, which is widened before the op."""
    kv_dtype: np.dtype[Any]
    """`q_dtype`, or either float8 with any q; any of them with float8 queries; or int8 or int4, codes with scales, of
    pages, with any q."""
    pos_encoding_mode: str
    options: AttentionOptions
    """`rope_theta` is used only by ROPE_LLAMA; the scales of q, k and v are a run's."""
    o_dtype: np.dtype[Any] | None = None
    """The dtype of the output: any that q may have; None is `q_dtype`."""
    q_len_per_req: int = 1
    """Query rows of each request in a decode step."""
    dtype_names: tuple[str, str] = ("q_data_type", "kv_data_type")
    """The names of the two dtypes in messages."""
    head_dim_name: str = "head_dim"
    """The name of head_dim in messages."""
    head_dim_vo: int | None = None
    """The head_dim of V and the output; None is `head_dim`."""

    def __post_init__(self) -> None:
        for name, most in _SIZES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL_SIZES:
                called = self.head_dim_name if name == "head_dim" else name
                object.__setattr__(self, name, integer(called, getattr(self, name), 1, most))
        if self.num_qo_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_qo_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_qo_heads}"
            )
        check_head_dim(self.head_dim_name, self.head_dim)
        check_head_dim("head_dim_vo", self.value_dim)
        check_dtype(f"{self.dtype_names[0]}:", self.q_dtype, KV_DTYPES)
        check_dtype(f"{self.dtype_names[1]}:", self.kv_dtype, (*KV_DTYPES, *CODE_DTYPES))
        if self.o_dtype is None:
            object.__setattr__(self, "o_dtype", self.q_dtype)
        check_dtype("o_data_type:", self.result_dtype, KV_DTYPES)
        if not self.has_codes:
            check_pair(self.dtype_names[1], self.q_dtype, self.kv_dtype)
        one_of("pos_encoding_mode", self.pos_encoding_mode, POS_ENCODING_MODES)
        if self.has_codes:
            what = f"{self.dtype_names[1]}: a cache of {self.kv_dtype.name} codes"
            if self.pos_encoding_mode == "ROPE_LLAMA":
                raise ContractError(f"{what} has no rotary keys (pos_encoding_mode ROPE_LLAMA)")
            if self.page_size is None:
                raise ContractTypeError(f"{what} is paged; these K and V are not")
            stored_head(self.kv_dtype.name, self.head_dim)
            if self.value_dim != self.head_dim:
                codes = f"{self.kv_dtype.name} codes"
                raise ShapeError(f"head_dim_vo: expected {self.head_dim}, as K has, for {codes}, got {self.value_dim}")

    def __str__(self) -> str:
        heads = f"{self.num_qo_heads} query and {self.num_kv_heads} KV heads of {self.head_dim}"
        if self.value_dim != self.head_dim:
            heads += f" (V {self.value_dim})"
        pages = "no pages" if self.page_size is None else f"pages of {self.page_size}"
        dtypes = f"q {self.q_dtype.name}, kv {self.kv_dtype.name}"
        return f"{heads}, {pages}, {dtypes}, {self.pos_encoding_mode}"

    @property
    def value_dim(self) -> int:
        """The head_dim of V and the output."""
        return self.head_dim if self.head_dim_vo is None else self.head_dim_vo

    @property
    def has_codes(self) -> bool:
        """True if the cache holds codes and scales."""
        return self.kv_dtype.name in CODE_DTYPES

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """The dtype of the cache's arrays."""
        return DTYPES[stored_dtype(self.kv_dtype.name)]

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of the output that the caller gets."""
        return self.q_dtype if self.o_dtype is None else self.o_dtype

    @property
    def op_q_dtype(self) -> np.dtype[Any]:
        """The dtype of the queries that the op gets."""
        return widened(self.q_dtype, self.kv_dtype)

    @property
    def op_o_dtype(self) -> np.dtype[Any]:
        """The dtype of the output that the op writes: float32 where it is float8, which is rounded from it."""
        return self.result_dtype if self.result_dtype.name in Q_DTYPES else DTYPES["float32"]

    def variant(self, op: Op = "attention") -> Variant:
        """The compiled graph of `op` that computes it."""
        q_dtype, o_dtype = self.op_q_dtype, self.op_o_dtype
        other = None if o_dtype == q_dtype else max_dtype(o_dtype)
        return Variant(op, max_dtype(q_dtype), max_dtype(self.array_dtype), other)

    def check_pages(self, pages: Pages, page_size: int) -> None:
        """Refuses pages that are not of this page_size, or not of the planned sizes and dtype.

        Raises:
            ContractTypeError, ShapeError: as said.
        """
        for name, view, head_dim in (("k", pages.k, self.head_dim), ("v", pages.v, self.value_dim)):
            page = (page_size, self.num_kv_heads, stored_head(self.kv_dtype.name, head_dim))
            if tuple(view.shape[1:]) != page:
                for what, size, planned in zip(_PAGE, view.shape[1:], page, strict=True):
                    if size != planned:
                        if self.has_codes and what == "head_dim":
                            codes = f"{planned} bytes ({self.kv_dtype.name} codes of head_dim {head_dim} and a scale)"
                            raise ShapeError(f"{pages.name}: expected heads of {name} of {codes}, got {size}")
                        raise ShapeError(f"{pages.name}: expected the planned {what} {planned} of {name}, got {size}")
            dtype = pages.device.dtype(view)
            if dtype != self.array_dtype:
                expected = f"{self.kv_dtype.name} (kv_data_type)"
                raise ContractTypeError(
                    f"{pages.name}: expected the planned dtype {expected} of {name}, got {dtype.name}"
                )


def check_dtype(what: str, dtype: np.dtype[Any], legal: Sequence[str] = Q_DTYPES) -> None:
    """Refuses a dtype that is none of `legal`: those of queries, outputs and sinks that no kernel has to widen.

    Raises:
        ContractTypeError: as said; `what` begins the message, such as "sinks: dtype".
    """
    if dtype.name not in legal:
        raise ContractTypeError(f"{what} {dtype.name} is none of {', '.join(legal)}")


def widened(q_dtype: np.dtype[Any], kv_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the queries that an op gets: float8 is widened, exactly, to the cache's dtype or to
    bfloat16.
    """
    if q_dtype.name in Q_DTYPES:
        return q_dtype
    return kv_dtype if kv_dtype.name in Q_DTYPES else DTYPES["bfloat16"]


def check_pair(name: str, q_dtype: np.dtype[Any], kv_dtype: np.dtype[Any]) -> None:
    """Refuses a cache's dtype, called `name`, that is neither q's nor float8.

    Raises:
        ContractTypeError: as said.
    """
    if kv_dtype.name not in (widened(q_dtype, kv_dtype).name, *FLOAT8_DTYPES):
        legal = f"equal q's {q_dtype.name} or be one of {', '.join(FLOAT8_DTYPES)}"
        raise ContractTypeError(f"{name}: {kv_dtype.name} must {legal}")


def check_array(
    device: ArrayDevice, name: str, view: Any, shape: Sequence[int], dtype: np.dtype[Any], rows: str = "B"
) -> None:
    """Refuses an array of another shape or dtype than planned, whose first dimension messages call `rows`.

    Raises:
        ContractTypeError, ShapeError: as said; the message calls it `name`.
    """
    array_dtype = device.dtype(view)
    if array_dtype != dtype:
        raise ContractTypeError(f"{name}: expected the planned dtype {dtype.name}, got {array_dtype.name}")
    if tuple(view.shape) != tuple(shape):
        letters = (rows, "num_qo_heads", "head_dim")[: len(shape)]
        raise ShapeError(f"{name}: expected the planned [{', '.join(letters)}] = {list(shape)}, got {list(view.shape)}")


class PlanDTypes(TypedDict):
    """The dtypes of a plan, as arguments of `AttentionPlan`."""

    q_dtype: np.dtype[Any]
    kv_dtype: np.dtype[Any]
    o_dtype: np.dtype[Any] | None


def plan_dtypes(
    q_data_type: DTypeLike | None,
    kv_data_type: DTypeLike | None = None,
    o_data_type: DTypeLike | None = None,
    data_type: DTypeLike | None = None,
) -> PlanDTypes:
    """The dtypes of q, of the cache and of o, with FlashInfer's meaning of None and of its older `data_type`.

    Raises:
        ContractTypeError: one of the four is no dtype.
    """
    if data_type is None:
        q_dtype = kv_dtype = dtype_of(q_data_type, "q_data_type")
    else:
        q_dtype = kv_dtype = dtype_of(data_type, "data_type")
        # It set both dtypes once. Now q_data_type has a default, so that float8 is meant for the cache alone.
        if q_data_type is not None and kv_dtype.name in FLOAT8_DTYPES:
            q_dtype = dtype_of(q_data_type, "q_data_type")
    if kv_data_type is not None:
        kv_dtype = cache_dtype_of(kv_data_type, "kv_data_type")
    o_dtype = None if o_data_type is None else dtype_of(o_data_type, "o_data_type")
    return {"q_dtype": q_dtype, "kv_dtype": kv_dtype, "o_dtype": o_dtype}


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
