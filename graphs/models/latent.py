"""Multi-head latent attention (DeepSeek-V2), absorbed: queries meet the cached latents themselves.

A token's keys and values of all heads are linear in one latent: `k_h = K_h c`, `v_h = V_h c`. So
`q_h . k_h = (K_h^T q_h) . c`, and the weighted sum of values is `V_h` times the weighted sum of latents: attention with
one KV head, whose keys are the latent and a rotated part beside it, and whose values are the latent.
"""

from __future__ import annotations

import numpy as np
from max.graph import TensorValue, ops

from paged_kv.graphs import ops as paged
from paged_kv.graphs.layers import Rotary, StepRows
from paged_kv.graphs.models.config import LatentSizes
from paged_kv.graphs.models.parameters import Parameters
from paged_kv.graphs.ops import LatentCache
from paged_kv.graphs.paged_cache import constant


def latent_attention(
    parameters: Parameters,
    cache: LatentCache,
    rows: StepRows,
    x: TensorValue,
    rotary: Rotary,
    layer: int,
    output_rows: TensorValue | None,
) -> TensorValue:
    """The attention of `x` `[T, hidden]` over everything its requests have cached and these tokens themselves.

    Latents enter the cache normed, and the parts beside them rotated. Only `output_rows` `[N]` are computed where it
    is not None.
    """
    config, latent = parameters.config, parameters.config.latent
    assert latent is not None
    assert config.sm_scale is not None
    at = f"model.layers.{layer}.self_attn"
    q_proj = f"{at}.q_proj" if latent.q_rank is None else f"{at}.q_a_proj"
    of_q, q_rotary = rows, rotary
    if output_rows is None:
        q, kv = parameters.linear(x, q_proj, f"{at}.kv_a_proj_with_mqa")
    else:
        (kv,) = parameters.linear(x, f"{at}.kv_a_proj_with_mqa")
        (q,) = parameters.linear(paged.take_rows(x, output_rows), q_proj)
        of_q, q_rotary = rows.of_rows(output_rows), rotary.of_rows(output_rows)

    c, k_rope = paged.split_columns(kv, [latent.kv_rank, latent.rope_dim])
    c = parameters.norm(f"{at}.kv_a_layernorm", c, LatentSizes.NORM_EPS)
    tokens = k_rope.shape[0]
    k_rope = rotary.of_pairs(ops.reshape(k_rope, [tokens, 1, latent.rope_dim]))
    k_rope = ops.reshape(k_rope, [tokens, latent.rope_dim])
    c, k_rope = (ops.cast(y, cache.dtype) for y in (c, k_rope))
    paged.append_latent(cache, c, k_rope, rows.batch, rows.positions, layer=layer)

    if latent.q_rank is not None:
        q = parameters.norm(f"{at}.q_a_layernorm", q, LatentSizes.NORM_EPS)
        (q,) = parameters.linear(q, f"{at}.q_b_proj")
    heads = config.num_attention_heads
    q_nope = paged.take_columns(q, 0, latent.nope_dim, groups=heads)
    q_nope = ops.reshape(q_nope, [q.shape[0], heads, latent.nope_dim])
    q_rope = paged.take_columns(q, latent.nope_dim, latent.rope_dim, groups=heads)
    q_rope = ops.reshape(q_rope, [q.shape[0], heads, latent.rope_dim])
    o, _ = paged.mla_attention(
        cache,
        _by_head(parameters, q_nope, f"{at}.k_up_proj"),
        q_rotary.of_pairs(q_rope),
        of_q.batch,
        of_q.lengths,
        layer=layer,
        sm_scale=config.sm_scale,
    )
    values = _by_head(parameters, o, f"{at}.v_up_proj")
    return parameters.linear(ops.reshape(values, [values.shape[0], heads * latent.v_dim]), f"{at}.o_proj")[0]


def _by_head(parameters: Parameters, x: TensorValue, name: str) -> TensorValue:
    """Each head of `x` `[N, H, K]` by its own weight of a stack `[H, M, K]`: `[N, H, M]`."""
    heads = parameters.config.num_attention_heads
    index = constant(np.arange(heads, dtype=np.int32).reshape(1, heads), x.device)
    return parameters.experts(x, ops.broadcast_to(index, [x.shape[0], heads]), name)[0]
