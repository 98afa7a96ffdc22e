"""The typed wrapper of the op of attention: decode and causal prefill. Its dimensions are those of `ops.py`."""

from __future__ import annotations

from typing import Literal, Unpack, get_args

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue, ops

from paged_kv.call_layouts import SOFTMAX_OPTIONS
from paged_kv.errors import ContractError, ShapeError
from paged_kv.graphs.checks import check_dtype, check_tensor, check_value
from paged_kv.graphs.paged_cache import DTYPES, KV_DTYPES, PagedCache, constant
from paged_kv.options import HEAD_DIMS, AttentionArguments, AttentionOptions, is_head_dim

GpuKernel = Literal["best", "plain"]

ATTENTION = "paged_kv_attention"


def attention(
    cache: PagedCache,
    q: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    *,
    layer: int = 0,
    alibi_slopes: TensorValue | None = None,
    sinks: TensorValue | None = None,
    o_dtype: DType | None = None,
    batch_invariant: bool = False,
    gpu_kernel: GpuKernel = "best",
    **arguments: Unpack[AttentionArguments],
) -> tuple[TensorValue, TensorValue]:
    """Attention of `R` query rows over the pages of their requests: decode and causal prefill alike.

    Row `r` of `q` `[R, Hq, D]` belongs to request `row_batch[r]` and sees its first `row_lengths[r]` tokens
    (both `[R]` int32); a decode step has one row a request, a prefill one row a token.

    Args:
        alibi_slopes: `[Hq]` float32: adds `slope * token` to a scaled score.
        sinks: `[Hq]` float32: natural-log scores that join the softmax's denominator alone, and so the lse.
        o_dtype: The dtype of o: float32, float16 or bfloat16; q's where it is None.
        batch_invariant: Makes a row's result depend on nothing but the row, to the bit. GPU only.
        gpu_kernel: "best" is what `paged-kv doctor --explain` says, "plain" the kernel for any GPU, to compare with.
        arguments: `sm_scale`, `window_left`, `logits_soft_cap`, `q_scale`, `k_scale`, `v_scale`, `rope_theta` and
            `rope_scale`, as `paged_kv.options.AttentionOptions` has and checks them.

    A GPU cannot refuse bad requests, lengths and pages, which stay on the device: o and lse of such a row are NaN.

    Returns:
        o `[R, Hq, D]` in `o_dtype` and the base-2 lse `[R, Hq]` float32. A row of request -1 or of length 0
        has o = 0 and lse = -inf.
    """
    options = AttentionOptions(**arguments)
    return attention_at_run_time(
        cache,
        q,
        row_batch,
        row_lengths,
        **option_values(cache, q, options, alibi_slopes, sinks),
        may_rotate_keys=options.rope_theta is not None,
        layer=layer,
        o_dtype=o_dtype,
        batch_invariant=batch_invariant,
        gpu_kernel=gpu_kernel,
    )


def attention_at_run_time(
    cache: PagedCache,
    q: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    *,
    alibi_slopes: TensorValue,
    sinks: TensorValue,
    window_left: TensorValue,
    options: TensorValue,
    may_rotate_keys: bool = True,
    layer: int = 0,
    o_dtype: DType | None = None,
    batch_invariant: bool = False,
    gpu_kernel: GpuKernel = "best",
) -> tuple[TensorValue, TensorValue]:
    """`attention` with its options as values of the graph.

    `options` `[6]` float32 is `AttentionOptions.numbers`, `window_left` an int32 scalar, both on the host;
    `alibi_slopes` and `sinks` have `[Hq]` or no entries and lie with the cache. Where `may_rotate_keys` is False it
    compiles in less time, and on the CPU refuses a rope_theta other than 0.
    """
    if gpu_kernel not in get_args(GpuKernel):
        raise ContractError(f"gpu_kernel: expected 'best' or 'plain', got {gpu_kernel!r}")
    if batch_invariant and not cache.device.is_gpu():
        raise ContractError("batch_invariant: requires a GPU; the schedule of the CPU depends on the batch")
    rows, heads, head_dim = check_operands(
        cache, q, row_batch, row_lengths, alibi_slopes, sinks, window_left, options, o_dtype
    )
    o, lse = ops.inplace_custom(
        ATTENTION,
        device=cache.device,
        values=[q, row_batch, row_lengths, *cache.operands(layer), alibi_slopes, sinks, window_left, options],
        out_types=[
            TensorType(o_dtype or q.dtype, [rows, heads, head_dim], cache.device),
            TensorType(DType.float32, [rows, heads], cache.device),
        ],
        parameters={
            "kv_layout": cache.kv_layout,
            "may_rotate_keys": may_rotate_keys,
            "batch_invariant": batch_invariant,
            "gpu_kernel": gpu_kernel,
        },
    )
    return o.tensor, lse.tensor


def option_values(
    cache: PagedCache,
    q: TensorValue,
    options: AttentionOptions,
    alibi_slopes: TensorValue | None,
    sinks: TensorValue | None,
) -> dict[str, TensorValue]:
    """The options of a call as constants of the graph, by the names of `attention_at_run_time`."""
    check_tensor("q", q)
    head_dim = q.shape[-1] if q.rank else Dim(0)
    if options.sm_scale is None and not isinstance(head_dim, StaticDim):
        raise ContractError(f"sm_scale: required where head_dim is symbolic ({head_dim})")
    numbers = options.numbers(max(int(head_dim), 1) if isinstance(head_dim, StaticDim) else 1)
    none = constant(np.zeros(0, np.float32), cache.device)
    return {
        "alibi_slopes": none if alibi_slopes is None else alibi_slopes,
        "sinks": none if sinks is None else sinks,
        "window_left": ops.constant(options.window_left, DType.int32, DeviceRef.CPU()),
        "options": constant(numbers),
    }


def check_operands(
    cache: PagedCache,
    q: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    alibi_slopes: TensorValue,
    sinks: TensorValue,
    window_left: TensorValue,
    options: TensorValue,
    o_dtype: DType | None,
) -> tuple[Dim, Dim, Dim]:
    """Refuses operands that do not fit the cache or each other; returns q's dimensions `R, Hq, D`."""
    check_tensor("q", q)
    check_dtype("q", q.dtype, DTYPES)
    check_dtype("o_dtype", o_dtype or q.dtype, DTYPES)
    if cache.kv_format is None:
        check_dtype("k_blocks", cache.dtype, KV_DTYPES)
    cache.check("q", q, q.dtype, [None, None, cache.head_dim])
    rows, heads, head_dim = q.shape
    cache.check("row_batch", row_batch, DType.int32, [rows])
    cache.check("row_lengths", row_lengths, DType.int32, [rows])
    kv_heads = cache.num_kv_heads
    if isinstance(heads, StaticDim) and isinstance(kv_heads, StaticDim) and int(heads) % max(int(kv_heads), 1):
        raise ShapeError(f"q: expected a multiple of the cache's {kv_heads} KV heads, got {heads} heads")
    if isinstance(head_dim, StaticDim) and not is_head_dim(int(head_dim)):
        raise ShapeError(f"q: expected head_dim to be a {HEAD_DIMS}, got {head_dim}")
    host = DeviceRef.CPU()
    for name, value in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        check_optional(cache, name, value, DType.float32, heads)
    check_value("window_left", window_left, DType.int32, [], host)
    check_value("options", options, DType.float32, [Dim(SOFTMAX_OPTIONS.size)], host)
    return rows, heads, head_dim


def check_optional(cache: PagedCache, name: str, value: TensorValue, dtype: DType, length: Dim) -> None:
    """Refuses a vector that is neither empty, which stands for an absent one, nor of this length."""
    none = isinstance(value, TensorValue) and list(value.shape) == [Dim(0)]
    cache.check(name, value, dtype, [None if none else length])
