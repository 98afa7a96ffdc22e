"""Decode attention: the names, argument order and meaning of FlashInfer's `decode` module.

Letters in shapes: B requests, Hq query heads, Hk KV heads, D head dimension, L tokens of one request.

Arrays are torch, NumPy (`ml_dtypes` for bfloat16 and float8), JAX or MAX arrays in the memory of the CPU, or torch and
MAX arrays on one GPU (`arrays.gpu`); they come in without a copy, and results have the kind of `q` and lie beside it.
Queries are float32, float16 or bfloat16; K and V have the dtype of the queries, or are float8_e4m3fn or float8_e5m2
under any of the three. Queries of either float8 are widened, exactly, to the dtype of K, or to bfloat16. Scores,
softmax and sums are float32 whatever the storage; on the CPU, what overflows is computed again in float64
(`mojo_ops/attention/README.md`). D is a multiple of 8 up to 512; every group size Hq / Hk and every page_size is
supported.

Errors are `ContractTypeError` (a TypeError) for types and dtypes, and `ShapeError`, `PageTableError` and
`ContractError` (ValueErrors) for the rest; whenever one is raised, nothing was written. A process that was forked after
MAX ran in its parent has none of MAX's threads: calls there raise `ToolchainError`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from paged_kv.arguments import flag
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import check_alike, check_layout, check_storage
from paged_kv.arrays.types import ArrayT, SupportsDLPack
from paged_kv.batch_decode import BatchDecodeWithPagedKVCacheWrapper
from paged_kv.calls.attend import Attention
from paged_kv.calls.plan import AttentionPlan, attention_options
from paged_kv.calls.rows import Rows
from paged_kv.decode_plan import fast_decode_plan
from paged_kv.errors import ShapeError
from paged_kv.trtllm_decode import trtllm_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]


@overload
def single_decode_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: Literal[False] = False,
) -> ArrayT: ...
@overload
def single_decode_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[ArrayT, ArrayT]: ...
def single_decode_with_kv_cache(
    q: ArrayT,
    k: SupportsDLPack,
    v: SupportsDLPack,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Attention of one query token over one request's contiguous K and V, as FlashInfer's function of this name.

    Args:
        q: `[Hq, D]`.
        k, v: `[L, Hk, D]` (NHD) or `[Hk, L, D]` (HND), of one shape and dtype; they need not be contiguous, but
            their last stride is 1. The query stands at position L - 1.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (q and the un-rotated k are rotated on the fly) or "ALIBI".
        use_tensor_cores: Accepted; the CPU has none.
        q_scale, k_scale, v_scale: Calibration scales of quantised q, k and v; None is 1.
        window_left: Keeps the last `window_left + 1` tokens; -1 keeps all.
        logits_soft_cap: Makes a score x into `cap * tanh(x / cap)`; None and 0 are off.
        sm_scale: Multiplies q . k; None is `1 / sqrt(D)`.
        rope_scale: Divides the rotary frequencies; None is 1.
        rope_theta: Base of the rotary embedding; None is 1e4.
        return_lse: Whether to return the lse as well.

    Returns:
        o `[Hq, D]` in the dtype of `q`, or o and the base-2 lse `[Hq]` float32. L = 0 gives o = 0, lse = -inf.

    Raises:
        ContractTypeError: a dtype or a pair of dtypes is not supported, or an argument has the wrong type.
        ShapeError: a rank, shape, head count or head_dim does not fit.
        ContractError: another value is out of range.
    """
    del use_tensor_cores
    wants_lse = flag("return_lse", return_lse)
    device = devices.device_of(q=q, k=k, v=v)
    query = device.view(q, "q")
    if query.ndim != 2:
        raise ShapeError(f"q: shape {list(query.shape)}, expected [num_qo_heads, head_dim]")
    check_layout(kv_layout)
    keys, values = device.view(k, "k"), device.view(v, "v")
    check_storage(device, keys, "k", 3)
    check_storage(device, values, "v", 3)
    check_alike(values, keys, "v", "k's")
    # One page of all the tokens: [1, L, Hk, D].
    keys, values = (view[None] if kv_layout == "NHD" else view.swapaxes(0, 1)[None] for view in (keys, values))
    if query.shape[0] % max(keys.shape[2], 1):
        raise ShapeError(f"q: its {query.shape[0]} heads are no multiple of k's {keys.shape[2]}")
    if keys.shape[3] != query.shape[1]:
        raise ShapeError(f"k: head_dim is {keys.shape[3]}, q's is {query.shape[1]}")
    length = keys.shape[1]
    if length == 0:  # a pool of no pages, for a request of none
        keys, values = (view.reshape(0, 1, *view.shape[2:]) for view in (keys, values))
    attention = Attention(
        AttentionPlan(
            num_qo_heads=query.shape[0],
            num_kv_heads=keys.shape[2],
            head_dim=query.shape[1],
            page_size=max(length, 1),
            q_dtype=device.dtype(query),
            kv_dtype=device.dtype(keys),
            pos_encoding_mode=pos_encoding_mode,
            options=attention_options(window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            dtype_names=("q: dtype", "k: dtype"),
        )
    )
    scales = (q_scale, k_scale, v_scale)
    o, lse = attention.run(device, query[None], keys, values, Rows.of_one(length), scales)
    result = device.like(q, o[0])
    return (result, device.like(q, lse[0])) if wants_lse else result


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper whose page table lives in the user's buffers, which fix the batch.

    A captured graph of FlashInfer's replays with whatever the buffers hold; here every `run` reads them.

    Args:
        workspace_buffer: Accepted, not kept.
        indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout, use_tensor_cores: As in the other wrapper.
    """

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: SupportsDLPack,
        indices_buffer: SupportsDLPack,
        last_page_len_buffer: SupportsDLPack,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )
