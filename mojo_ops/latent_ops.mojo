"""The registered op of latent attention (MLA): all query heads share one compressed KV head.

A token's key is its latent vector ckv `[Dckv]` and then its rotary part kpe `[Dkpe]`; its value is ckv again. In the
operands that all ops over pages share (`ops.mojo`), kpe is K and ckv is V.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.runtime.asyncrt import parallelism_level

from .attention.checks import check_dim, check_rows, check_width
from .attention.cpu.dispatch import attend_on_cpu
from .attention.gpu.latent import RotaryQuery, attend_latent
from .attention.gpu.params import GpuAttentionParams
from .attention.gpu.row_masks import GpuNoMasks
from .attention.operands import latent_operands
from .cache.checks import check_equal
from .cache.operands import KVCachePair


@extensibility.register("paged_kv_mla_attention")
struct LatentAttention:
    """Latent attention of `R` query rows over the pages of their requests: decode and causal prefill in one op.

    q_nope `[R, H, Dckv]`, q_pe `[R, H, Dkpe]`, where Dkpe may be 0; row_batch, row_lengths as in `paged_kv_attention`. The same array as
    kpe_blocks and ckv_blocks where it holds both. sinks: `[H]` float32, or `[0]` for none. o `[R, H, Dckv]`
    float32, float16 or bfloat16; lse `[R, H]` float32, base 2. options `[3]` float32: what q_pe . kpe is multiplied by, what q_nope . ckv is multiplied by
    beside it, and what multiplies o.
    kv_layout: "LATENT": `[pages, layers, page_size, Dckv + Dkpe]`, and view is `[layer, Dckv]`; or "STRIDED".
    """

    @staticmethod
    def execute[
        dtype: DType,
        o_dtype: DType,
        kv_dtype: DType,
        rank: Int,
        //,
        target: StaticString,
        kv_layout: StaticString,
    ](
        o: OutputTensor[dtype=o_dtype, rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q_nope: InputTensor[dtype=dtype, rank=3, ...],
        q_pe: InputTensor[dtype=dtype, rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        kpe_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        ckv_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        options: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert kv_layout == "LATENT" or kv_layout == "STRIDED", "latent caches have these layouts"
        var pair = KVCachePair[kv_dtype].of[kv_layout](kpe_blocks, ckv_blocks, lookup_table, view)
        var call = latent_operands(o, lse, q_nope, q_pe, row_batch, row_lengths, sinks, options)
        var rows = call.rows
        var logits = call.logits
        check_equal("ckv_cache: its KV heads", pair.k.num_heads(), 1)
        check_width("q_nope", q_nope.dim_size(2), "the width of ckv_cache", pair.v.head_dim())
        check_width("q_pe", q_pe.dim_size(2), "the width of kpe_cache", pair.k.head_dim())
        check_dim("the width of ckv_cache", pair.v.head_dim())
        if pair.k.head_dim() != 0:
            check_dim("the width of kpe_cache", pair.k.head_dim())
        logits.check()
        comptime if is_gpu[target]():
            pair.table.check_shape()
            var latent_rows = rows
            latent_rows.q = rows.q_latent
            var params = GpuAttentionParams[dtype, o_dtype].of(
                latent_rows, logits, pair.table, pair.v.head_dim(), GpuNoMasks()
            )
            var rotary = RotaryQuery[dtype](rows.q, Int32(pair.k.head_dim()), rows.latent_scale)
            attend_latent(ctx, params, rotary, pair.v, pair.k, batch_invariant=False)
        else:
            check_rows(pair.table, rows.row_batch, rows.row_lengths, rows.num_rows, rows.masks, logits)
            attend_on_cpu[latent=True](rows, pair.k, pair.v, logits, parallelism_level(None))
