"""The variants of the ops: what is compiled for the array API, one graph each.

One variant serves every storage layout: the storage goes in as flat memory, its shape and strides as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, Type, Value

from paged_kv.call_layouts import LATENT_OPTIONS, SOFTMAX_OPTIONS
from paged_kv.graphs import ops
from paged_kv.graphs.ops import LatentCache, PagedCache
from paged_kv.runtime.compile_key import CompileKey

Op = Literal["append", "gather", "attention", "masked_attention", "mla_attention", "merge"]


@dataclass(frozen=True)
class Variant:
    """One compiled graph: an op with its dtypes. Sizes, strides and options are run-time values."""

    op: Op
    dtype: DType
    """The dtype of q, or of the states to merge; of the rows of append and gather: as these only copy them, the
    unsigned integer of the elements' size, but a float over a cache of codes."""
    kv_dtype: DType
    o_dtype: DType | None = None
    """The dtype of attention's output; q's where it is None."""

    @property
    def name(self) -> str:
        return "_".join([self.op, self.dtype.name, self.kv_dtype.name, *([self.o_dtype.name] if self.o_dtype else [])])

    def __str__(self) -> str:
        """For people: `attention (bfloat16 over float8_e4m3fn)`, `append (16 bits)`."""
        if self.op in ("append", "gather"):
            if self.dtype != self.kv_dtype:
                return f"{self.op} ({self.dtype.name} over {ops.CODES[self.kv_dtype]})"
            return f"{self.op} ({8 * self.dtype.size_in_bytes} bits)"
        over = "" if self.kv_dtype == self.dtype else f" over {ops.CODES.get(self.kv_dtype, self.kv_dtype.name)}"
        to = f" to {self.o_dtype.name}" if self.o_dtype else ""
        return f"{self.op.replace('_', ' ')} ({self.dtype.name}{over}{to})"

    def key(self, architecture: str = "") -> CompileKey:
        """The key of the graph's artefact; `architecture` is a GPU's, with its number."""
        return CompileKey(self.name, ("runtime/variants.py",), architecture)

    def bundle(self) -> list[Variant]:
        """The variants that are compiled with this one: append and gather go together where they copy bits."""
        if self.op not in ("append", "gather") or self.dtype != self.kv_dtype:
            return [self]
        return [replace(self, op="append"), replace(self, op="gather")]

    def build(
        self,
        module: Module,
        device: DeviceRef | None = None,
        *,
        batch_invariant: bool = False,
        gpu_kernel: ops.GpuKernel = "best",
    ) -> None:
        """Adds this variant's graph to `module`, for the CPU where no device is given; the options are attention's.

        Its inputs, in order: the rows (attention: q, row_batch, row_lengths; masked_attention: these, row_positions,
        token_offsets, mask, mask_starts, mask_firsts, and an array of any content as long as a head of V, `[Dv]` int8;
        append: k, v, batch_indices, positions; gather: indptr and an array of any content in the shape of the result,
        `[N, Hk, D]` int8), then k_blocks, v_blocks, lookup_table, view, and for both kinds of attention alibi_slopes,
        sinks, window_left, options.
        `view`, `window_left` and `options` are on the host, all else on the device. Of merge: v `[S, n, H, D]` and
        s `[S, n, H]`. Of mla_attention: q_nope, q_pe, row_batch, row_lengths, the storage with kpe as K and ckv as V,
        sinks, options. No two inputs share the name of a size: so the op itself refuses sizes that differ, not MAX.
        """
        _BUILDERS[self.op](_Build(self, module, device or DeviceRef.CPU(), batch_invariant, gpu_kernel))


@dataclass(frozen=True)
class _Build:
    """One call of `Variant.build`, and the inputs that several ops have."""

    variant: Variant
    module: Module
    device: DeviceRef
    batch_invariant: bool
    gpu_kernel: ops.GpuKernel

    def graph(self, types: Iterable[Type[Any]]) -> Graph:
        return Graph(self.variant.name, input_types=types, custom_extensions=[ops.kernels()], module=self.module)

    def tensor(self, dtype: DType, *shape: str | int) -> TensorType:
        return TensorType(dtype, list(shape), self.device)

    def rows(self, *shape: str) -> TensorType:
        """Rows of the variant's dtype."""
        return self.tensor(self.variant.dtype, *shape)

    @staticmethod
    def numbers(dtype: DType, *shape: str | int) -> TensorType:
        """Numbers that the host reads."""
        return TensorType(dtype, list(shape), DeviceRef.CPU())

    def storage(self) -> list[Type[Any]]:
        """K and V of a cache, its table and its view."""
        return [
            BufferType(self.variant.kv_dtype, ["k_elements"], self.device),
            BufferType(self.variant.kv_dtype, ["v_elements"], self.device),
            self.tensor(DType.uint32, "B", "pages_per_request"),
            self.numbers(DType.int64, "view_numbers"),
        ]

    def cache(self, k: Value[Any], v: Value[Any], table: Value[Any], view: Value[Any]) -> PagedCache:
        """The cache of the values of `storage`."""
        kv_format = ops.CODES.get(self.variant.kv_dtype) if self.variant.dtype in ops.DTYPES else None
        return PagedCache(k.buffer, v.buffer, table.tensor, "STRIDED", view.tensor, kv_format)

    def options(self) -> list[Type[Any]]:
        """alibi_slopes, sinks, window_left and options of attention."""
        return [
            self.tensor(DType.float32, "slopes"),
            self.tensor(DType.float32, "sinks"),
            self.numbers(DType.int32),
            self.numbers(DType.float32, SOFTMAX_OPTIONS.size),
        ]


def _append(build: _Build) -> None:
    positions = [build.tensor(DType.int32, "N_batch"), build.tensor(DType.int32, "N_positions")]
    types = [build.rows("N", "Hk", "D"), build.rows("N_v", "Hk_v", "D_v"), *positions, *build.storage()]
    with build.graph(types) as graph:
        rows, storage = graph.inputs[:4], graph.inputs[4:]
        ops.append(build.cache(*storage), *(value.tensor for value in rows))
        graph.output()


def _gather(build: _Build) -> None:
    types = [build.tensor(DType.int32, "offsets"), build.tensor(DType.int8, "N", "Hk", "D"), *build.storage()]
    with build.graph(types) as graph:
        indptr, like, *storage = graph.inputs
        num_tokens, heads, head_dim = like.tensor.shape
        cache, dtype = build.cache(*storage), build.variant.dtype
        rows = ops.gather(cache, indptr.tensor, num_tokens, num_kv_heads=heads, head_dim=head_dim, dtype=dtype)
        graph.output(*rows)


def _attention(build: _Build) -> None:
    rows = [build.rows("R", "Hq", "D"), build.tensor(DType.int32, "R_batch"), build.tensor(DType.int32, "R_lengths")]
    with build.graph([*rows, *build.storage(), *build.options()]) as graph:
        q, row_batch, row_lengths = (value.tensor for value in graph.inputs[:3])
        slopes, sinks, window_left, numbers = (value.tensor for value in graph.inputs[7:])
        o, lse = ops.attention_at_run_time(
            *(build.cache(*graph.inputs[3:7]), q, row_batch, row_lengths),
            alibi_slopes=slopes,
            sinks=sinks,
            window_left=window_left,
            options=numbers,
            o_dtype=build.variant.o_dtype,
            batch_invariant=build.batch_invariant,
            gpu_kernel=build.gpu_kernel,
        )
        graph.output(o, lse)


def _masked_attention(build: _Build) -> None:
    rows = [
        build.rows("R", "Hq", "D"),
        *(build.tensor(DType.int32, f"R_{name}") for name in ("batch", "lengths", "positions")),
        build.tensor(DType.int32, "B_offsets"),
        build.tensor(DType.uint8, "mask_bytes"),
        build.tensor(DType.int64, "R_starts"),
        build.tensor(DType.int32, "R_firsts"),
        build.tensor(DType.int8, "Dv"),
    ]
    with build.graph([*rows, *build.storage(), *build.options()]) as graph:
        q, row_batch, row_lengths, positions, offsets, mask, starts, firsts, value_head = (
            value.tensor for value in graph.inputs[:9]
        )
        slopes, sinks, window_left, numbers = (value.tensor for value in graph.inputs[13:])
        o, lse = ops.masked_attention_at_run_time(
            *(build.cache(*graph.inputs[9:13]), q, row_batch, row_lengths),
            row_positions=positions,
            token_offsets=offsets,
            mask=mask,
            mask_starts=starts,
            mask_firsts=firsts,
            alibi_slopes=slopes,
            sinks=sinks,
            window_left=window_left,
            options=numbers,
            head_dim_vo=value_head.shape[0],
            o_dtype=build.variant.o_dtype,
        )
        graph.output(o, lse)


def _mla_attention(build: _Build) -> None:
    types = [
        build.rows("R", "H", "D_ckv"),
        build.rows("R_pe", "H_pe", "D_kpe"),
        build.tensor(DType.int32, "R_batch"),
        build.tensor(DType.int32, "R_lengths"),
        *build.storage(),
        build.tensor(DType.float32, "sinks"),
        build.numbers(DType.float32, LATENT_OPTIONS.size),
    ]
    with build.graph(types) as graph:
        q_nope, q_pe, row_batch, row_lengths = (value.tensor for value in graph.inputs[:4])
        kpe, ckv, table, view, sinks, numbers = graph.inputs[4:]
        o, lse = ops.mla_attention_at_run_time(
            LatentCache(ckv.buffer, table.tensor, kpe.buffer, view.tensor),
            *(q_nope, q_pe, row_batch, row_lengths),
            sinks=sinks.tensor,
            options=numbers.tensor,
            o_dtype=build.variant.o_dtype,
        )
        graph.output(o, lse)


def _merge(build: _Build) -> None:
    with build.graph([build.rows("S", "n", "H", "D"), build.tensor(DType.float32, "S_s", "n_s", "H_s")]) as graph:
        v, s = (value.tensor for value in graph.inputs)
        graph.output(*ops.merge_states(v, s))


_BUILDERS: dict[Op, Callable[[_Build], None]] = {
    "append": _append,
    "gather": _gather,
    "attention": _attention,
    "masked_attention": _masked_attention,
    "mla_attention": _mla_attention,
    "merge": _merge,
}
