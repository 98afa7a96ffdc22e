"""The forms in which latent attention takes its arguments, as FlashInfer has them."""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays import devices
from paged_kv.calls.attend_latent import LatentAttention, LatentPlan
from paged_kv.calls.latent_requests import rows_of_dense
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.options import FLOAT8_DTYPES

_DEEPSEEK_SCALE = (128 + 64) ** -0.5
"""What FlashInfer's "cutlass" form, which plans nothing, multiplies scores by."""


def one_of(**arrays: Any) -> Any:
    """The one of some arguments that is given; `ContractError` unless there is exactly one."""
    given = [array for array in arrays.values() if array is not None]
    if len(given) != 1:
        raise ContractError(f"{' or '.join(arrays)} is needed, one of them")
    return given[0]


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
