"""One attention call over the user's arrays: views of them, their checks, and the results in the kind of `q`.

Letters in shapes: R rows (query tokens), N tokens, Hq query heads, Hk KV heads, D head dimension (Dv: V's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv.arguments import flag, shown
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_alike, check_layout, check_storage, overlapping_pages, paged_views
from paged_kv.arrays.overlap import Named
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.attend import Attention, Scales
from paged_kv.calls.plan import output_views
from paged_kv.calls.planned import PlanBuffers
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError, ShapeError

LSE_BASES = ("log2", "ln")
LSE_LAYOUTS = ("NH", "HN")

_FLOAT32 = np.dtype(np.float32)
_LN2 = math.log(2)


def attend_paged(
    attention: Attention,
    rows: Rows,
    q: Any,
    paged_kv_cache: Any,
    kv_layout: str,
    scales: Scales,
    *,
    return_lse: Any = False,
    out: Any = None,
    lse: Any = None,
    lse_base: str = "log2",
    lse_layout: str = "NH",
    sinks: Any = None,
    window_left: int | None = None,
    buffers: PlanBuffers[Any, Any] | None = None,
) -> Any:
    """Runs an attention over the user's arrays.

    Args:
        attention: Of the plan.
        rows: Of q.
        q: `[R, Hq, D]`.
        paged_kv_cache: As `paged_views` takes it.
        kv_layout: "NHD" or "HND".
        scales: Of q, k and v.
        return_lse: Whether to return the lse as well.
        out: `[R, Hq, Dv]`, or None: written, and returned as o.
        lse: `[R, Hq]` float32, or None: written, and returned as lse.
        lse_base: "log2", or "ln" for a natural logarithm.
        lse_layout: "NH", or "HN" for an lse `[Hq, R]`.
        sinks: `[Hq]`, or None.
        window_left: Instead of the planned one, where not None.
        buffers: The user's, which `out` and `lse` may not overlap either.

    Returns:
        o `[R, Hq, Dv]`, or o and the lse, in the kind of q.

    Raises:
        ContractTypeError, ShapeError, ContractError: an array does not fit the plan, cannot be written, or shares
            memory where it is written.
        PageTableError: a page id is not one of the cache's.
    """
    device = devices.device_of(q=q, paged_kv_cache=paged_kv_cache, out=out, lse=lse, sinks=sinks)
    plan = attention.plan
    same_width, one_slot = plan.value_dim == plan.head_dim, plan.page_size == 1
    cache = paged_views(paged_kv_cache, kv_layout, device=device, same_width=same_width, one_slot=one_slot)
    results = {"return_lse": return_lse, "out": out, "lse": lse, "lse_base": lse_base, "lse_layout": lse_layout}
    return attend_views(
        attention, rows, device, q, cache, scales, **results, sinks=sinks, window_left=window_left, buffers=buffers
    )


def attend_tokens(
    attention: Attention,
    rows: Rows,
    q: Any,
    kv: tuple[Any, Any],
    kv_layout: str,
    scales: Scales,
    *,
    out: Any = None,
    lse: Any = None,
    **options: Any,
) -> Any:
    """Runs an attention over contiguous K and V, whose `rows.table` has overlapping pages; else as `attend_paged`.

    Args:
        kv: K and V `[N, Hk, D]` (NHD) or `[Hk, N, D]` (HND).

    Raises:
        ShapeError: the requests of `rows` have more than N tokens.
    """
    plan, table = attention.plan, rows.table
    device = devices.device_of(q=q, k=kv[0], v=kv[1], out=out, lse=lse)
    keys, values = token_views(device, kv, kv_layout, same_width=plan.value_dim == plan.head_dim)
    for name, view, head_dim in (("k", keys, plan.head_dim), ("v", values, plan.value_dim)):
        if tuple(view.shape[1:]) != (plan.num_kv_heads, head_dim):
            raise ShapeError(f"{name}: heads {list(view.shape[1:])}, planned {[plan.num_kv_heads, head_dim]}")
    needed = table.highest_page + table.page_size if table.highest_page >= 0 else 0
    if len(keys) < needed:
        raise ShapeError(f"k: {len(keys)} tokens, the requests have {needed} (kv_indptr)")
    pages = overlapping_pages(keys, table.page_size), overlapping_pages(values, table.page_size)
    memory = [("k", keys), ("v", values)]
    return attend_views(attention, rows, device, q, pages, scales, out=out, lse=lse, memory=memory, **options)


def token_views(device: ArrayDevice, kv: tuple[Any, Any], kv_layout: str, *, same_width: bool) -> tuple[Any, Any]:
    """K and V of contiguous tokens as `[N, Hk, D]` views.

    Raises:
        ContractTypeError, ShapeError, ContractError: the layout is unknown; an array is none, not of rank 3, or has
            strides that the ops cannot address; or the two differ in dtype or shape, the last dimension left out unless
            `same_width`.
    """
    check_layout(kv_layout)
    keys, values = device.view(kv[0], "k"), device.view(kv[1], "v")
    check_storage(device, keys, "k", 3)
    check_storage(device, values, "v", 3)
    check_alike(values, keys, "v", "k's", same_width)
    return (keys, values) if kv_layout == "NHD" else (keys.swapaxes(0, 1), values.swapaxes(0, 1))


def attend_views(
    attention: Attention,
    rows: Rows,
    device: ArrayDevice,
    q: Any,
    cache: tuple[Any, Any],
    scales: Scales,
    *,
    return_lse: Any = False,
    out: Any = None,
    lse: Any = None,
    lse_base: str = "log2",
    lse_layout: str = "NH",
    sinks: Any = None,
    window_left: int | None = None,
    buffers: PlanBuffers[Any, Any] | None = None,
    names: tuple[str, str] = ("q", "paged_kv_cache"),
    memory: Sequence[Named] | None = None,
) -> Any:
    """`attend_paged`, where the device of all arrays is known and `cache` is two views of K and V on it.

    Messages call q and the cache `names`; `memory` is that of the cache where its views overlap themselves.

    Raises:
        ContractError: `lse_base` or `lse_layout` is unknown; else as `attend_paged`.
    """
    plan, wants_lse = attention.plan, flag("return_lse", return_lse)
    _check_one_of("lse_base", lse_base, LSE_BASES)
    _check_one_of("lse_layout", lse_layout, LSE_LAYOUTS)
    queries = device.view(q, names[0])
    out_view = lse_view = None
    if out is not None or lse is not None:
        read = [(names[0], queries), *(memory or [(names[1], view) for view in cache])]
        if sinks is not None:
            read.append(("sinks", device.view(sinks, "sinks")))
        if buffers is not None:
            read += buffers.on(device)
        shape = (rows.count, plan.num_qo_heads)
        lse_shape = shape if lse_layout == "NH" else shape[::-1]
        outputs = (("out", out, (*shape, plan.value_dim), plan.result_dtype), ("lse", lse, lse_shape, _FLOAT32))
        out_view, lse_view = output_views(device, outputs, read, rows.counted_as)
    o, sums = attention.run(device, queries, *cache, rows, scales, sinks, window_left)
    if out_view is not None:
        device.write(out_view, o)
    if lse_base == "ln":
        sums = sums * np.float32(_LN2) if device.readable else sums * _LN2
    if lse_layout == "HN":
        sums = device.contiguous(sums.swapaxes(0, 1))
    if lse_view is not None:
        device.write(lse_view, sums)
    o = device.like(q, o) if out is None else out
    if not wants_lse:
        return o
    return o, device.like(q, sums) if lse is None else lse


def _check_one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ContractError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
