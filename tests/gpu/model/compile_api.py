"""Compiles the variants of the API for a GPU that is not there, by MAX's graph compiler, and exports the artefact.

Those of float32 and bfloat16 queries: float16's are bfloat16's with another type, which compile_hopper_kernel.mojo and
compile_gpu_kernels.mojo have.

    python compile_api.py ARCHITECTURE KERNELS MEF

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
    from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

    from paged_kv.graphs import ops
    from paged_kv.runtime.variants import Op, Variant
    from support.dtype_pairs import GPU_CODE_PAIRS, GPU_DTYPES, GPU_PAIRS

    ops.kernels = lambda: Path(kernels)  # precompiled: each graph would parse the sources again
    gpu = DeviceRef.GPU(0)
    ops_of_attention: tuple[Op, ...] = ("attention", "masked_attention", "mla_attention")
    variants = [Variant(op, DType[q], DType[kv]) for op in ops_of_attention for q, kv in GPU_PAIRS]
    variants += [Variant(op, DType.bfloat16, DType.bfloat16, DType.float32) for op in ops_of_attention]
    for q, codes in GPU_CODE_PAIRS:
        variants += [Variant(op, DType[q], DType[codes]) for op in ("attention", "masked_attention", "append")]
    variants += [Variant("gather", DType.float32, codes) for codes in ops.CODES]
    for bits in ops.BITS:
        variants += Variant("append", bits, bits).bundle()
    variants += [Variant("merge", dtype, dtype) for dtype in GPU_DTYPES]
    module = Module()
    for variant in variants:
        variant.build(module, gpu)
    kinds = [TensorType(DType.uint32, [size], gpu) for size in ("B_plus_1", "B", "rows")]
    with Graph("ragged_rows", input_types=kinds, custom_extensions=[ops.kernels()], module=module) as graph:
        row_offsets, cache_lengths, rows = (value.tensor for value in graph.inputs)
        graph.output(*ops.ragged_rows(row_offsets, cache_lengths, rows.shape[0]))
    pages = [
        BufferType(DType.uint16, [*shape, 8], gpu) for shape in (["P", 2, 2, 4, "H"], ["P", 4, "H"], ["P", 4, "H"])
    ]
    numbers = [TensorType(DType.int32, ["N"], gpu)] * 2
    kinds = [*pages, TensorType(DType.uint32, ["B", "M"], gpu), *numbers]
    with Graph("copy_pages", input_types=kinds, custom_extensions=[ops.kernels()], module=module) as graph:
        all_layers, k, v, table, sources, targets = graph.inputs
        for cache in (
            ops.PagedCache.of(all_layers.buffer, table.tensor),
            ops.PagedCache(k.buffer, v.buffer, table.tensor, "HND"),
        ):
            ops.copy_pages(cache, sources.tensor, targets.tensor)
        graph.output()
    session = InferenceSession(devices=[CPU(), Accelerator()])
    session.compile(module, custom_extensions=[ops.kernels()]).export_mef(artefact)
    print(len(variants) + 2, "graphs", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
