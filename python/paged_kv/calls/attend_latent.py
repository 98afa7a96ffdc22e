"""One call of latent attention (MLA) over the user's arrays: what is planned, what is refused, and the run.

Letters in shapes: R query rows, H query heads, Dckv and Dkpe the widths of a token's latent vector and rotary part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, flag, integer
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import cache_operands, check_storage
from paged_kv.arrays.dtypes import DTYPES, max_dtype
from paged_kv.arrays.host import to_buffer
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.plan import check_array, check_dtype, output_views
from paged_kv.calls.planned import PlanBuffers
from paged_kv.calls.rows import Rows
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.options import FLOAT8_DTYPES, KV_DTYPES, Q_DTYPES, LatentOptions, check_head_dim
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant

_LN2 = math.log(2)
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class LatentPlan:
    """What every run of one plan has in common.

    Raises:
        ContractTypeError: a size is no integer, `sm_scale` no number, or a dtype or pair of dtypes is not supported.
        ShapeError: a width is not supported.
        ContractError: a size is out of range, or `sm_scale` is.
    """

    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    """0 where keys have no rotary part."""
    page_size: int
    sm_scale: float
    q_dtype: np.dtype[Any]
    """Float8 is widened before the op, exactly."""
    kv_dtype: np.dtype[Any]
    o_dtype: np.dtype[Any] | None = None
    """None is `q_dtype`."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_heads", 1, 2**16),
            ("head_dim_ckv", 1, LARGEST_INDEX),
            ("head_dim_kpe", 0, LARGEST_INDEX),
            ("page_size", 1, LARGEST_INDEX),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), least, most))
        check_head_dim("head_dim_ckv", self.head_dim_ckv)
        if self.head_dim_kpe:
            check_head_dim("head_dim_kpe", self.head_dim_kpe)
        check_dtype("q_data_type:", self.q_dtype, KV_DTYPES)
        check_dtype("kv_data_type:", self.kv_dtype, KV_DTYPES)
        check_dtype("output_dtype:", self.result_dtype, Q_DTYPES)
        if self.kv_dtype.name not in (self.op_q_dtype.name, *FLOAT8_DTYPES):
            legal = f"equal q's {self.q_dtype.name} or be one of {', '.join(FLOAT8_DTYPES)}"
            raise ContractTypeError(f"kv_data_type: {self.kv_dtype.name} must {legal}")
        LatentOptions(self.sm_scale).numbers()

    def __str__(self) -> str:
        widths = f"{self.num_heads} heads over {self.head_dim_ckv} + {self.head_dim_kpe}"
        return f"{widths}, pages of {self.page_size}, q {self.q_dtype.name}, kv {self.kv_dtype.name}"

    @property
    def op_q_dtype(self) -> np.dtype[Any]:
        """Of the queries that the op gets."""
        if self.q_dtype.name in Q_DTYPES:
            return self.q_dtype
        return self.kv_dtype if self.kv_dtype.name in Q_DTYPES else DTYPES["bfloat16"]

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """Of the output."""
        return self.op_q_dtype if self.o_dtype is None else self.o_dtype

    def variant(self) -> Variant:
        """The compiled graph that computes it."""
        other = None if self.result_dtype == self.op_q_dtype else max_dtype(self.result_dtype)
        return Variant("mla_attention", max_dtype(self.op_q_dtype), max_dtype(self.kv_dtype), other)


@dataclass(frozen=True)
class LatentArrays:
    """The arrays of a run as the user gives them."""

    q_nope: Any
    """`[R, H, Dckv]`"""
    q_pe: Any
    """`[R, H, Dkpe]`"""
    ckv_cache: Any
    """`[pages, page_size, Dckv]`"""
    kpe_cache: Any
    """`[pages, page_size, Dkpe]`"""
    sinks: Any = None
    """`[H]`, or None."""
    out: Any = None
    lse: Any = None


class LatentAttention:
    """A plan with its operands prepared; threads may run one at the same time."""

    def __init__(self, plan: LatentPlan) -> None:
        self.plan = plan
        self._variant = plan.variant()
        self._no_sinks = to_buffer(np.zeros(0, np.float32))

    def run(
        self,
        arrays: LatentArrays,
        rows: Rows,
        scales: tuple[float, float],
        *,
        return_lse: Any = False,
        base_e: Any = False,
        buffers: PlanBuffers[Any, Any] | None = None,
    ) -> Any:
        """O `[R, H, Dckv]`, or o and the lse `[R, H]` float32, in the kind of q_nope.

        Args:
            arrays: Of the run.
            rows: Of q, with their requests.
            scales: Of ckv and of kpe.
            return_lse: Whether to return the lse as well.
            base_e: Whether the lse is a natural logarithm, else one of base 2.
            buffers: The user's, which outputs may not overlap either.

        Raises:
            ContractTypeError, ShapeError, ContractError: an array does not fit the plan, cannot be written, or shares
                memory where it is written; a scale is out of range.
            PageTableError: a page of `rows` is not one of the cache's.
        """
        plan = self.plan
        wants_lse, natural = flag("return_lse", return_lse), flag("return_lse_base_on_e", base_e)
        given = vars(arrays)
        device = devices.device_of(**given)
        q_nope, q_pe, ckv, kpe = (device.view(given[name], name) for name in _INPUTS)
        shape = (rows.count, plan.num_heads)
        check_array(device, "q_nope", q_nope, (*shape, plan.head_dim_ckv), plan.q_dtype, rows.counted_as)
        check_array(device, "q_pe", q_pe, (*shape, plan.head_dim_kpe), plan.q_dtype, rows.counted_as)
        self._check_cache(device, ckv, kpe)
        rows.table.check(len(ckv))
        numbers = LatentOptions(plan.sm_scale, *scales).numbers()
        sinks = None if arrays.sinks is None else self._sinks(device, arrays.sinks)
        out_view = lse_view = None
        if arrays.out is not None or arrays.lse is not None:
            read = [(name, view) for name, view in zip(_INPUTS, (q_nope, q_pe, ckv, kpe), strict=True)]
            if arrays.sinks is not None:
                read.append(("sinks", device.view(arrays.sinks, "sinks")))
            if buffers is not None:
                read += buffers.on(device)
            outputs = (
                ("out", arrays.out, (*shape, plan.head_dim_ckv), plan.result_dtype),
                ("lse", arrays.lse, shape, _FLOAT32),
            )
            out_view, lse_view = output_views(device, outputs, read, rows.counted_as)
        found, sums = self._execute(device, (q_nope, q_pe), (kpe, ckv), rows, sinks, numbers)
        if out_view is not None:
            device.write(out_view, found)
        if natural:
            sums = sums * np.float32(_LN2) if device.readable else sums * _LN2
        if lse_view is not None:
            device.write(lse_view, sums)
        o = device.like(arrays.q_nope, found) if arrays.out is None else arrays.out
        if not wants_lse:
            return o
        return o, device.like(arrays.q_nope, sums) if arrays.lse is None else arrays.lse

    def _execute(
        self, device: ArrayDevice, q: tuple[Any, Any], cache: tuple[Any, Any], rows: Rows, sinks: Any, numbers: Any
    ) -> tuple[Any, Any]:
        """Runs the op over checked views; `cache` holds kpe and ckv."""
        if self.plan.op_q_dtype != self.plan.q_dtype:
            q = device.astype(q[0], self.plan.op_q_dtype), device.astype(q[1], self.plan.op_q_dtype)
        queries = [device.contiguous(view) for view in q]
        runtime = runtime_on(device.index)
        with device.ordered():
            row_batch, row_lengths, lookup_table = rows.operands_on(device)
            *storage, view = self._storage(device, *cache)
            o, lse = runtime.execute(
                self._variant,
                *(device.buffer(view) for view in queries),
                row_batch,
                row_lengths,
                *storage,
                lookup_table,
                view,
                device.upload(self._no_sinks) if sinks is None else device.buffer(sinks),
                to_buffer(numbers),
            )
        return device.take(o), device.take(lse)

    @staticmethod
    def _storage(device: ArrayDevice, kpe: Any, ckv: Any) -> tuple[Any, Any, Any]:
        """The op's storage and 13 numbers: kpe is K there, and ckv V, of one head."""
        k_blocks, v_blocks, view = cache_operands(kpe[:, :, None], ckv[:, :, None], device)
        numbers = view.to_numpy()
        if len(numbers) == 12:
            view = to_buffer(np.append(numbers, ckv.shape[-1]))
        return k_blocks, v_blocks, view

    def _check_cache(self, device: ArrayDevice, ckv: Any, kpe: Any) -> None:
        """Ckv and kpe are pages of the planned sizes and dtype."""
        plan = self.plan
        for name, view, width in (("ckv_cache", ckv, plan.head_dim_ckv), ("kpe_cache", kpe, plan.head_dim_kpe)):
            check_storage(device, view, name, 3)
            for what, found, planned in (("page_size", view.shape[1], plan.page_size), ("width", view.shape[2], width)):
                if found != planned:
                    raise ShapeError(f"{name}: its {what} is {found}, planned {planned}")
            dtype = device.dtype(view)
            if dtype != plan.kv_dtype:
                raise ContractTypeError(f"{name}: dtype {dtype.name}, planned {plan.kv_dtype.name} (kv_data_type)")
        if len(kpe) != len(ckv):
            raise ShapeError(f"kpe_cache: {len(kpe)} pages, ckv_cache has {len(ckv)}")

    def _sinks(self, device: ArrayDevice, sinks: Any) -> Any:
        """The sinks as the op takes them; their values are checked where they can be read."""
        view, heads = device.view(sinks, "sinks"), self.plan.num_heads
        check_dtype("sinks: dtype", device.dtype(view))
        if tuple(view.shape) != (heads,):
            raise ShapeError(f"sinks: shape {list(view.shape)}, expected [num_heads] = [{heads}]")
        values = device.contiguous(device.astype(view, np.float32))
        if device.readable:
            bad = np.isnan(values) | np.isposinf(values)
            if bad.any():
                head = int(bad.argmax())
                raise ContractError(f"sinks: head {head} has {values[head]}, expected a finite logit or -inf")
        return values


_INPUTS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
