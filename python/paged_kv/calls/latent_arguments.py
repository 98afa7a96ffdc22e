"""The forms in which latent attention takes its arguments, as FlashInfer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer, shown
from paged_kv.arrays import devices
from paged_kv.calls.attend_latent import LatentAttention, LatentPlan
from paged_kv.calls.latent_requests import LatentBatch, csr_of_dense, rows_of_dense
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.options import FLOAT8_DTYPES

_DEEPSEEK_SCALE = (128 + 64) ** -0.5
"""What FlashInfer's "cutlass" form, which plans nothing, multiplies scores by."""


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """The requests of a plan: offsets and lists of pages (`csr`), a dense page table (`dense`), or both (`dual`)."""

    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_len_arr: Any = None
    cum_seq_lens_q: Any = None
    block_tables: Any = None
    seq_lens: Any = None
    max_q_len: int | None = None
    """Without effect."""

    @classmethod
    def csr(cls, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> MLAPlanMetadata:
        """As the arguments of `plan` by these names."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Any, block_tables: Any, seq_lens: Any, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """As the arguments of `plan` by these names."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        *,
        cum_seq_lens_q: Any,
        block_tables: Any,
        seq_lens: Any,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Both, which must say the same."""
        dense = (cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, *dense)


_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")


def index_arrays(flat: MLAPlanMetadata, metadata: Any, page_size: int) -> tuple[Any, ...]:
    """The four arrays of `_CSR`, from the arguments of `plan` or from its `metadata`.

    Raises:
        ContractTypeError: `metadata` is no `MLAPlanMetadata`.
        ContractError: an array is missing, or arrays of two forms are given where one is meant.
        ShapeError, PageTableError: a dense table is inconsistent, or says something else than the other form.
    """
    if metadata is not None:
        if not isinstance(metadata, MLAPlanMetadata):
            raise ContractTypeError(f"metadata must be a MLAPlanMetadata, not {type(metadata).__name__}")
        if any(getattr(flat, name) is not None for name in (*_CSR, *_DENSE)):
            raise ContractError("metadata: index arrays are given beside it")
    found = flat if metadata is None else metadata
    forms = [any(getattr(found, name) is not None for name in names) for names in (_CSR, _DENSE)]
    if forms == [True, True] and metadata is None:
        raise ContractError("block_tables: qo_indptr, kv_indptr, kv_indices and kv_len_arr say the requests already")
    for names in [names for names, given in zip((_CSR, _DENSE), forms, strict=True) if given or not any(forms)]:
        for name in names:
            if getattr(found, name) is None:
                raise ContractError(f"{name} is needed")
    csr = tuple(getattr(found, name) for name in _CSR)
    if not forms[1]:
        return csr
    dense = (found.cum_seq_lens_q, *csr_of_dense(found.seq_lens, found.block_tables, page_size))
    if forms[0]:
        one, other = (LatentBatch.of(arrays, page_size, True).rows for arrays in (csr, dense))
        same = (
            (one.batch, other.batch),
            (one.lengths, other.lengths),
            (one.table.num_pages, other.table.num_pages),
            (one.table.entries, other.table.entries),
        )
        if not all(np.array_equal(a, b) for a, b in same):
            raise PageTableError("block_tables: the dense table says other requests than kv_indptr and kv_indices")
    return dense


def check_known(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Refuses a value that is none of those known."""
    if not any(type(value) is type(one) and value == one for one in known):
        raise ContractError(f"{name} must be {' or '.join(map(repr, known))}, not {shown(value)}")


def scales(plan: LatentPlan, ckv_scale: Any, kpe_scale: Any) -> tuple[float, float]:
    """The scales of the cache: of float8, both are needed, and elsewhere neither is taken."""
    is_float8 = plan.kv_dtype.name in FLOAT8_DTYPES
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if (scale is not None) != is_float8:
            what = "is needed for a cache of float8" if is_float8 else "belongs to a cache of float8"
            raise ContractError(f"{name} {what}, planned {plan.kv_dtype.name} (kv_data_type)")
    if not is_float8:
        return 1.0, 1.0
    # Where there is no rotary part, its scale plays no part.
    return ckv_scale, kpe_scale if plan.head_dim_kpe else ckv_scale


def parts(array: Any, name: str, ndim: int, plan: LatentPlan) -> tuple[Any, Any]:
    """Both parts of the queries, or of the cache, out of one array of the user's, in its kind."""
    if isinstance(array, tuple | list):
        if len(array) != 2:
            raise ShapeError(f"{name}: a tuple must hold both parts, not {len(array)} arrays")
        return array[0], array[1]
    shape = getattr(array, "shape", None)
    if shape is None:
        raise ContractTypeError(f"{name} must be an array, not {type(array).__name__}")
    if name == "kv_cache" and len(shape) == 4 and shape[1] == 1:
        array, shape = array[:, 0], (shape[0], *shape[2:])
    width = plan.head_dim_ckv + plan.head_dim_kpe
    if len(shape) != ndim or shape[-1] != width:
        raise ShapeError(f"{name}: shape {list(shape)}, expected {ndim} dimensions, the last one {width}")
    return array[..., : plan.head_dim_ckv], array[..., plan.head_dim_ckv :]


def unplanned(q_nope: Any, q_pe: Any, ckv_cache: Any, kv_len: Any, page_table: Any) -> tuple[LatentAttention, Rows]:
    """The attention and rows of a call that gives everything at once."""
    if kv_len is None or page_table is None:
        raise ContractError("kv_len and page_table are needed with backend 'cutlass'")
    device = devices.device_of(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache)
    views = [device.view(array, name) for array, name in ((q_nope, "q_nope"), (q_pe, "q_pe"), (ckv_cache, "ckv_cache"))]
    for view, name in zip(views, ("q_nope", "q_pe", "ckv_cache"), strict=True):
        if view.ndim != 3:
            raise ShapeError(f"{name}: shape {list(view.shape)}, expected 3 dimensions")
    queries, rotary, cache = views
    plan = LatentPlan(
        num_heads=queries.shape[1],
        head_dim_ckv=queries.shape[2],
        head_dim_kpe=rotary.shape[2],
        page_size=integer("page_size", int(cache.shape[1]), 1, LARGEST_INDEX),
        sm_scale=_DEEPSEEK_SCALE,
        q_dtype=device.dtype(queries),
        kv_dtype=device.dtype(cache),
    )
    return LatentAttention(plan), rows_of_dense(kv_len, page_table, plan.page_size)
