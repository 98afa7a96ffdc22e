"""Compiled variants of the ops: compile a family together, keep it, execute.

A cold compile costs some 25 s for one graph and little more for a few, so a variant that is missing is
compiled together with its family. One variant serves every storage layout: the storage goes in as flat
memory, its shape and strides as numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, Type

from paged_kv.errors import ToolchainError
from paged_kv.graphs import ops
from paged_kv.graphs.ops import PagedCache
from paged_kv.runtime.artefacts import load_graphs
from paged_kv.runtime.cpu_target import apply_cpu_target

Op = Literal["append", "gather", "attention", "merge"]


@dataclass(frozen=True)
class Variant:
    """One compiled graph: an op with its dtypes. Sizes, strides and options are run-time values."""

    op: Op
    dtype: DType
    """Of q, or of the states to merge; append and gather only move rows: there it is the unsigned integer of the rows'
    size."""
    kv_dtype: DType

    @property
    def name(self) -> str:
        return f"{self.op}_{self.dtype.name}_{self.kv_dtype.name}"

    def __str__(self) -> str:
        """For people: `attention (bfloat16 over float8_e4m3fn)`, `append (16 bits)`."""
        if self.op in ("append", "gather"):
            return f"{self.op} ({8 * self.dtype.size_in_bytes} bits)"
        over = "" if self.kv_dtype == self.dtype else f" over {self.kv_dtype.name}"
        return f"{self.op} ({self.dtype.name}{over})"

    def family(self) -> list[Variant]:
        """The variants that are compiled along with this one: append and gather go together."""
        return [self] if self.op in ("attention", "merge") else [replace(self, op="append"), replace(self, op="gather")]

    def build(
        self,
        module: Module,
        device: DeviceRef | None = None,
        *,
        batch_invariant: bool = False,
        gpu_kernel: ops.GpuKernel = "best",
    ) -> None:
        """Adds this variant's graph to `module`, for the CPU where no device is given; the options are attention's.

        Its inputs, in order: the rows (attention: q, row_batch, row_lengths; append: k, v, batch_indices,
        positions; gather: indptr and an array of any content in the shape of the result, `[N, Hk, D]` int8),
        then k_blocks, v_blocks, lookup_table, view, and for attention alibi_slopes, sinks, window_left, options.
        `view`, `window_left` and `options` lie on the host, all else on the device. Of merge: v `[S, n, H, D]` and
        s `[S, n, H]`.
        """
        host = DeviceRef.CPU()
        place = device or host

        def tensor(dtype: DType, *shape: str | int, on: DeviceRef = place) -> TensorType:
            return TensorType(dtype, list(shape), on)

        if self.op == "merge":
            types: list[Type[Any]] = [tensor(self.dtype, "S", "n", "H", "D"), tensor(DType.float32, "S", "n", "H")]
            with Graph(self.name, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
                v, s = (value.tensor for value in graph.inputs)
                graph.output(*ops.merge_states(v, s))
            return

        rows: list[TensorType] = {
            "append": [
                tensor(self.dtype, "N", "Hk", "D"),
                tensor(self.dtype, "N", "Hk", "D"),
                tensor(DType.int32, "N"),
                tensor(DType.int32, "N"),
            ],
            "gather": [tensor(DType.int32, "offsets"), tensor(DType.int8, "N", "Hk", "D")],
            "attention": [tensor(self.dtype, "R", "Hq", "D"), tensor(DType.int32, "R"), tensor(DType.int32, "R")],
        }[self.op]
        storage: list[Type[Any]] = [
            BufferType(self.kv_dtype, ["k_elements"], place),
            BufferType(self.kv_dtype, ["v_elements"], place),
            tensor(DType.uint32, "B", "pages_per_request"),
            tensor(DType.int64, 12, on=host),
        ]
        options = [
            tensor(DType.float32, "slopes"),
            tensor(DType.float32, "sinks"),
            tensor(DType.int32, on=host),
            tensor(DType.float32, 5, on=host),
        ]
        types = [*rows, *storage, *(options if self.op == "attention" else [])]
        with Graph(self.name, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
            args = [value.tensor for value in graph.inputs[: len(rows)]]
            k_blocks, v_blocks, table, view, *rest = graph.inputs[len(rows) :]
            cache = PagedCache(k_blocks.buffer, v_blocks.buffer, table.tensor, "STRIDED", view.tensor)
            if self.op == "append":
                ops.append(cache, *args)
                graph.output()
            elif self.op == "gather":
                indptr, like = args
                num_tokens, heads, head_dim = like.shape
                graph.output(*ops.gather(cache, indptr, num_tokens, num_kv_heads=heads, head_dim=head_dim))
            else:
                slopes, sinks, window_left, numbers = (value.tensor for value in rest)
                graph.output(
                    *ops.attention_at_run_time(
                        cache,
                        *args,
                        alibi_slopes=slopes,
                        sinks=sinks,
                        window_left=window_left,
                        options=numbers,
                        batch_invariant=batch_invariant,
                        gpu_kernel=gpu_kernel,
                    )
                )


class Runtime:
    """A MAX session on the CPU or on a GPU, and the variants loaded in it.

    Args:
        gpu: The number of the GPU; None for the CPU.

    Raises:
        ToolchainError: MAX does not see that GPU.
    """

    place: Device
    """Where the variants run, as the driver calls it."""
    device: DeviceRef
    """The same, as graphs call it."""
    architecture: str
    """Of a GPU; empty for the CPU."""

    def __init__(self, gpu: int | None = None) -> None:
        apply_cpu_target()
        if gpu is None:
            self.place, self.device, self.architecture = CPU(), DeviceRef.CPU(), ""
            self.session = InferenceSession(devices=[self.place])
        else:
            try:
                accelerator = Accelerator(gpu)
            except (RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ToolchainError(f"GPU {gpu}: MAX finds no such device ({reason})") from error
            self.place, self.device = accelerator, DeviceRef.GPU(gpu)
            self.architecture = f"{accelerator.api} {accelerator.architecture_name} {gpu}"
            self.session = InferenceSession(devices=[CPU(), accelerator])
        self._models: dict[Variant, Model] = {}

    def load(self, variants: Iterable[Variant]) -> None:
        """Loads those of `variants` that are missing, compiled in one go where the disk has them not."""
        missing = sorted({variant for variant in variants if variant not in self._models}, key=lambda v: v.name)
        if not missing:
            return

        by_name = {variant.name: variant for variant in missing}

        def build(module: Module, names: Sequence[str]) -> None:
            for name in names:
                by_name[name].build(module, self.device)

        words = ", ".join(str(variant) for variant in missing)
        models = load_graphs(
            self.session,
            {name: f"{name} {self.architecture}".strip() for name in by_name},
            build,
            on_compile=lambda: _announce(f"paged-kv: compiling {words}: about 25 s, once on this machine"),
        )
        self._models.update({variant: models[variant.name] for variant in missing})

    def execute(self, variant: Variant, *inputs: Buffer) -> list[Buffer]:
        """Runs one variant, loading its family first where needed; see `Variant.build` for the inputs."""
        if variant not in self._models:
            self.load(variant.family())
        return self._models[variant].execute(*inputs)


def _announce(line: str) -> None:
    """One line for whoever waits at a terminal; logs and pipes stay clean."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@cache
def runtime_on(gpu: int | None) -> Runtime:
    """The one runtime of this process on a GPU, or on the CPU."""
    return Runtime(gpu)


def default_runtime() -> Runtime:
    """The one runtime of this process on the CPU."""
    return runtime_on(None)
