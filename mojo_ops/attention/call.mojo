"""Attention calls as numbers: what an op hands to a library of kernels, and a program that calls one by itself."""

from extensibility import InputTensor, OutputTensor
from std.sys import size_of

from ..cache.checks import check_equal
from ..cache.operands import CacheMemory, KVCachePair
from ..cache.pointers import constant_at, memory_at
from ..isa.call_layout import AddressOf
from ..isa.threads import Workers
from .checks import check_dim, check_heads
from .logits import Logits, ScoreOptions
from .params import AttentionRows
from .row_masks import CustomMasks, RowMasks


@fieldwise_init
struct MaskOperands(TrivialRegisterPassable):
    """Positions, offsets and masks (`paged_kv_masked_attention`): the address of each and its length, 0 where
    absent.
    """

    var row_positions: Int
    var num_positions: Int
    var token_offsets: Int
    var num_offsets: Int
    var mask: Int
    var mask_bytes: Int
    var mask_starts: Int
    var num_starts: Int
    var mask_firsts: Int
    var num_firsts: Int

    @staticmethod
    def none() -> Self:
        """Rows without any."""
        return Self(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    @staticmethod
    def of(
        row_positions: InputTensor[dtype=DType.int32, rank=1, ...],
        token_offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        mask: InputTensor[dtype=DType.uint8, rank=1, ...],
        mask_starts: InputTensor[dtype=DType.int64, rank=1, ...],
        mask_firsts: InputTensor[dtype=DType.int32, rank=1, ...],
    ) -> Self:
        """From an op's operands."""
        return Self(
            Int(row_positions.unsafe_ptr()),
            row_positions.dim_size(0),
            Int(token_offsets.unsafe_ptr()),
            token_offsets.dim_size(0),
            Int(mask.unsafe_ptr()),
            mask.dim_size(0),
            Int(mask_starts.unsafe_ptr()),
            mask_starts.dim_size(0),
            Int(mask_firsts.unsafe_ptr()),
            mask_firsts.dim_size(0),
        )

    def masks(self, num_rows: Int, batch: Int) raises -> CustomMasks:
        """Return the masks that kernels read; refuse a length that is neither 0 nor the number of rows or requests."""
        check_length("row_positions: its length", self.num_positions, num_rows)
        check_length("token_offsets: its length", self.num_offsets, batch)
        check_length("mask_starts: its length", self.num_starts, num_rows)
        check_length("mask_firsts: its length", self.num_firsts, num_rows)
        return CustomMasks(
            constant_at[DType.int32](self.row_positions),
            self.num_positions > 0,
            constant_at[DType.int32](self.token_offsets),
            self.num_offsets > 0,
            constant_at[DType.uint8](self.mask),
            self.mask_bytes,
            constant_at[DType.int64](self.mask_starts),
            self.num_starts > 0,
            constant_at[DType.int32](self.mask_firsts),
            self.num_firsts > 0,
        )


def check_length(what: StaticString, found: Int, expected: Int) raises:
    """Refuses a length that is neither `expected` nor 0, which stands for an absent operand."""
    if found != 0:
        check_equal(what, found, expected)


@fieldwise_init
struct SoftmaxOptions(TrivialRegisterPassable):
    """The options of a call that are no integers, as `AttentionOptions.numbers` makes them
    (`../../python/paged_kv/options.py`).
    """

    var scale: Float32
    """Multiplies q . k: sm_scale, with the scales of q and k in it."""
    var soft_cap: Float32
    var v_scale: Float32
    var rope_theta: Float32
    """0: keys are stored as they are used."""
    var rope_scale: Float32
    var deterministic: Float32
    """Not 0: a row has the same bits whichever rows are in its call."""


@fieldwise_init
struct AttentionCall(TrivialRegisterPassable):
    """O `[R, Hq, Dv]` and lse `[R, Hq]` of q `[R, Hq, D]`: the operands of `paged_kv_attention`, or with `masks` of
    `paged_kv_masked_attention`.
    """

    var o: Int
    var lse: Int
    var q: Int
    var num_rows: Int
    var num_heads: Int
    var head_dim: Int
    """The head_dim of q."""
    var value_dim: Int
    """The head_dim of o."""
    var row_batch: Int
    var row_lengths: Int
    var masks: MaskOperands
    var slopes: Int
    var num_slopes: Int
    var sinks: Int
    var num_sinks: Int
    var window_left: Int
    var options: AddressOf[SoftmaxOptions]
    var cache: CacheMemory
    var workers: Workers

    @staticmethod
    def of(
        o: OutputTensor[rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q: InputTensor[rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        masks: MaskOperands,
        alibi_slopes: InputTensor[dtype=DType.float32, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        window_left: Int32,
        options: InputTensor[dtype=DType.float32, rank=1, ...],
        cache: CacheMemory,
        workers: Workers,
    ) raises -> Self:
        """From the operands of an op (`../attention_ops.mojo`); refuses lengths that do not fit."""
        check_equal("options: its length", options.dim_size(0), size_of[SoftmaxOptions]() // size_of[Float32]())
        check_equal("row_batch: its length", row_batch.dim_size(0), q.dim_size(0))
        check_equal("row_lengths: its length", row_lengths.dim_size(0), q.dim_size(0))
        return Self(
            Int(o.unsafe_ptr()),
            Int(lse.unsafe_ptr()),
            Int(q.unsafe_ptr()),
            q.dim_size(0),
            q.dim_size(1),
            q.dim_size(2),
            o.dim_size(2),
            Int(row_batch.unsafe_ptr()),
            Int(row_lengths.unsafe_ptr()),
            masks,
            Int(alibi_slopes.unsafe_ptr()),
            alibi_slopes.dim_size(0),
            Int(sinks.unsafe_ptr()),
            sinks.dim_size(0),
            Int(window_left),
            Int(options.unsafe_ptr()),
            cache,
            workers,
        )

    def rope_theta(self) -> Float32:
        return self.options[].rope_theta

    def logits(self) -> Logits:
        var options = self.options[]
        return Logits(
            ScoreOptions(options.scale, soft_cap=options.soft_cap),
            window_left=self.window_left,
            alibi_slopes=constant_at[DType.float32](self.slopes),
            has_alibi=self.num_slopes > 0,
            sinks=constant_at[DType.float32](self.sinks),
            has_sinks=self.num_sinks > 0,
        )

    def rows[
        Masks: RowMasks, //, dtype: DType, o_dtype: DType
    ](self, masks: Masks, out rows: AttentionRows[dtype, o_dtype, Masks]) raises:
        """The rows; refuses options that do not fit."""
        var options = self.options[]
        var q = memory_at[dtype](self.q)
        rows = {
            q,
            memory_at[o_dtype](self.o),
            memory_at[DType.float32](self.lse),
            constant_at[DType.int32](self.row_batch),
            constant_at[DType.int32](self.row_lengths),
            self.num_rows,
            self.num_heads,
            v_scale = options.v_scale,
            rope_theta = options.rope_theta,
            rope_scale = options.rope_scale,
            masks = masks,
            q_latent = q,
            latent_scale = 1,
        }
        if self.num_slopes > 0:
            check_equal("alibi_slopes: its length", self.num_slopes, self.num_heads)
        if self.num_sinks > 0:
            check_equal("sinks: its length", self.num_sinks, self.num_heads)
        rows.check()

    def check_cache(self, pair: KVCachePair, *, masked: Bool) raises:
        """Refuses heads and widths of q, o and the cache that do not fit each other."""
        check_heads(self.num_heads, pair.k.num_heads(), self.head_dim, pair.k.head_dim())
        if masked:
            check_dim("head_dim of V", pair.v.head_dim())
            check_equal("o: its head_dim", self.value_dim, pair.v.head_dim())
        else:
            check_equal("v_blocks: its head_dim", pair.v.head_dim(), pair.k.head_dim())
