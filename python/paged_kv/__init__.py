"""A paged KV cache and attention over it for LLM inference on MAX.

The public names below are FlashInfer's where it has them; each is loaded, with MAX behind it, when it is first used.
"""

# ruff: noqa: F405 (names of the star imports, of which tests/unit/test_public_names.py has the list)
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paged_kv.versions import VERSION

if TYPE_CHECKING:
    from paged_kv.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
    from paged_kv.cache import (
        PagedKVCache,
        allocate_blocks,
        append_kv,
        gather_kv,
        init_paged_kv_cache,
    )
    from paged_kv.cascade import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
        merge_state,
        merge_state_in_place,
        merge_states,
    )
    from paged_kv.decode import (
        BatchDecodeMlaWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan,
        single_decode_with_kv_cache,
    )
    from paged_kv.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose
    from paged_kv.gdn_prefill import chunk_gated_delta_rule
    from paged_kv.mamba import selective_state_update
    from paged_kv.mla import BatchMLAPagedAttentionWrapper
    from paged_kv.page import (
        PagedKVCacheManager,
        append_paged_kv_cache,
        append_paged_mla_kv_cache,
        get_batch_indices_positions,
        get_seq_lens,
    )
    from paged_kv.pool import PagePool, PrefixCache
    from paged_kv.prefill import (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        single_prefill_with_kv_cache,
        single_prefill_with_kv_cache_return_lse,
    )
    from paged_kv.quantization import packbits, segment_packbits
    from paged_kv.rope import *  # noqa: F403
    from paged_kv.runtime.determinism import set_deterministic
    from paged_kv.runtime.threads import set_num_threads
    from paged_kv.runtime.warmup import warmup
    from paged_kv.sampling import *  # noqa: F403

__version__ = VERSION

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PagePool",
    "PagedKVCache",
    "PagedKVCacheManager",
    "PrefixCache",
    "allocate_blocks",
    "append_kv",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "chain_speculative_sampling",
    "chunk_gated_delta_rule",
    "fast_decode_plan",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gather_kv",
    "get_batch_indices_positions",
    "get_seq_lens",
    "init_paged_kv_cache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "packbits",
    "sampling_from_logits",
    "sampling_from_probs",
    "segment_packbits",
    "selective_state_update",
    "set_deterministic",
    "set_num_threads",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "warmup",
]

_MODULES = {
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper"),
    "cache": ("PagedKVCache", "allocate_blocks", "append_kv", "gather_kv", "init_paged_kv_cache"),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "decode": (
        "BatchDecodeMlaWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
    ),
    "gdn_decode": ("gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose"),
    "gdn_prefill": ("chunk_gated_delta_rule",),
    "mamba": ("selective_state_update",),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "page": (
        "PagedKVCacheManager",
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ),
    "pool": ("PagePool", "PrefixCache"),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ),
    "quantization": ("packbits", "segment_packbits"),
    "rope": tuple(name for name in __all__ if name.startswith("apply_")),
    "sampling": (
        "chain_speculative_sampling",
        "softmax",
        *(name for name in __all__ if name.startswith(("min_p_", "sampling_from_", "top_k_", "top_p_"))),
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names} | {
    "set_deterministic": "runtime.determinism",
    "set_num_threads": "runtime.threads",
    "warmup": "runtime.warmup",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # FlashInfer's users write `flashinfer.page.append_paged_kv_cache`
        return import_module(f"paged_kv.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'paged_kv' has no attribute {name!r}")
    value = getattr(import_module(f"paged_kv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
