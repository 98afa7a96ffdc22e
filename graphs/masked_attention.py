"""The typed wrapper of the op of attention with masks, positions and offsets. Its dimensions are those of `ops.py`."""

from __future__ import annotations

from typing import Unpack

import numpy as np
from max.dtype import DType
from max.graph import Dim, TensorType, TensorValue, ops

from paged_kv.graphs.attention import check_operands, check_optional, option_values
from paged_kv.graphs.paged_cache import PagedCache, constant
from paged_kv.options import AttentionArguments, AttentionOptions

MASKED_ATTENTION = "paged_kv_masked_attention"


def masked_attention(
    cache: PagedCache,
    q: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    *,
    row_positions: TensorValue | None = None,
    token_offsets: TensorValue | None = None,
    mask: TensorValue | None = None,
    mask_starts: TensorValue | None = None,
    mask_firsts: TensorValue | None = None,
    head_dim_vo: Dim | str | int | None = None,
    layer: int = 0,
    alibi_slopes: TensorValue | None = None,
    sinks: TensorValue | None = None,
    o_dtype: DType | None = None,
    **arguments: Unpack[AttentionArguments],
) -> tuple[TensorValue, TensorValue]:
    """`attention` in which rows have masks, and rows and tokens stand anywhere: cascades, trees of drafts, any prefill.

    Row `r`, of request `b = row_batch[r]`, sees its token `0 <= j < row_lengths[r]` where its mask and the window let
    it: `window_left < 0 or token_offsets[b] + j >= row_positions[r] - window_left`.

    Args:
        row_positions: `[R]` int32: the position of the row's token, by which q is rotated and from which the window
            counts back. None: `row_lengths[r] - 1 + token_offsets[b]`.
        token_offsets: `[B]` int32: the position of the first token of each request's pages, for keys that are rotated,
            ALiBi and the window. None: 0.
        mask: `[bytes]` uint8: bits, the lowest of a byte first. Bit `mask_starts[r] + j - mask_firsts[r]` says whether
            row `r` sees its token `j`.
        mask_starts: `[R]` int64, -1 where a row has no mask. None: no row has one.
        mask_firsts: `[R]` int32: the first token that the row's mask covers; it sees all tokens before. None: 0.
        head_dim_vo: Elements of a head of V. None: V's, or where the cache is strided q's.

    All else is as in `attention`. On the CPU adjacent rows of one request share what they read.
    A GPU computes one row at a time; there a token whose bit lies past the mask's end is not seen.

    Returns:
        o `[R, Hq, head_dim_vo]` in `o_dtype` and the base-2 lse `[R, Hq]` float32. A row that sees no token has o = 0
        and lse = -inf, whatever its sink.
    """
    options = AttentionOptions(**arguments)
    absent = {dtype: constant(np.zeros(0, dtype), cache.device) for dtype in (np.int32, np.int64, np.uint8)}
    return masked_attention_at_run_time(
        cache,
        q,
        row_batch,
        row_lengths,
        row_positions=absent[np.int32] if row_positions is None else row_positions,
        token_offsets=absent[np.int32] if token_offsets is None else token_offsets,
        mask=absent[np.uint8] if mask is None else mask,
        mask_starts=absent[np.int64] if mask_starts is None else mask_starts,
        mask_firsts=absent[np.int32] if mask_firsts is None else mask_firsts,
        head_dim_vo=head_dim_vo,
        **option_values(cache, q, options, alibi_slopes, sinks),
        may_rotate_keys=options.rope_theta is not None,
        layer=layer,
        o_dtype=o_dtype,
    )


def masked_attention_at_run_time(
    cache: PagedCache,
    q: TensorValue,
    row_batch: TensorValue,
    row_lengths: TensorValue,
    *,
    row_positions: TensorValue,
    token_offsets: TensorValue,
    mask: TensorValue,
    mask_starts: TensorValue,
    mask_firsts: TensorValue,
    alibi_slopes: TensorValue,
    sinks: TensorValue,
    window_left: TensorValue,
    options: TensorValue,
    head_dim_vo: Dim | str | int | None = None,
    may_rotate_keys: bool = True,
    layer: int = 0,
    o_dtype: DType | None = None,
) -> tuple[TensorValue, TensorValue]:
    """`masked_attention` with its options as values of the graph, as `attention_at_run_time` has them.

    Positions, offsets and masks that are absent have no entries. All of them lie with the cache.
    """
    rows, heads, head_dim = check_operands(
        cache, q, row_batch, row_lengths, alibi_slopes, sinks, window_left, options, o_dtype
    )
    for name, value in (("row_positions", row_positions), ("mask_firsts", mask_firsts)):
        check_optional(cache, name, value, DType.int32, rows)
    check_optional(cache, "token_offsets", token_offsets, DType.int32, cache.lookup_table.shape[0])
    cache.check("mask", mask, DType.uint8, [None])
    check_optional(cache, "mask_starts", mask_starts, DType.int64, rows)
    value_dim = cache.size("head_dim_vo", head_dim if head_dim_vo is None else head_dim_vo, cache.head_dim)
    o, lse = ops.inplace_custom(
        MASKED_ATTENTION,
        device=cache.device,
        values=[
            *(q, row_batch, row_lengths, row_positions, token_offsets, mask, mask_starts, mask_firsts),
            *cache.operands(layer),
            *(alibi_slopes, sinks, window_left, options),
        ],
        out_types=[
            TensorType(o_dtype or q.dtype, [rows, heads, value_dim], cache.device),
            TensorType(DType.float32, [rows, heads], cache.device),
        ],
        parameters={"kv_layout": cache.kv_layout, "may_rotate_keys": may_rotate_keys},
    )
    return o.tensor, lse.tensor
