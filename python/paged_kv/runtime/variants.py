"""The variants of the ops: what is compiled for the array API, one graph each.

One variant serves every storage layout: the storage goes in as flat memory, its shape and strides as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, Type

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
        """Return what the graph depends on; `architecture` is a GPU's, with its number."""
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
        `view`, `window_left` and `options` lie on the host, all else on the device. Of merge: v `[S, n, H, D]` and
        s `[S, n, H]`. Of mla_attention: q_nope, q_pe, row_batch, row_lengths, the storage with kpe as K and ckv as V,
        sinks, options. No two inputs share the name of a size, so that sizes which differ are refused by the op, in its
        words, and not by MAX before.
        """
        host = DeviceRef.CPU()
        device = device or host

        def tensor(dtype: DType, *shape: str | int, on: DeviceRef = device) -> TensorType:
            return TensorType(dtype, list(shape), on)

        if self.op == "merge":
            types: list[Type[Any]] = [
                tensor(self.dtype, "S", "n", "H", "D"),
                tensor(DType.float32, "S_s", "n_s", "H_s"),
            ]
            with Graph(self.name, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
                v, s = (value.tensor for value in graph.inputs)
                graph.output(*ops.merge_states(v, s))
            return

        storage: list[Type[Any]] = [
            BufferType(self.kv_dtype, ["k_elements"], device),
            BufferType(self.kv_dtype, ["v_elements"], device),
            tensor(DType.uint32, "B", "pages_per_request"),
            tensor(DType.int64, "view_numbers", on=host),
        ]
        if self.op == "mla_attention":
            types = [
                tensor(self.dtype, "R", "H", "D_ckv"),
                tensor(self.dtype, "R_pe", "H_pe", "D_kpe"),
                tensor(DType.int32, "R_batch"),
                tensor(DType.int32, "R_lengths"),
                *storage,
                tensor(DType.float32, "sinks"),
                tensor(DType.float32, LATENT_OPTIONS.size, on=host),
            ]
            with Graph(self.name, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
                q_nope, q_pe, row_batch, row_lengths = (value.tensor for value in graph.inputs[:4])
                kpe, ckv, table, view, sinks, numbers = graph.inputs[4:]
                latent = LatentCache(ckv.buffer, table.tensor, kpe.buffer, view.tensor)
                graph.output(
                    *ops.mla_attention_at_run_time(
                        *(latent, q_nope, q_pe, row_batch, row_lengths),
                        sinks=sinks.tensor,
                        options=numbers.tensor,
                        o_dtype=self.o_dtype,
                    )
                )
            return

        rows: list[TensorType] = {
            "append": [
                tensor(self.dtype, "N", "Hk", "D"),
                tensor(self.dtype, "N_v", "Hk_v", "D_v"),
                tensor(DType.int32, "N_batch"),
                tensor(DType.int32, "N_positions"),
            ],
            "gather": [tensor(DType.int32, "offsets"), tensor(DType.int8, "N", "Hk", "D")],
            "attention": [
                tensor(self.dtype, "R", "Hq", "D"),
                tensor(DType.int32, "R_batch"),
                tensor(DType.int32, "R_lengths"),
            ],
            "masked_attention": [
                tensor(self.dtype, "R", "Hq", "D"),
                *(tensor(DType.int32, f"R_{name}") for name in ("batch", "lengths", "positions")),
                tensor(DType.int32, "B_offsets"),
                tensor(DType.uint8, "mask_bytes"),
                tensor(DType.int64, "R_starts"),
                tensor(DType.int32, "R_firsts"),
                tensor(DType.int8, "Dv"),
            ],
        }[self.op]
        options = [
            tensor(DType.float32, "slopes"),
            tensor(DType.float32, "sinks"),
            tensor(DType.int32, on=host),
            tensor(DType.float32, SOFTMAX_OPTIONS.size, on=host),
        ]
        types = [*rows, *storage, *(options if self.op in ("attention", "masked_attention") else [])]
        with Graph(self.name, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
            args = [value.tensor for value in graph.inputs[: len(rows)]]
            k_blocks, v_blocks, table, view, *rest = graph.inputs[len(rows) :]
            kv_format = ops.CODES.get(self.kv_dtype) if self.dtype in ops.DTYPES else None
            cache = PagedCache(k_blocks.buffer, v_blocks.buffer, table.tensor, "STRIDED", view.tensor, kv_format)
            if self.op == "append":
                ops.append(cache, *args)
                graph.output()
            elif self.op == "gather":
                indptr, like = args
                num_tokens, heads, head_dim = like.shape
                graph.output(
                    *ops.gather(cache, indptr, num_tokens, num_kv_heads=heads, head_dim=head_dim, dtype=self.dtype)
                )
            elif self.op == "attention":
                slopes, sinks, window_left, numbers = (value.tensor for value in rest)
                o, lse = ops.attention_at_run_time(
                    cache,
                    *args,
                    alibi_slopes=slopes,
                    sinks=sinks,
                    window_left=window_left,
                    options=numbers,
                    o_dtype=self.o_dtype,
                    batch_invariant=batch_invariant,
                    gpu_kernel=gpu_kernel,
                )
                graph.output(o, lse)
            else:
                slopes, sinks, window_left, numbers = (value.tensor for value in rest)
                q, row_batch, row_lengths, positions, offsets, mask, starts, firsts, value_head = args
                o, lse = ops.masked_attention_at_run_time(
                    cache,
                    q,
                    row_batch,
                    row_lengths,
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
                    o_dtype=self.o_dtype,
                )
                graph.output(o, lse)
