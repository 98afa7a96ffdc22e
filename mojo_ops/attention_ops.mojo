"""The registered ops of attention: each one validates, then dispatches to a kernel.

The operands that every op over pages shares, and where operands lie on a GPU: `ops.mojo`.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .attention.call import AttentionCall, MaskOperands
from .attention.cpu.kernel_choice import rotates_keys
from .attention.gpu.dispatch import attend_on_gpu
from .attention.gpu.generic import attend_generic
from .attention.gpu.params import GpuAttentionParams
from .attention.gpu.rope import RotaryFrequencies
from .attention.gpu.row_masks import GpuCustomMasks, GpuNoMasks
from .attention.merge_states import MergeCall, merge_on_gpu
from .attention.row_masks import NoMasks
from .cache.checks import check_equal
from .cache.operands import CacheMemory, KVCachePair
from .isa.codes import is_codes
from .isa.library_call import call_library
from .isa.threads import workers_of_max


@extensibility.register("paged_kv_attention")
struct Attention:
    """Attention of `R` query rows over the pages of their requests: decode and causal prefill in one op.

    q `[R, Hq, D]`; row_batch, row_lengths `[R]` int32: row r sees the first `row_lengths[r]` tokens of
    request `row_batch[r]`. o `[R, Hq, D]` float32, float16 or bfloat16; lse `[R, Hq]` float32, base 2. A row of request -1
    or of length 0 gives o = 0, lse = -inf.
    alibi_slopes, sinks: `[Hq]` float32, or `[0]` for none. options: `SoftmaxOptions` as float32 (`attention/call.mojo`).
    may_rotate_keys: whether rope_theta may be other than 0; the CPU's kernels that rotate take half of a compile's time.
    batch_invariant: on a GPU, whether a row's result may depend on nothing but the row; the CPU has no such mode.
    gpu_kernel: "best", or "plain" to compare with; without effect on the CPU.
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
        may_rotate_keys: Bool,
        batch_invariant: Bool,
        gpu_kernel: StaticString,
    ](
        o: OutputTensor[dtype=o_dtype, rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q: InputTensor[dtype=dtype, rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        k_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        alibi_slopes: InputTensor[dtype=DType.float32, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        window_left: Int32,
        options: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = AttentionCall.of(
            o,
            lse,
            q,
            row_batch,
            row_lengths,
            MaskOperands.none(),
            alibi_slopes,
            sinks,
            window_left,
            options,
            CacheMemory.of[kv_layout](k_blocks, v_blocks, lookup_table, view),
            workers_of_max(),
        )
        comptime if is_gpu[target]():
            var pair = KVCachePair[kv_dtype, codes=is_codes(kv_dtype)].of_memory(call.cache)
            var rows = call.rows[dtype, o_dtype](NoMasks())
            var logits = call.logits()
            call.check_cache(pair, masked=False)
            logits.check()
            pair.table.check_shape()
            var params = GpuAttentionParams[dtype, o_dtype].of(
                rows, logits, pair.table, pair.k.head_dim(), GpuNoMasks()
            )
            var rotary = RotaryFrequencies.of(pair.k.head_dim(), rows.rope_theta, rows.rope_scale)
            attend_on_gpu[gpu_kernel](ctx, params, pair.k, pair.v, rotary, batch_invariant)
        else:
            call_library(attention_name[dtype, kv_dtype, o_dtype, masked=False](call, may_rotate_keys), call)


@extensibility.register("paged_kv_masked_attention")
struct MaskedAttention:
    """Attention of `R` query rows over the pages of their requests, with masks and positions of rows and tokens.

    The operands are those of `paged_kv_attention`, and after row_lengths these, of length 0 where absent:
    row_positions `[R]` int32: the position of the row's token, by which q is rotated and from which the window counts
    back; absent: the row's length - 1, after the request's offset.
    token_offsets `[B]` int32: the position of the first token of the request's pages; absent: 0.
    mask `[bytes]` uint8: bits, the lowest of a byte first. Row r sees its token j of `[mask_firsts[r], row_lengths[r])`
    where bit `mask_starts[r] + j - mask_firsts[r]` is set, and all tokens before `mask_firsts[r]`.
    mask_starts `[R]` int64: -1 where the row has no mask. mask_firsts `[R]` int32; absent: 0.
    o `[R, Hq, Dv]`, where Dv is the head_dim of V. A row that sees no token gives o = 0, lse = -inf. On
    a GPU by the plain kernel.
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
        may_rotate_keys: Bool,
    ](
        o: OutputTensor[dtype=o_dtype, rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q: InputTensor[dtype=dtype, rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        row_positions: InputTensor[dtype=DType.int32, rank=1, ...],
        token_offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        mask: InputTensor[dtype=DType.uint8, rank=1, ...],
        mask_starts: InputTensor[dtype=DType.int64, rank=1, ...],
        mask_firsts: InputTensor[dtype=DType.int32, rank=1, ...],
        k_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=kv_dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
        alibi_slopes: InputTensor[dtype=DType.float32, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        window_left: Int32,
        options: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = AttentionCall.of(
            o,
            lse,
            q,
            row_batch,
            row_lengths,
            MaskOperands.of(row_positions, token_offsets, mask, mask_starts, mask_firsts),
            alibi_slopes,
            sinks,
            window_left,
            options,
            CacheMemory.of[kv_layout](k_blocks, v_blocks, lookup_table, view),
            workers_of_max(),
        )
        comptime if is_gpu[target]():
            var pair = KVCachePair[kv_dtype, codes=is_codes(kv_dtype)].of_memory(call.cache)
            var masks = call.masks.masks(call.num_rows, pair.table.batch)
            var rows = call.rows[dtype, o_dtype](masks)
            var logits = call.logits()
            call.check_cache(pair, masked=True)
            logits.check()
            pair.table.check_shape()
            var params = GpuAttentionParams[dtype, o_dtype, GpuCustomMasks].of(
                rows, logits, pair.table, pair.k.head_dim(), GpuCustomMasks.of(masks, pair.v.head_dim())
            )
            var rotary = RotaryFrequencies.of(pair.k.head_dim(), rows.rope_theta, rows.rope_scale)
            attend_generic(ctx, params, pair.k, pair.v, rotary, batch_invariant=False)
        else:
            call_library(attention_name[dtype, kv_dtype, o_dtype, masked=True](call, may_rotate_keys), call)


def attention_name[
    dtype: DType, kv_dtype: DType, o_dtype: DType, *, masked: Bool
](call: AttentionCall, may_rotate_keys: Bool) raises -> String:
    """The library that computes a call; refuses rotated keys where no library rotates them."""
    var rotated = rotates_keys(call.rope_theta())
    if rotated and is_codes(kv_dtype):
        raise Error("options: rope_theta is ", call.rope_theta(), ", keys of codes are not rotated")
    if rotated and not may_rotate_keys:
        raise Error("options: rope_theta is ", call.rope_theta(), ", the op is built without rotation of keys")
    return String(
        "paged_kv_",
        "masked_attention" if masked else "attention",
        "_rotated" if rotated else "",
        "_",
        dtype,
        "_",
        kv_dtype,
        "_",
        o_dtype,
    )


@extensibility.register("paged_kv_merge_states")
struct MergeStates:
    """Merges `n` states of attention over disjoint keys: v `[S, n, H, D]` and the base-2 lse s `[S, n, H]` float32.

    merged_v `[S, H, D]` in v's dtype, merged_s `[S, H]` float32; 0 and -inf where no state has seen a key.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        merged_v: OutputTensor[dtype=dtype, rank=3, ...],
        merged_s: OutputTensor[dtype=DType.float32, rank=2, ...],
        v: InputTensor[dtype=dtype, rank=4, ...],
        s: InputTensor[dtype=DType.float32, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = MergeCall(
            Int(merged_v.unsafe_ptr()),
            Int(merged_s.unsafe_ptr()),
            Int(v.unsafe_ptr()),
            Int(s.unsafe_ptr()),
            v.dim_size(0),
            v.dim_size(1),
            v.dim_size(2),
            v.dim_size(3),
            workers_of_max(),
        )
        check_equal("s: its number of rows", s.dim_size(0), call.num_rows)
        check_equal("s: its number of states", s.dim_size(1), call.num_states)
        check_equal("s: its number of heads", s.dim_size(2), call.num_heads)
        comptime if is_gpu[target]():
            merge_on_gpu(ctx, call.states[dtype](), call.num_rows)
        else:
            call_library(String("paged_kv_merge_", dtype), call)
