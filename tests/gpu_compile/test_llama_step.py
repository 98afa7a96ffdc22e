"""The step of a Llama, compiled for sm_90a without a GPU: our kernels among MAX's, in one artefact."""

import pytest

from support import gpu_programs

pytestmark = pytest.mark.waits_for(gpu_programs.step)

OURS = {"attention_gpu_hopper": 6, "transfer_gpu_append": 1, "transfer_gpu_ragged": 1}
"""At least so many kernels of each module. Attention on Hopper: three head_dims, groups up to 8 and up to 16."""


def test_the_step_compiles_with_all_its_kernels():
    _, kernels = gpu_programs.step()
    names = [kernel.name for kernel in kernels]
    for part, least in OURS.items():
        assert sum(part in name for name in names) >= least, (part, names)
    assert any("matmul" in name for name in names), names  # MAX's, of the linear layers


def test_no_kernel_of_ours_spills():
    _, kernels = gpu_programs.step()
    ours = [kernel for kernel in kernels if "mojo_ops" in kernel.name]
    assert ours
    for kernel in ours:
        assert kernel.stack_bytes == 0, kernel
