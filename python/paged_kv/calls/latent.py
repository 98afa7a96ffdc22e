"""Latent attention (MLA) over the user's arrays: its requests, what is planned and refused, and the run.

Letters in shapes: B requests, R query rows, H query heads, Dckv and Dkpe the widths of a token's latent vector and
rotary part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_kv.arguments import LARGEST_INDEX, integer
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import max_dtype
from paged_kv.arrays.host import as_indices
from paged_kv.arrays.pages import Pages, check_storage
from paged_kv.arrays.types import ArrayDevice
from paged_kv.calls.attend import checked_sinks
from paged_kv.calls.block_tables import checked_lengths
from paged_kv.calls.buffers import FixedBuffers
from paged_kv.calls.offsets import Indices, offsets_of
from paged_kv.calls.plan import check_array, check_dtype, check_pair, widened
from paged_kv.calls.ragged import WHY_HOST, RaggedBatch
from paged_kv.calls.results import NOT_WRITTEN, Results
from paged_kv.calls.rows import Rows
from paged_kv.calls.table import Table
from paged_kv.errors import ContractTypeError, ShapeError
from paged_kv.options import KV_DTYPES, Q_DTYPES, LatentOptions, check_head_dim
from paged_kv.runtime.session import runtime_on
from paged_kv.runtime.variants import Variant

NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


class LatentBatch(RaggedBatch):
    """The requests as `plan` is given them; any number of rows will do in the user's buffers."""

    @staticmethod
    def of(arrays: Sequence[Any], page_size: int, causal: bool) -> LatentBatch:
        """The checked requests of four index arrays of any kind on the host, in the order of `NAMES`.

        Raises:
            ContractTypeError, ShapeError, PageTableError, ContractError: as `Table.of_lengths` and `RaggedBatch`.
        """
        views = []
        for name, array in zip(NAMES, arrays, strict=True):
            devices.require_host(array, name, WHY_HOST)
            views.append(as_indices(array, name))
        qo_indptr, indptr, indices, lengths = views
        # Only so many offsets count as there are requests.
        table = Table.of_lengths(indptr[: len(lengths) + 1], indices, lengths, page_size)
        return LatentBatch(qo_indptr, table, None, causal)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order of `NAMES`."""
        return self.qo_indptr, *self.table.arrays

    def check_fixed(self, fixed: int) -> None:
        """Any number of rows will do."""


def rows_of_dense(kv_len: Any, page_table: Any, page_size: int) -> Rows:
    """One row a request, which sees all its tokens, from lengths `[B]` and a page table `[B, n]`.

    Raises:
        ContractTypeError, ShapeError, PageTableError: an array is not as said, or a length is negative or more than the
            pages hold.
    """
    lengths = checked_lengths(kv_len, name="kv_len")
    return Rows.of_decode(Table.padded(page_table, lengths, page_size, ("page_table", "page_table", "kv_len")))


def csr_of_dense(seq_lens: Any, block_tables: Any, page_size: int) -> tuple[Indices, Indices, Indices]:
    """`kv_indptr`, `kv_indices` and `kv_len_arr` of lengths `[B]` and a page table `[B, n]`; raises as above."""
    table = Table.padded(block_tables, checked_lengths(seq_lens), page_size)
    return offsets_of(table.num_pages).astype(np.int32), table.used, table.lengths


@dataclass(frozen=True)
class LatentPlan:
    """Everything that all runs of one plan share.

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
        check_pair("kv_data_type", self.q_dtype, self.kv_dtype)
        LatentOptions(self.sm_scale).numbers()

    def __str__(self) -> str:
        widths = f"{self.num_heads} heads over {self.head_dim_ckv} + {self.head_dim_kpe}"
        return f"{widths}, pages of {self.page_size}, q {self.q_dtype.name}, kv {self.kv_dtype.name}"

    @property
    def op_q_dtype(self) -> np.dtype[Any]:
        """The dtype of the queries that the op gets."""
        return widened(self.q_dtype, self.kv_dtype)

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of the output."""
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
    cache_names: tuple[str, str] = ("ckv_cache", "kpe_cache")
    """What messages call the two."""

    def named(self) -> dict[str, Any]:
        """The queries and the caches by the names of their arguments."""
        ckv, kpe = self.cache_names
        return {"q_nope": self.q_nope, "q_pe": self.q_pe, ckv: self.ckv_cache, kpe: self.kpe_cache}


class LatentAttention:
    """A plan with its operands prepared; threads may run one at the same time."""

    def __init__(self, plan: LatentPlan) -> None:
        self.plan = plan
        self._variant = plan.variant()
        self._no_sinks = np.zeros(0, np.float32)
        self._numbers = LatentOptions(plan.sm_scale, *_NO_SCALES).numbers()

    def __str__(self) -> str:
        return str(self.plan)

    def run(
        self,
        arrays: LatentArrays,
        rows: Rows,
        scales: tuple[float, float],
        results: Results,
        *,
        buffers: FixedBuffers[Any, Any] | None = None,
    ) -> Any:
        """O `[R, H, Dckv]`, or o and the lse `[R, H]` float32, in the kind of q_nope.

        Args:
            arrays: The arrays of the run.
            rows: The rows of q, with their requests.
            scales: The scales of ckv and of kpe.
            results: What is returned and written.
            buffers: The user's, which outputs may not overlap either.

        Raises:
            ContractTypeError, ShapeError, ContractError: an array does not fit the plan, cannot be written, or shares
                memory where it is written; a scale is out of range.
            PageTableError: a page of `rows` is not one of the cache's.
        """
        plan, inputs = self.plan, arrays.named()
        device = devices.device_of(**inputs, sinks=arrays.sinks, out=results.out, lse=results.lse)
        q_nope, q_pe, ckv, kpe = views = [device.view(array, name) for name, array in inputs.items()]
        shape = (rows.count, plan.num_heads)
        check_array(device, "q_nope", q_nope, (*shape, plan.head_dim_ckv), plan.q_dtype, rows.counted_as)
        check_array(device, "q_pe", q_pe, (*shape, plan.head_dim_kpe), plan.q_dtype, rows.counted_as)
        self._check_cache(device, ckv, kpe, arrays.cache_names)
        rows.table.check(len(ckv))
        numbers = self._numbers if scales == _NO_SCALES else LatentOptions(plan.sm_scale, *scales).numbers()
        sinks = None if arrays.sinks is None else checked_sinks(device, arrays.sinks, plan.num_heads, "num_heads")
        written = NOT_WRITTEN
        if results.are_written:
            read = list(zip(inputs, views, strict=True))
            if arrays.sinks is not None:
                read.append(("sinks", device.view(arrays.sinks, "sinks")))
            if buffers is not None:
                read += buffers.on(device)
            written = results.views(device, (*shape, plan.head_dim_ckv), plan.result_dtype, read, rows.counted_as)
        pages = Pages(kpe[:, :, None], ckv[:, :, None], device)  # of one head
        o, sums = self._execute((q_nope, q_pe), pages, rows, sinks, numbers)
        return results.hand_back(device, arrays.q_nope, o, sums, written)

    def _execute(self, q: tuple[Any, Any], pages: Pages, rows: Rows, sinks: Any, numbers: Any) -> tuple[Any, Any]:
        """Runs the op over checked views: kpe is K there, and ckv V."""
        device = pages.device
        if self.plan.op_q_dtype != self.plan.q_dtype:
            q = device.astype(q[0], self.plan.op_q_dtype), device.astype(q[1], self.plan.op_q_dtype)
        queries = [device.contiguous(view) for view in q]
        runtime = runtime_on(device.index)
        with device.ordered():
            row_batch, row_lengths, lookup_table = rows.operands_on(device)
            k_blocks, v_blocks, view = pages.operands()
            o, lse = runtime.execute(
                self._variant,
                *(device.buffer(view) for view in queries),
                row_batch,
                row_lengths,
                k_blocks,
                v_blocks,
                lookup_table,
                view if len(view) == 13 else np.append(view, self.plan.head_dim_ckv),
                device.upload(self._no_sinks) if sinks is None else device.buffer(sinks),
                numbers,
            )
        return device.take(o), device.take(lse)

    def _check_cache(self, device: ArrayDevice, ckv: Any, kpe: Any, names: tuple[str, str]) -> None:
        """Ckv and kpe are pages of the planned sizes and dtype."""
        plan = self.plan
        for name, view, width in ((names[0], ckv, plan.head_dim_ckv), (names[1], kpe, plan.head_dim_kpe)):
            check_storage(device, view, name, 3)
            for what, size, planned in (("page_size", view.shape[1], plan.page_size), ("width", view.shape[2], width)):
                if size != planned:
                    raise ShapeError(f"{name}: expected the planned {what} {planned}, got {size}")
            dtype = device.dtype(view)
            if dtype != plan.kv_dtype:
                raise ContractTypeError(
                    f"{name}: expected the planned dtype {plan.kv_dtype.name} (kv_data_type), got {dtype.name}"
                )
        if len(kpe) != len(ckv):
            raise ShapeError(f"{names[1]}: expected {names[0]}'s {len(ckv)} pages, got {len(kpe)}")


_NO_SCALES = (1.0, 1.0)
