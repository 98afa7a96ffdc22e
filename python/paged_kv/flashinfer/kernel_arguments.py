"""FlashInfer's arguments that choose, feed or tune an NVIDIA kernel, and what each may be here.

What cannot change a result is accepted without effect; what would change it is refused, before anything is written.
`docs/coming-from-flashinfer.md` prints `WITHOUT_EFFECT` and `REFUSED`.
"""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import flag, integer, shown
from paged_kv.errors import ContractError, ContractTypeError

NEGLIGIBLE_SOFTMAX = 2.0**-25
"""A share of a row's softmax weights that float32 rounds away."""

_WORKSPACES = "kernels take what they need from MAX"
_FOLLOWS = "the kernel follows from the call and its arrays"
_FLOAT32 = "scores, softmax and sums are float32"
_SPLIT = "how a call is split follows from its rows and lengths"
_REPEATED = "what it says follows from the other arguments"
_HOST = "plans are made on the host"

WITHOUT_EFFECT = {
    "float_workspace_buffer": _WORKSPACES,
    "int_workspace_buffer": _WORKSPACES,
    "workspace_buffer": _WORKSPACES,
    "multi_ctas_kv_counter_buffer": _WORKSPACES,
    "backend": f"a str; {_FOLLOWS}. MLA's `run` takes `kv_len` and `page_table` with `cutlass`",
    "device": _FOLLOWS,
    "enable_pdl": _FOLLOWS,
    "use_tensor_cores": _FOLLOWS,
    "use_fp16_qk_reduction": _FLOAT32,
    "use_fp16_softmax": _FLOAT32,
    "bf16q_fp8kv_transform_mode": _FLOAT32,
    "uses_spcompress": _FLOAT32,
    "disable_split_kv": _SPLIT,
    "fixed_split_size": _SPLIT,
    "request_order": _SPLIT,
    "request_order_plan": _SPLIT,
    "uniform_q_len": _SPLIT,
    "lse_mode": "a run says whether it returns the lse",
    "max_sequence_kv": _REPEATED,
    "max_token_per_sequence": _REPEATED,
    "use_sinks": _REPEATED,
    "non_blocking": _HOST,
    "jit_kwargs": "they belong to `jit_args`",
}
"""Arguments that are accepted, and why nothing follows from them."""

_DEVICES = "contexts of several devices are not supported"
_MULTI_ITEM = "multi-item scoring is not supported"
_NVFP4_CACHE = "block scales belong to NVFP4 caches, which are not supported"
_NVFP4_OUTPUT = "block scales belong to NVFP4 outputs, which are not supported"
_OWN_KERNEL = "kernels of one's own are not compiled"
_INTERMEDIATE = "`mamba` saves no states between tokens"

REFUSED: dict[str, tuple[Any, str]] = {
    "jit_args": (None, _OWN_KERNEL),
    "args": ((), "there is no kernel of one's own that would take further arguments"),
    "variant_owns_mask": (False, "there is no kernel of one's own (jit_args)"),
    "kv_cache_sf": (None, _NVFP4_CACHE),
    "o_sf_scale": (None, _NVFP4_OUTPUT),
    "o_sf_vec_size": (None, _NVFP4_OUTPUT),
    "prefix_len_ptr": (None, _MULTI_ITEM),
    "token_pos_in_items_ptr": (None, _MULTI_ITEM),
    "token_pos_in_items_len": (0, _MULTI_ITEM),
    "max_item_len_ptr": (None, _MULTI_ITEM),
    "enable_block_sparse_attention": (False, "pages that differ between KV heads are not supported"),
    "causal_seqlens_kv_global": (None, _DEVICES),
    "cp_world": (1, _DEVICES),
    "cp_rank": (0, _DEVICES),
    "profiler_buffer": (None, "there is no profiler to write it"),
    "use_profiler": (False, "there is no profiler"),
    "window_left": (-1, "the latent kernels have no window"),
    "window_right": (0, "no query sees tokens after its own"),
    "o_scale": (None, "outputs of float8 are not supported"),
    "output_scale": ("none", "outputs of float8 are not supported"),
    "skip_softmax": (False, "no token is left out"),
    "ckv_scale_arr": (None, "one scale for the whole cache is supported, ckv_scale"),
    "bmm1_scale": (None, "sm_scale is planned"),
    "bmm2_scale": (None, "ckv_scale multiplies the values"),
    "state_scale": (None, "states of `mamba` are floats"),
    "intermediate_states_buffer": (None, _INTERMEDIATE),
    "intermediate_state_indices": (None, _INTERMEDIATE),
    "intermediate_state_scales": (None, _INTERMEDIATE),
    "rand_seed": (None, "states of `mamba` are rounded to nearest"),
    "cu_seqlens": (None, "`mamba` takes as many tokens of each request"),
    "num_accepted_tokens": (None, _INTERMEDIATE),
}
"""Arguments that would change the result: the one value that each may have, and why. The six from `o_scale` on are
MLA's, those after them Mamba's."""


def refuse_unsupported(**arguments: Any) -> None:
    """Refuses arguments of `REFUSED` with another value than the one that they may have.

    Raises:
        ContractTypeError: an argument that is a bool or an integer in FlashInfer is none.
        ContractError: it has another value; the message names the argument and why.
    """
    for name, value in arguments.items():
        neutral, why = REFUSED[name]
        if value is neutral:
            continue
        plain: Any = value
        if isinstance(neutral, bool):
            plain = flag(name, value)
        elif isinstance(neutral, int):
            plain = integer(name, value, -(2**31), 2**31 - 1)
        if neutral is None or type(plain) is not type(neutral) or plain != neutral:
            raise ContractError(f"{name}: expected {neutral!r}, got {shown(value)}: {why}")


def is_sink_kernel(jit_args: Any) -> bool:
    """Return whether `jit_args` stand for FlashInfer's attention with sinks, whose `run` takes sinks and sm_scale by
    position.

    That is the one kernel of one's own which is computed here: its name and further operands are looked at, not its
    source.

    Raises:
        ContractError: they are neither that nor None.
    """
    if isinstance(jit_args, tuple | list) and len(jit_args) > 11:
        tensors, scalars, name = jit_args[7], jit_args[9], jit_args[11]
        if [tensors, scalars, name] == [["sink"], ["sm_scale"], "AttentionSink"]:
            return True
    refuse_unsupported(jit_args=jit_args)
    return False


def check_backend(backend: Any) -> None:
    """Refuses a backend that is no str; every name stands for the same kernels.

    Raises:
        ContractTypeError: it is not a str.
    """
    if not isinstance(backend, str):
        raise ContractTypeError(f"backend: expected a str, got {shown(backend)}")


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
        raise ContractTypeError(f"{name}: expected a number, got {shown(threshold)}")
    if not 0 <= threshold <= NEGLIGIBLE_SOFTMAX:
        raise ContractError(f"{name}: expected None or 0 to 2^-25, got {shown(threshold)}: no token is left out")


def markdown() -> str:
    """Both tables, for `docs/coming-from-flashinfer.md`: arguments with one reason share a line."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, why in WITHOUT_EFFECT.items():
        by_reason.setdefault(("anything, without effect", why), []).append(name)
    for name, (only, why) in REFUSED.items():
        shown_only = "nothing" if only == () else f"`{only!r}`"
        by_reason.setdefault((f"{shown_only} alone", why), []).append(name)
    lines = ["| arguments | what they may be | why |", "|---|---|---|"]
    for (accepted, why), names in by_reason.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {accepted} | {why} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
