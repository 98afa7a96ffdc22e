"""One attention call, the road of decode, prefill, ragged, mixed and cascaded batches: view, check, operands, execute,
hand back.

`Attention.over_pages` and `over_tokens` view the user's arrays, `over` checks what is to be written, `run` holds
q and the cache against the plan, makes the op's operands and executes one compiled graph. Letters in shapes: R rows
(query tokens), N tokens, Hq query heads, Hk KV heads, D head dimension (Dv: V's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.overlap import Named
from paged_kv.arrays.pages import Pages, Storage, token_views
from paged_kv.arrays.types import ArrayDevice, Operand
from paged_kv.calls.buffers import FixedBuffers
from paged_kv.calls.plan import AttentionPlan, check_array, check_dtype
from paged_kv.calls.results import NOT_WRITTEN, Results
from paged_kv.calls.rows import Rows
from paged_kv.calls.scalars import one_number
from paged_kv.errors import ContractError, ShapeError
from paged_kv.options import alibi_slopes
from paged_kv.runtime.session import runtime_on

Scales = tuple[float | None, float | None, float | None]
"""q_scale, k_scale, v_scale; None is 1."""

_NUMBERS = (float, int, type(None))
_NO_SCALES: Scales = (None, None, None)


class Attention:
    """A plan with the operands prepared that do not change from run to run.

    Threads may run one at the same time. What a run keeps for the next is replaced in one assignment, key and value
    together, and read once: a run has its own operands whatever others do meanwhile.

    Args:
        plan: The plan.
        keeps_storage: Whether a run's cache stays alive until the next run over another one, which saves some
            microseconds. Not for an attention that outlives the caches it is used on.
    """

    def __init__(self, plan: AttentionPlan, *, keeps_storage: bool = True) -> None:
        self.plan = plan
        self._keeps_storage = keeps_storage
        self._variant, self._masked_variant = plan.variant(), plan.variant("masked_attention")
        self._widened = None if plan.op_q_dtype == plan.q_dtype else plan.op_q_dtype
        self._narrowed = None if plan.op_o_dtype == plan.result_dtype else plan.result_dtype
        alibi = plan.pos_encoding_mode == "ALIBI"
        self._slopes = alibi_slopes(plan.num_qo_heads) if alibi else np.zeros(0, np.float32)
        self._no_sinks = np.zeros(0, np.float32)
        self._head_of_v = np.zeros(plan.value_dim, np.int8)
        self._constants: dict[ArrayDevice, tuple[Operand, Operand, Operand]] = {}
        self._window = _int32(plan.options.window_left)
        self._last_window: tuple[Any, np.ndarray] = None, self._window
        self._unscaled = self._pack(_NO_SCALES)
        self._last_numbers = _NO_SCALES, self._unscaled
        self._last_storage: tuple[tuple[Any, ...], Storage | None] = ((), None)

    def __str__(self) -> str:
        return str(self.plan)

    def over_pages(
        self,
        rows: Rows,
        q: Any,
        paged_kv_cache: Any,
        kv_layout: str,
        scales: Scales,
        results: Results,
        *,
        sinks: Any = None,
        window_left: int | None = None,
        buffers: FixedBuffers[Any, Any] | None = None,
    ) -> Any:
        """O, or o and the lse, in the kind of q: `[R, Hq, Dv]` in the planned dtype, and `[R, Hq]` float32.

        Args:
            rows: The rows of q, with their requests.
            q: `[R, Hq, D]`.
            paged_kv_cache: As `Pages.of` takes it.
            kv_layout: "NHD" or "HND".
            scales: The scales of q, k and v.
            results: What is returned and written.
            sinks: `[Hq]`, or None.
            window_left: Instead of the planned one, where not None.
            buffers: The user's, which outputs may not overlap either.

        Raises:
            ContractTypeError, ShapeError, ContractError: an array does not fit the plan, cannot be written, or shares
                memory where it is written.
            PageTableError: a page id is not one of the cache's.
        """
        device = devices.device_of(q=q, paged_kv_cache=paged_kv_cache, out=results.out, lse=results.lse, sinks=sinks)
        same_width, one_slot = self.plan.value_dim == self.plan.head_dim, self.plan.page_size == 1
        pages = Pages.of(paged_kv_cache, kv_layout, device=device, same_width=same_width, one_slot=one_slot)
        return self.over(rows, q, pages, scales, results, sinks=sinks, window_left=window_left, buffers=buffers)

    def over_tokens(
        self,
        rows: Rows,
        q: Any,
        kv: tuple[Any, Any],
        kv_layout: str,
        scales: Scales,
        results: Results,
        *,
        sinks: Any = None,
        buffers: FixedBuffers[Any, Any] | None = None,
    ) -> Any:
        """`over_pages` over contiguous K and V, `[N, Hk, D]` (NHD) or `[Hk, N, D]` (HND), whose `rows.table` has
        overlapping pages.

        Raises:
            ShapeError: the requests of `rows` have more than N tokens; else as `over_pages`.
        """
        plan, table = self.plan, rows.table
        device = devices.device_of(q=q, k=kv[0], v=kv[1], out=results.out, lse=results.lse)
        keys, values = token_views(device, kv, kv_layout, same_width=plan.value_dim == plan.head_dim)
        for name, view, head_dim in (("k", keys, plan.head_dim), ("v", values, plan.value_dim)):
            if tuple(view.shape[1:]) != (plan.num_kv_heads, head_dim):
                raise ShapeError(
                    f"{name}: expected the planned heads {[plan.num_kv_heads, head_dim]}, got {list(view.shape[1:])}"
                )
        needed = table.highest_page + table.page_size if table.highest_page >= 0 else 0
        if len(keys) < needed:
            raise ShapeError(f"k: expected {needed} tokens (kv_indptr), got {len(keys)}")
        pages = Pages.of_tokens(keys, values, device, table.page_size)
        memory = [("k", keys), ("v", values)]
        return self.over(rows, q, pages, scales, results, sinks=sinks, buffers=buffers, memory=memory)

    def over(
        self,
        rows: Rows,
        q: Any,
        pages: Pages,
        scales: Scales,
        results: Results,
        *,
        sinks: Any = None,
        window_left: int | None = None,
        buffers: FixedBuffers[Any, Any] | None = None,
        name: str = "q",
        memory: Sequence[Named] | None = None,
    ) -> Any:
        """`over_pages`, where all arrays lie on the device of the pages. Messages call q `name`; `memory` is that of
        the pages where they overlap.
        """
        device = pages.device
        queries, written = device.view(q, name), NOT_WRITTEN
        if results.are_written:
            read = [(name, queries), *(pages.named() if memory is None else memory)]
            if sinks is not None:
                read.append(("sinks", device.view(sinks, "sinks")))
            if buffers is not None:
                read += buffers.on(device)
            shape = (rows.count, self.plan.num_qo_heads, self.plan.value_dim)
            written = results.views(device, shape, self.plan.result_dtype, read, rows.counted_as)
        o, sums = self.run(queries, pages, rows, scales, sinks, window_left)
        return results.hand_back(device, q, o, sums, written)

    def run(
        self,
        q: Any,
        pages: Pages,
        rows: Rows,
        scales: Scales,
        sinks: Any = None,
        window_left: int | None = None,
    ) -> tuple[Any, Any]:
        """Output `[R, Hq, Dv]` in the planned dtype and the base-2 lse `[R, Hq]` float32: views on the same device.

        On a GPU the call is enqueued in the order of torch's current stream, and not waited for.

        Args:
            q: A view `[R, Hq, D]` on the device of the pages.
            pages: The pages of the planned sizes and dtype.
            rows: The rows of q, with their requests.
            scales: The scales of q, k and v.
            sinks: An array `[Hq]`, or None.
            window_left: Instead of the planned one, where not None.

        Raises:
            ContractTypeError, ShapeError, ContractError: an argument does not fit the plan.
            PageTableError: a page of `rows` is not one of the cache's.
        """
        plan, device = self.plan, pages.device
        check_array(device, "q", q, (rows.count, plan.num_qo_heads, plan.head_dim), plan.q_dtype, rows.counted_as)
        plan.check_pages(pages, rows.table.page_size)
        rows.table.check(pages.num_pages)
        numbers, window = self._numbers_of(scales), self._window_of(window_left)
        windowed = plan.options.window_left >= 0 if window_left is None else window_left >= 0
        plain = plan.value_dim == plan.head_dim and rows.is_plain(windowed, plan.pos_encoding_mode)
        if self._widened is not None:
            q = device.astype(q, self._widened)
        # What torch still has to compute is enqueued before MAX's stream is told to wait.
        queries, sink_values = device.contiguous(q), None
        if sinks is not None:
            sink_values = checked_sinks(device, sinks, plan.num_qo_heads, "num_qo_heads")
        runtime = runtime_on(device.index)
        with device.ordered():
            slopes, no_sinks, head_of_v = self._constants_on(device)
            row_batch, row_lengths, lookup_table = rows.operands_on(device)
            k_blocks, v_blocks, view = self._storage_of(pages)
            o, lse = runtime.execute(
                self._variant if plain else self._masked_variant,
                device.buffer(queries),
                row_batch,
                row_lengths,
                *(() if plain else (*rows.masked_operands_on(device), head_of_v)),
                k_blocks,
                v_blocks,
                lookup_table,
                view,
                slopes,
                no_sinks if sink_values is None else device.buffer(sink_values),
                window,
                numbers,
            )
        result = device.take(o)
        if self._narrowed is not None:
            result = device.astype(result, self._narrowed)
        return result, device.take(lse)

    def _constants_on(self, device: ArrayDevice) -> tuple[Operand, Operand, Operand]:
        """ALiBi's slopes, the empty sinks, and an array as long as a head of V, copied to a device once."""
        constants = self._constants.get(device)
        if constants is None:
            slopes, no_sinks = device.upload(self._slopes), device.upload(self._no_sinks)
            constants = self._constants[device] = slopes, no_sinks, device.upload(self._head_of_v)
        return constants

    def _storage_of(self, pages: Pages) -> Storage:
        """`Pages.operands`, kept for the next run over the same memory (and so keeping it alive until then)."""
        if not self._keeps_storage:
            return pages.operands()
        key = pages.layout()
        last_key, storage = self._last_storage
        if storage is None or key != last_key:
            storage = pages.operands()
            self._last_storage = key, storage
        return storage

    def _numbers_of(self, scales: Scales) -> np.ndarray:
        """`_pack`, kept for the next run with the same scales."""
        last_scales, numbers = self._last_numbers
        # Other types than these may compare as arrays do, or equal while they are refused (True).
        if not all(type(scale) in _NUMBERS for scale in scales) or scales != last_scales:
            numbers = self._pack(scales)
            self._last_numbers = scales, numbers
        return numbers

    def _window_of(self, window_left: int | None) -> np.ndarray:
        """The op's operand for the planned window, or for another one, which is kept for the next run."""
        if window_left is None:
            return self._window
        last_left, operand = self._last_window
        if type(window_left) is not int or window_left != last_left:
            operand = _int32(replace(self.plan.options, window_left=window_left).window_left)  # which checks it
            self._last_window = window_left, operand
        return operand

    def _pack(self, scales: Scales) -> np.ndarray:
        """The op's five numbers, with a run's scales of q, k and v."""
        q_scale, k_scale, v_scale = (
            1.0 if scale is None else one_number(scale, name) for scale, name in zip(scales, _SCALES, strict=True)
        )
        theta = self.plan.options.rope_theta if self.plan.pos_encoding_mode == "ROPE_LLAMA" else None
        options = replace(self.plan.options, rope_theta=theta, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return options.numbers(self.plan.head_dim)


def checked_sinks(device: ArrayDevice, sinks: Any, heads: int, name: str) -> Any:
    """Sinks `[heads]` as the ops take them; messages call the number of heads `name`.

    Raises:
        ContractTypeError, ShapeError: they are of another dtype or shape.
        ContractError: one is NaN or +inf, where that can be read.
    """
    view = device.view(sinks, "sinks")
    check_dtype("sinks: dtype", device.dtype(view))
    if tuple(view.shape) != (heads,):
        raise ShapeError(f"sinks: expected shape [{name}] = [{heads}], got {list(view.shape)}")
    values = device.contiguous(device.astype(view, np.float32))
    if device.readable:
        bad = np.isnan(values) | np.isposinf(values)
        if bad.any():
            head = int(bad.argmax())
            raise ContractError(f"sinks: head {head}: expected a finite logit or -inf, got {values[head]}")
    return values


def _int32(value: int) -> np.ndarray:
    return np.array(value, np.int32)


_SCALES = ("q_scale", "k_scale", "v_scale")
