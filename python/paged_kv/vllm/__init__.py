"""vLLM's CPU backend on these kernels: a plugin of vLLM 0.32, for processes that name it.

    VLLM_PLUGINS=paged_kv vllm serve MODEL

Attention of decoder layers, its cache, and linear layers of bfloat16 are this package's; vLLM's scheduler, its prefix
sharing, its compiled graphs and all else stay. A layer that is not served keeps vLLM's own attention: encoders, cross
attention, float8 caches, ALiBi.
"""

from __future__ import annotations

import os

from paged_kv.errors import ToolchainError

TESTED = "0.32"
"""The release of vLLM whose internals this knows."""
NAME = "paged_kv"
"""The plugin's name."""


def register() -> None:
    """VLLM's entry point `vllm.general_plugins`. It does nothing unless `VLLM_PLUGINS` names the plugin: who installs
    this package for something else keeps vLLM as it is.

    Raises:
        ToolchainError: another release of vLLM is installed.
    """
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    import vllm

    if vllm.__version__.rpartition(".")[0] != TESTED:
        raise ToolchainError(f"paged_kv.vllm knows the internals of vLLM {TESTED}, {vllm.__version__} is installed")
    from vllm.model_executor.layers import utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from paged_kv.vllm import backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backend.__name__}.PagedBackend")
    utils.dispatch_cpu_unquantized_gemm = backend.dispatch_linear
