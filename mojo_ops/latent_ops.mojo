"""The registered op of latent attention (MLA): all query heads share one compressed KV head.

A token's key is its latent vector ckv `[Dckv]` and then its rotary part kpe `[Dkpe]`; its value is ckv again. In the
operands that all ops over pages share (`ops.mojo`), kpe is K and ckv is V.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .attention.gpu.latent import RotaryQuery, attend_latent
from .attention.gpu.params import GpuAttentionParams
from .attention.gpu.row_masks import GpuNoMasks
from .attention.latent_call import LatentCall
from .cache.operands import CacheMemory, KVCachePair
from .isa.library_call import call_library
from .isa.threads import workers_of_max


@extensibility.register("paged_kv_mla_attention")
struct LatentAttention:
    """Latent attention of `R` query rows over the pages of their requests: decode and causal prefill in one op.

    q_nope `[R, H, Dckv]`, q_pe `[R, H, Dkpe]`, where Dkpe may be 0; row_batch, row_lengths as in `paged_kv_attention`. The same array as
    kpe_blocks and ckv_blocks where it holds both. sinks: `[H]` float32, or `[0]` for none. o `[R, H, Dckv]`
    float32, float16 or bfloat16; lse `[R, H]` float32, base 2. options: `LatentOptions` as float32 (`attention/latent_call.mojo`).
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
        var memory = CacheMemory.of[kv_layout](kpe_blocks, ckv_blocks, lookup_table, view)
        var call = LatentCall.of(o, lse, q_nope, q_pe, row_batch, row_lengths, sinks, options, memory, workers_of_max())
        comptime if is_gpu[target]():
            var pair = KVCachePair[kv_dtype].of_memory(memory)
            var rows = call.rows[dtype, o_dtype]()
            call.check_cache(pair)
            var logits = call.logits()
            pair.table.check_shape()
            var latent_rows = rows
            latent_rows.q = rows.q_latent
            var params = GpuAttentionParams[dtype, o_dtype].of(
                latent_rows, logits, pair.table, pair.v.head_dim(), GpuNoMasks()
            )
            var rotary = RotaryQuery[dtype](rows.q, Int32(pair.k.head_dim()), rows.latent_scale)
            attend_latent(ctx, params, rotary, pair.v, pair.k, batch_invariant=False)
        else:
            call_library(String("paged_kv_latent_", dtype, "_", kv_dtype, "_", o_dtype), call)
