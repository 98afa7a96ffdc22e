"""The compiled graph of a linear layer, for calls outside a model's graph."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType

from paged_kv.graphs import ops
from paged_kv.runtime.compile_key import CompileKey


@dataclass(frozen=True)
class LinearVariant:
    """One compiled graph: `x w^T` of one dtype, of any sizes; it is compiled alone."""

    dtype: DType

    @property
    def name(self) -> str:
        return f"linear_{self.dtype.name}"

    def __str__(self) -> str:
        return f"linear ({self.dtype.name})"

    def key(self, architecture: str = "") -> CompileKey:
        """What the graph depends on."""
        return CompileKey(self.name, ("runtime/linear_variant.py",), architecture)

    def family(self) -> list[LinearVariant]:
        """Itself."""
        return [self]

    def build(self, module: Module, device: DeviceRef | None = None) -> None:
        """Adds the graph to `module`: x `[M, K]` and w `[N, K]` to `[M, N]`. The caller checks that both K are one."""
        device = device or DeviceRef.CPU()
        types = [TensorType(self.dtype, ["M", "K"], device), TensorType(self.dtype, ["N", "K_w"], device)]
        with Graph(self.name, input_types=types, custom_extensions=[ops.kernels()], module=module) as graph:
            x, w = (value.tensor for value in graph.inputs)
            graph.output(ops.linear(x, w.rebind(["N", "K"])))
