"""The kernel that answers a call of attention, and why: what `paged-kv doctor --explain` prints.

The rules are the kernels' own. `explain_kernels.mojo` prints them for the CPU target or the GPU that it is compiled
for; no GPU needs to be there.
"""

from __future__ import annotations

import subprocess
from importlib import resources
from pathlib import Path

from paged_kv.errors import ToolchainError

_SECONDS = 120

ARCHITECTURES = {
    "sm_80": "gpu/generic",
    "sm_90a": "gpu/hopper, or gpu/generic where it takes no such call",
    "sm_100a": "gpu/generic",
    "gfx942": "gpu/generic",
}
"""The GPUs that kernels are known to compile for, and the attention kernels of each."""


def attention_kernels(architecture: str) -> str:
    """Return the attention kernels of a GPU, in words; for an unknown architecture, that it may not compile."""
    kernels = ARCHITECTURES.get(architecture)
    return kernels or f"gpu/generic, if it compiles: {architecture} is none of {', '.join(ARCHITECTURES)}"


def explain(
    architecture: str | None, head_dim: int, group: int, page_size: int, cpu_target: str | None = None
) -> list[str]:
    """A line for each pair of dtypes, of q and of the cache, and one for rotary keys: the kernel, then the reason.

    Kernels are named after their folder in `mojo_ops/attention`.

    Args:
        architecture: The architecture of the GPU ("sm_90a", "gfx942", ...); None for the CPU.
        head_dim: Elements of a head.
        group: Query heads a KV head.
        page_size: Tokens in a page.
        cpu_target: The LLVM target that the CPU's kernels are compiled for; None: the compiler's own choice.

    Raises:
        ToolchainError: `mojo` is missing or does not know the architecture.
    """
    device, target = "cpu", [f"--target-cpu={cpu_target}"] if cpu_target else []
    if architecture is not None:
        device, target = "gpu", [f"--target-accelerator={architecture.removeprefix('cuda:')}"]
    sizes = [str(size) for size in (head_dim, group, page_size)]
    package = Path(str(resources.files("paged_kv.mojo_ops")))
    program = str(resources.files("paged_kv.runtime") / "explain_kernels.mojo")
    arguments = ["run", *target, "-I", str(package.parent), program, device, *sizes]
    try:
        from mojo.run import subprocess_run_mojo

        result = subprocess_run_mojo(arguments, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"mojo cannot say which kernels answer on {architecture or 'the CPU'}: {error}") from error
    if result.returncode != 0:
        message = (result.stderr.strip().splitlines() or ["no message"])[-1].rsplit("error: ", 1)[-1]
        raise ToolchainError(f"mojo cannot say which kernels answer on {architecture or 'the CPU'}: {message}")
    return result.stdout.splitlines()
