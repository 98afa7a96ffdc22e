"""One attention call over the user's arrays: views of them, their checks, and the results in the kind of `q`.

Letters in shapes: R rows (query tokens), Hq query heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import flag
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import paged_views
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.attend import Attention, Scales
from paged_kv.calls.plan import output_views
from paged_kv.calls.planned import PlanBuffers
from paged_kv.calls.rows import Rows

_FLOAT32 = np.dtype(np.float32)


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
        out: `[R, Hq, D]`, or None: written, and returned as o.
        lse: `[R, Hq]` float32, or None: written, and returned as lse.
        sinks: `[Hq]`, or None.
        window_left: Instead of the planned one, where not None.
        buffers: The user's, which `out` and `lse` may not overlap either.

    Returns:
        o `[R, Hq, D]`, or o and the lse `[R, Hq]`, in the kind of q.

    Raises:
        ContractTypeError, ShapeError, ContractError: an array does not fit the plan, cannot be written, or shares
            memory where it is written.
        PageTableError: a page id is not one of the cache's.
    """
    device = devices.device_of(q=q, paged_kv_cache=paged_kv_cache, out=out, lse=lse, sinks=sinks)
    k, v = paged_views(paged_kv_cache, kv_layout, device=device)
    results = {"return_lse": return_lse, "out": out, "lse": lse}
    return attend_views(
        attention, rows, device, q, (k, v), scales, **results, sinks=sinks, window_left=window_left, buffers=buffers
    )


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
    sinks: Any = None,
    window_left: int | None = None,
    buffers: PlanBuffers[Any, Any] | None = None,
    names: tuple[str, str] = ("q", "paged_kv_cache"),
) -> Any:
    """`attend_paged`, where the device of all arrays is known and `cache` is two views of K and V on it.

    Messages call q and the cache `names`.
    """
    plan, wants_lse = attention.plan, flag("return_lse", return_lse)
    queries = device.view(q, names[0])
    out_view = lse_view = None
    if out is not None or lse is not None:
        read = [(names[0], queries), *((names[1], view) for view in cache)]
        if sinks is not None:
            read.append(("sinks", device.view(sinks, "sinks")))
        if buffers is not None:
            read += buffers.on(device)
        shape = (rows.count, plan.num_qo_heads, plan.head_dim)
        outputs = (("out", out, shape, plan.result_dtype), ("lse", lse, shape[:2], _FLOAT32))
        out_view, lse_view = output_views(device, outputs, read, rows.counted_as)
    o, sums = attention.run(device, queries, *cache, rows, scales, sinks, window_left)
    if out_view is not None:
        device.write(out_view, o)
    if lse_view is not None:
        device.write(lse_view, sums)
    o = device.like(q, o) if out is None else out
    if not wants_lse:
        return o
    return o, device.like(q, sums) if lse is None else lse
