"""FlashInfer's arguments that choose, feed or tune an NVIDIA kernel.

What cannot change a result is accepted without effect; what would change it is refused, before anything is written.
"""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import shown
from paged_kv.errors import ContractError, ContractTypeError

NEGLIGIBLE_SOFTMAX = 2.0**-25
"""Of a row's weights, a share that float32 rounds away."""

_REASONS = {
    "jit_args": "kernels of one's own are not compiled",
    "args": "there is no kernel of one's own that would take further arguments",
    "kv_cache_sf": "block scales belong to NVFP4 caches, which are not supported",
    "o_sf_scale": "block scales belong to NVFP4 outputs, which are not supported",
    "o_sf_vec_size": "block scales belong to NVFP4 outputs, which are not supported",
    "prefix_len_ptr": "multi-item scoring is not supported",
    "token_pos_in_items_ptr": "multi-item scoring is not supported",
    "max_item_len_ptr": "multi-item scoring is not supported",
    "causal_seqlens_kv_global": "contexts that several devices share are not supported",
    "profiler_buffer": "there is no profiler to write it",
    "o_scale": "outputs of float8 are not supported",
    "ckv_scale_arr": "one scale for the whole cache is supported, ckv_scale",
    "bmm1_scale": "sm_scale is planned",
    "bmm2_scale": "ckv_scale multiplies the values",
}


def refuse_given(**arguments: Any) -> None:
    """Refuses arguments that are neither None nor an empty tuple, and would change the result.

    Raises:
        ContractError: as said; the message names the argument and its type.
    """
    for name, value in arguments.items():
        if value is not None and not (type(value) is tuple and not value):
            raise ContractError(f"{name} must be None, not of type {type(value).__name__}: {_REASONS[name]}")


def is_sink_kernel(jit_args: Any) -> bool:
    """Whether `jit_args` stand for FlashInfer's attention with sinks, whose `run` takes sinks and sm_scale by position.

    That is the one kernel of one's own which is computed here: its name and further operands are looked at, not its
    source.

    Raises:
        ContractError: they are neither that nor None.
    """
    if isinstance(jit_args, tuple | list) and len(jit_args) > 11:
        tensors, scalars, name = jit_args[7], jit_args[9], jit_args[11]
        if [tensors, scalars, name] == [["sink"], ["sm_scale"], "AttentionSink"]:
            return True
    refuse_given(jit_args=jit_args)
    return False


def check_backend(backend: Any) -> None:
    """Refuses what names no backend; every name stands for the kernels that there are.

    Raises:
        ContractTypeError: it is not a str.
    """
    if not isinstance(backend, str):
        raise ContractTypeError(f"backend must be a str, not {shown(backend)}")


def check_skipped_softmax(threshold: Any) -> None:
    """Refuses a `skip_softmax_threshold_scale_factor` that leaves out tokens of a weight that float32 sees.

    Raises:
        ContractTypeError: it is neither None nor a number.
        ContractError: it is not from 0 to 2^-25; all tokens are computed, so that such a one has no effect.
    """
    name = "skip_softmax_threshold_scale_factor"
    if threshold is None:
        return
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ContractTypeError(f"{name} must be a number, not {shown(threshold)}")
    if not 0 <= threshold <= NEGLIGIBLE_SOFTMAX:
        raise ContractError(f"{name} must be None or from 0 to 2^-25, not {shown(threshold)}: no token is left out")
