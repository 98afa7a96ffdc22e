"""One attention call: a problem with its operands prepared, run on the CPU or on a GPU.

Letters in shapes: B requests, Hq query heads, Hk KV heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from max.driver import Buffer

from paged_kv.arrays import gpu
from paged_kv.arrays.devices import Place
from paged_kv.arrays.gpu import Facts
from paged_kv.arrays.host import as_numpy, cache_operands, to_buffer, to_numpy
from paged_kv.calls.batch import Rows
from paged_kv.calls.plan import WIDE, Array, Problem, check_array, names
from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.options import alibi_slopes
from paged_kv.runtime.session import default_runtime

Scales = tuple[float | None, float | None, float | None]
"""q_scale, k_scale, v_scale; None is 1."""

_PLAIN = (float, int, type(None))


class Attention:
    """A problem with the operands prepared that do not change from run to run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._variant = problem.variant
        alibi = problem.pos_encoding_mode == "ALIBI"
        slopes = alibi_slopes(problem.num_qo_heads) if alibi else np.zeros(0, np.float32)
        self._slopes = to_buffer(slopes)
        self._no_sinks = to_buffer(np.zeros(0, np.float32))
        self._constants: dict[Place, tuple[Buffer, Buffer]] = {}
        self._window_left = to_buffer(np.array(problem.options.window_left, np.int32))
        self._scales: Scales = (None, None, None)
        self._numbers = self._pack(self._scales)
        self._storage_key: tuple[Any, ...] = ()
        self._storage: tuple[Buffer, Buffer, Buffer] | None = None

    def run(self, q: Array, k: Array, v: Array, rows: Rows, scales: Scales, sinks: Any = None) -> tuple[Array, Array]:
        """Output `[B, Hq, D]` in the dtype of `q` and the base-2 lse `[B, Hq]` float32.

        Args:
            q: `[B, Hq, D]`.
            k, v: `[page, slot, Hk, D]` views of one shape and dtype with a unit last stride.
            rows: The requests.
            scales: Of q, k and v.
            sinks: `[Hq]`, or None.

        Raises:
            ContractTypeError, ShapeError, ContractError: an argument does not fit the problem.
            PageTableError: a page of `rows` is not one of the cache's.
        """
        problem = self.problem
        check_array("q", q, (rows.batch, problem.num_qo_heads, problem.head_dim), problem.q_dtype)
        self._check_cache(k, v)
        rows.check_pages(len(k))
        # Other types than these may compare as arrays do, or equal while they are refused (True).
        if not all(type(scale) in _PLAIN for scale in scales) or scales != self._scales:
            self._numbers, self._scales = self._pack(scales), scales
        row_batch, row_lengths, lookup_table = rows.operands
        k_blocks, v_blocks, view = self._storage_of(k, v)
        o, lse = default_runtime().execute(
            self._variant,
            to_buffer(q if q.flags.c_contiguous else np.ascontiguousarray(q)),
            row_batch,
            row_lengths,
            k_blocks,
            v_blocks,
            lookup_table,
            view,
            self._slopes,
            self._no_sinks if sinks is None else self._sinks(sinks),
            self._window_left,
            self._numbers,
        )
        return to_numpy(o), to_numpy(lse)

    def run_on(
        self, place: Place, q: Any, k: Any, v: Any, rows: Rows, scales: Scales, sinks: Any = None
    ) -> tuple[Buffer, Buffer]:
        """`run` on a GPU, over torch tensors there: enqueued, in the order of torch's current stream, not waited for.

        Raises:
            ContractTypeError, ShapeError, ContractError, PageTableError: as `run`.
        """
        problem = self.problem
        check_array("q", Facts.of(q, "q"), (rows.batch, problem.num_qo_heads, problem.head_dim), problem.q_dtype)
        self._check_cache(Facts.of(k, "paged_kv_cache"), Facts.of(v, "paged_kv_cache"))
        rows.check_pages(len(k))
        numbers = self._pack(scales)
        # What torch still has to compute is enqueued before MAX's stream is told to wait.
        queries, sink_values = q.contiguous(), None if sinks is None else self._sinks_tensor(sinks)
        with place.ordered():
            if place not in self._constants:
                self._constants[place] = place.upload(self._slopes), place.upload(self._no_sinks)
            slopes, no_sinks = self._constants[place]
            k_blocks, v_blocks, view = gpu.cache_operands(k, v)
            row_batch, row_lengths, lookup_table = rows.on(place)
            o, lse = place.runtime.execute(
                self._variant,
                gpu.tensor_buffer(queries),
                row_batch,
                row_lengths,
                k_blocks,
                v_blocks,
                lookup_table,
                view,
                slopes,
                no_sinks if sink_values is None else gpu.tensor_buffer(sink_values),
                self._window_left,
                numbers,
            )
        return o, lse

    def _sinks_tensor(self, sinks: Any) -> Any:
        """The sinks as the op takes them; their values stay unread."""
        tensor = gpu.to_tensor(sinks, "sinks")
        facts = Facts.of(tensor, "sinks")
        if facts.dtype not in WIDE:
            raise ContractTypeError(f"sinks: dtype {facts.dtype.name} is none of {names(WIDE)}")
        if facts.shape != (self.problem.num_qo_heads,):
            raise ShapeError(
                f"sinks: shape {list(facts.shape)}, expected [num_qo_heads] = [{self.problem.num_qo_heads}]"
            )
        return tensor.float().contiguous()

    def _storage_of(self, k: Array, v: Array) -> tuple[Buffer, Buffer, Buffer]:
        """`cache_operands`, kept for the next run over the same memory (and so keeping it alive until then)."""
        key = (k.ctypes.data, v.ctypes.data, k.strides, v.strides, k.shape)
        if self._storage is None or key != self._storage_key:
            self._storage, self._storage_key = cache_operands(k, v), key
        return self._storage

    def _pack(self, scales: Scales) -> Buffer:
        """The op's five numbers, with a run's scales of q, k and v."""
        q_scale, k_scale, v_scale = (1.0 if scale is None else scale for scale in scales)
        theta = self.problem.options.rope_theta if self.problem.pos_encoding_mode == "ROPE_LLAMA" else None
        options = replace(self.problem.options, rope_theta=theta, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return to_buffer(options.numbers(self.problem.head_dim))

    def _sinks(self, sinks: Any) -> Buffer:
        """The sinks as the op takes them."""
        values = as_numpy(sinks, "sinks")
        if values.dtype not in WIDE:
            raise ContractTypeError(f"sinks: dtype {values.dtype.name} is none of {names(WIDE)}")
        if values.shape != (self.problem.num_qo_heads,):
            raise ShapeError(
                f"sinks: shape {list(values.shape)}, expected [num_qo_heads] = [{self.problem.num_qo_heads}]"
            )
        values = np.ascontiguousarray(values, np.float32)
        bad = np.isnan(values) | np.isposinf(values)
        if bad.any():
            head = int(bad.argmax())
            raise ContractError(f"sinks: head {head} has {values[head]}, expected a finite logit or -inf")
        return to_buffer(values)

    def _check_cache(self, k: Array | Facts, v: Array | Facts) -> None:
        """K and V are pages of the planned sizes and dtype."""
        problem = self.problem
        page = (problem.page_size, problem.num_kv_heads, problem.head_dim)
        for name, view in (("k", k), ("v", v)):
            if view.shape[1:] != page:
                for what, found, planned in zip(_PAGE, view.shape[1:], page, strict=True):
                    if found != planned:
                        raise ShapeError(f"paged_kv_cache: {what} of {name} is {found}, planned {planned}")
            if view.dtype != problem.kv_dtype:
                raise ContractTypeError(
                    f"paged_kv_cache: dtype {view.dtype.name} of {name}, planned {problem.kv_dtype.name} (kv_data_type)"
                )


_PAGE = ("page_size", "num_kv_heads", "head_dim")
