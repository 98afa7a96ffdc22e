"""The step of a Llama but its matmuls, compiled for sm_90a without a GPU: our kernels among MAX's, in one artefact.

Found here: a step that does not compile for a GPU, one of our kernels that its graph lost or that spills in it.
"""

import pytest

from gpu.model import programs

pytestmark = pytest.mark.waits_for(programs.step)

OURS = {"attention_gpu_hopper": 6, "transfer_gpu_append": 1, "transfer_gpu_ragged": 1}
"""At least so many kernels of each module. Attention on Hopper: three head_dims, groups up to 8 and up to 16."""


def test_the_step_compiles_with_all_its_kernels():
    _, kernels = programs.step()
    names = [kernel.name for kernel in kernels]
    for part, least in OURS.items():
        assert sum(part in name for name in names) >= least, (part, names)
    for kernel in kernels:
        assert kernel.stack_bytes == 0 or "mojo_ops" not in kernel.name, kernel
