"""Compiles every variant of the API for a GPU that is not there, by MAX's graph compiler, and exports the artefact.

    python compile_gpu.py ARCHITECTURE KERNELS MEF

A process of its own: MAX takes virtual devices only before its first use, and ends badly where it has some.
"""

import os
import sys
from pathlib import Path

from max import driver


def main(architecture: str, kernels: str, artefact: str) -> None:
    driver.set_virtual_device_api("cuda" if architecture.startswith("sm_") else "hip")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)

    from max.driver import CPU, Accelerator
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, Module, TensorType

    from paged_kv.gpu_kernels import PAIRS
    from paged_kv.graphs import ops
    from paged_kv.runtime import Variant

    ops.kernels = lambda: Path(kernels)  # precompiled: each graph would parse the sources again
    gpu = DeviceRef.GPU(0)
    variants = [Variant("attention", DType[q], DType[kv]) for q, kv in PAIRS]
    for bits in ops.BITS:
        variants += Variant("append", bits, bits).family()
    module = Module()
    for variant in variants:
        variant.build(module, gpu)
    kinds = [TensorType(DType.uint32, [size], gpu) for size in ("B_plus_1", "B", "rows")]
    with Graph("ragged_rows", input_types=kinds, custom_extensions=[ops.kernels()], module=module) as graph:
        row_offsets, cache_lengths, rows = (value.tensor for value in graph.inputs)
        graph.output(*ops.ragged_rows(row_offsets, cache_lengths, rows.shape[0]))
    session = InferenceSession(devices=[CPU(), Accelerator()])
    session.compile(module, custom_extensions=[ops.kernels()]).export_mef(artefact)
    print(len(variants) + 1, "graphs", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
