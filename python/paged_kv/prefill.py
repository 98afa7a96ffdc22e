"""Prefill attention: the names, argument order and meaning of FlashInfer's `prefill` module.

Letters in shapes: B requests, R query rows, Hq query heads, Hk KV heads, D head dimension (Dv: V's), N tokens.

The query rows of a request are its last tokens, whose K and V are there already: row i of q_len over kv_len tokens
stands at position `kv_len - q_len + i`. A row sees every token, those up to its own (`causal`), or those of a mask; a
window keeps the tokens from `window_left` before its position on, also under a mask.

Arrays, dtypes, options and errors are those of `decode.py`; so is what overflows, and what a fork may do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arguments import flag
from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import dtype_of
from paged_kv.arrays.types import ArrayT, DTypeLike, SupportsDLPack
from paged_kv.calls.attend import Attention
from paged_kv.calls.kernel_arguments import check_backend, refuse_given
from paged_kv.calls.masks import packed_mask
from paged_kv.calls.paged_call import attend_tokens, token_views
from paged_kv.calls.plan import AttentionPlan, attention_options
from paged_kv.calls.ragged import RaggedBatch, TokenRanges
from paged_kv.calls.scalars import one_scale
from paged_kv.errors import ShapeError
from paged_kv.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from paged_kv.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def single_prefill_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    scale_q: SupportsDLPack | float | None = None,
    scale_k: SupportsDLPack | float | None = None,
    scale_v: SupportsDLPack | float | None = None,
    o_dtype: DTypeLike | None = None,
    custom_mask: SupportsDLPack | None = None,
    packed_custom_mask: SupportsDLPack | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attention of one request's last tokens over its contiguous K and V, as FlashInfer's function of this name.

    Args:
        q: `[R, Hq, D]`.
        k: `[N, Hk, D]` (NHD) or `[Hk, N, D]` (HND); it need not be contiguous, but its last stride is 1.
        v: The same with Dv.
        scale_q, scale_k, scale_v: Calibration scales of quantised q, k and v: a number, or an array `[Hq]` or `[Hk]`
            of one number; None is 1.
        o_dtype: Of o; None is q's.
        custom_mask: `[R, N]` bool: which tokens each row sees. It counts instead of `causal`; a window still holds.
        packed_custom_mask: The same as bytes, `packbits(custom_mask.reshape(-1), "little")`; it counts instead of
            `custom_mask`.
        causal: Whether a row sees no token behind its own.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated k are rotated on the fly) or "ALIBI".
        use_fp16_qk_reduction: Accepted, without effect.
        sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
        window_left: Keeps the tokens from `window_left` before a row's own on; -1 keeps all.
        logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
        rope_scale: Divides the rotary frequencies; None is 1.
        rope_theta: Base of the rotary embedding; None is 1e4.
        backend: Accepted; the name of one of FlashInfer's, without effect.
        return_lse: Whether to return the lse as well.
        kv_cache_sf: Must be None.
        k_scale, v_scale: Further factors of k and v; None is 1.

    Returns:
        o `[R, Hq, Dv]` in the kind of `q`, or o and the base-2 lse `[R, Hq]` float32. A row that sees no token has
        o = 0 and lse = -inf.

    Raises:
        ContractTypeError: a dtype or a pair of dtypes is not supported, or an argument has the wrong type.
        ShapeError: a rank, shape, head count or head_dim does not fit, or a mask has not a bit for each row and token.
        ContractError: another value is out of range.
    """
    del use_fp16_qk_reduction
    check_backend(backend)
    refuse_given(kv_cache_sf=kv_cache_sf)
    wants_lse, is_causal = flag("return_lse", return_lse), flag("causal", causal)
    device = devices.device_of(q=q, k=k, v=v)
    query = device.view(q, "q")
    if query.ndim != 3:
        raise ShapeError(f"q: shape {list(query.shape)}, expected [qo_len, num_qo_heads, head_dim]")
    keys, values = token_views(device, (k, v), kv_layout, same_width=False)
    if query.shape[1] % max(keys.shape[1], 1):
        raise ShapeError(f"q: its {query.shape[1]} heads are no multiple of k's {keys.shape[1]}")
    if keys.shape[2] != query.shape[2]:
        raise ShapeError(f"k: head_dim is {keys.shape[2]}, q's is {query.shape[2]}")
    plan = AttentionPlan(
        num_qo_heads=query.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=query.shape[2],
        head_dim_vo=values.shape[2],
        page_size=None,
        q_dtype=device.dtype(query),
        kv_dtype=device.dtype(keys),
        pos_encoding_mode=pos_encoding_mode,
        options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
        o_dtype=None if o_dtype is None else dtype_of(o_dtype, "o_dtype"),
        dtype_names=("q: dtype", "k: dtype"),
    )
    scales = (
        one_scale(scale_q, "scale_q", plan.num_qo_heads),
        one_scale(scale_k, "scale_k", plan.num_kv_heads, k_scale, "k_scale"),
        one_scale(scale_v, "scale_v", plan.num_kv_heads, v_scale, "v_scale"),
    )
    tokens = TokenRanges(np.array([0, len(keys)], np.int32), "k")
    batch = RaggedBatch(np.array([0, len(query)], np.int32), tokens, None, is_causal, "q")
    mask = packed_mask(custom_mask, packed_custom_mask, batch.q_lengths, tokens.lengths)
    rows = RaggedBatch(batch.qo_indptr, tokens, mask, is_causal, "q").requests().rows(pos_encoding_mode == "ALIBI")
    return attend_tokens(Attention(plan), rows, q, (k, v), kv_layout, scales, return_lse=wants_lse)


def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`single_prefill_with_kv_cache` with `return_lse=True`."""
    o, lse = single_prefill_with_kv_cache(*args, **kwargs | {"return_lse": True})
    return o, lse
