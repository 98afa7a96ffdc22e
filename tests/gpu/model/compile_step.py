"""Compiles the step of a small Llama for a GPU that is not there, by MAX's graph compiler, and exports the artefact.

    python compile_step.py ARCHITECTURE KERNELS MEF

Sums stand in for MAX's matmuls, whose kernels take three minutes to compile (docs/notes/compile-time.md); the bundle of
benchmarks/gpu_bundle compiles a step with them. A process of its own, as `compile_api.py`.
"""

import os
import sys
import tempfile
from pathlib import Path

from max import driver


def main(architecture: str, kernels: str, artefact: str) -> None:
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)

    from max.driver import CPU, Accelerator
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Module
    from max.graph import ops as max_ops

    from paged_kv.graphs.models.decoder import build_step
    from paged_kv.graphs.ops import compiled_kernels
    from support.checkpoints import read_config

    module = Module()
    with tempfile.TemporaryDirectory() as folder, compiled_kernels(Path(kernels)):
        config = read_config(Path(folder) / "model", num_hidden_layers=1)
        max_ops.matmul = lambda x, w: x[:, :1] + w[:1]
        build_step(config, DType.float16, module, DeviceRef.GPU(0))
    session = InferenceSession(devices=[CPU(), Accelerator()])
    session.compile(module, custom_extensions=[Path(kernels)]).export_mef(artefact)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
