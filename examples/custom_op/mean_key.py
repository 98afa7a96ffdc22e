"""A Mojo op of one's own over the pages of paged-kv: compile it, put it into a graph, run it.

The op is in mean_key/ops.mojo. It imports paged-kv's Mojo package, `mojo_ops`: the compiler finds the source by -I, and
MAX gets both packages compiled.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph import ops as max_ops
from mojo.run import subprocess_run_mojo

from paged_kv.graphs import ops

HERE = Path(__file__).parent


def precompile(source: Path, folder: Path) -> Path:
    """`source` as a Mojo package in `folder`. Compiled packages load only in the Mojo that made them: keep none."""
    compiled = folder / f"{source.name}.mojoc"
    paths = [str(path) for path in (ops.kernels().parent, source, compiled)]
    subprocess_run_mojo(["precompile", "-I", paths[0], paths[1], "-o", paths[2]], check=True)
    return compiled


def build(packages: list[Path]) -> Graph:
    cpu = DeviceRef.CPU()
    lengths = TensorType(DType.int32, ["B"], cpu)
    table = TensorType(DType.uint32, ["B", "max_pages"], cpu)
    blocks = BufferType(DType.bfloat16, ["pages", 2, "page_size", "Hk", 64], cpu)
    with Graph("mean_key", input_types=[lengths, table, blocks], custom_extensions=packages) as graph:
        mean = TensorType(DType.float32, ["B", "Hk", 64], cpu)
        values = [value.buffer if i == 2 else value.tensor for i, value in enumerate(graph.inputs)]
        graph.output(*max_ops.inplace_custom("example_mean_key", device=cpu, values=values, out_types=[mean]))
    return graph


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        packages = [precompile(source, Path(folder)) for source in (ops.kernels(), HERE / "mean_key")]
        model = InferenceSession(devices=[CPU()]).load(build(packages))

    blocks = torch.randn(10, 2, 16, 2, 64).bfloat16()
    table = np.array([[7, 2, 0], [4, 9, 1]], np.uint32)
    lengths = np.array([20, 33], np.int32)  # request 0: page 7, then 4 slots of page 2
    (mean,) = model.execute(Buffer.from_dlpack(lengths), Buffer.from_dlpack(table), Buffer.from_dlpack(blocks))
    expected = [
        blocks[list(pages), 0].flatten(0, 1)[:n].float().mean(0) for pages, n in zip(table, lengths, strict=True)
    ]
    error = np.abs(mean.to_numpy() - torch.stack(expected).numpy()).max()
    print(f"mean key of each request and head: {tuple(mean.shape)}, error {error:.0e}")


if __name__ == "__main__":
    main()
