"""The operands of one attention call, as kernels take them: rows and options."""

from extensibility import InputTensor, OutputTensor

from ..cache.checks import check_equal
from ..cache.operands import row_pointer
from ..cache.pointers import RowPointer, untracked, untracked_immutable
from .logits import Logits
from .params import AttentionRows
from .row_masks import CustomMasks, NoMasks, RowMasks


@fieldwise_init
struct AttentionOperands[dtype: DType, o_dtype: DType, Masks: RowMasks](TrivialRegisterPassable):
    """The rows of a call and what is done to their scores, checked against each other."""

    var rows: AttentionRows[Self.dtype, Self.o_dtype, Self.Masks]
    var logits: Logits

    @staticmethod
    @always_inline
    def of(
        o: OutputTensor[dtype=Self.o_dtype, rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q: InputTensor[dtype=Self.dtype, rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        masks: Self.Masks,
        alibi_slopes: InputTensor[dtype=DType.float32, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        window_left: Int32,
        options: InputTensor[dtype=DType.float32, rank=1, ...],
    ) raises -> Self:
        """From the operands of an op (`../attention_ops.mojo`); refuses lengths and options that do not fit."""
        check_equal("options: its length", options.dim_size(0), 5)
        check_equal("row_batch: its length", row_batch.dim_size(0), q.dim_size(0))
        check_equal("row_lengths: its length", row_lengths.dim_size(0), q.dim_size(0))
        return Self.of_pointers(
            untracked(o.unsafe_ptr()),
            untracked(lse.unsafe_ptr()),
            untracked(q.unsafe_ptr()),
            q.dim_size(0),
            q.dim_size(1),
            row_pointer(row_batch),
            row_pointer(row_lengths),
            masks,
            untracked_immutable(alibi_slopes.unsafe_ptr()),
            alibi_slopes.dim_size(0),
            untracked_immutable(sinks.unsafe_ptr()),
            sinks.dim_size(0),
            Int(window_left),
            untracked_immutable(options.unsafe_ptr()),
        )

    @staticmethod
    @always_inline
    def of_pointers(
        o: Pointer[Scalar[Self.o_dtype], MutUntrackedOrigin],
        lse: Pointer[Float32, MutUntrackedOrigin],
        q: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        num_rows: Int,
        num_heads: Int,
        row_batch: RowPointer,
        row_lengths: RowPointer,
        masks: Self.Masks,
        alibi_slopes: Pointer[Float32, ImmUntrackedOrigin],
        num_slopes: Int,
        sinks: Pointer[Float32, ImmUntrackedOrigin],
        num_sinks: Int,
        window_left: Int,
        options: Pointer[Float32, ImmUntrackedOrigin],
    ) raises -> Self:
        """From memory that holds what `of`'s operands hold; refuses options that do not fit."""
        var logits = Logits(
            scale=options[unsafe_offset=0],
            soft_cap=options[unsafe_offset=1],
            window_left=window_left,
            alibi_slopes=alibi_slopes,
            has_alibi=num_slopes > 0,
            sinks=sinks,
            has_sinks=num_sinks > 0,
        )
        var rows = AttentionRows[Self.dtype, Self.o_dtype, Self.Masks](
            q,
            o,
            lse,
            row_batch,
            row_lengths,
            num_rows,
            num_heads,
            v_scale=options[unsafe_offset=2],
            rope_theta=options[unsafe_offset=3],
            rope_scale=options[unsafe_offset=4],
            masks=masks,
            q_latent=q,
            latent_scale=1,
        )
        if logits.has_alibi:
            check_equal("alibi_slopes: its length", num_slopes, num_heads)
        if logits.has_sinks:
            check_equal("sinks: its length", num_sinks, num_heads)
        rows.check()
        return Self(rows, logits)


def custom_masks(
    num_rows: Int,
    batch: Int,
    row_positions: InputTensor[dtype=DType.int32, rank=1, ...],
    token_offsets: InputTensor[dtype=DType.int32, rank=1, ...],
    mask: InputTensor[dtype=DType.uint8, rank=1, ...],
    mask_starts: InputTensor[dtype=DType.int64, rank=1, ...],
    mask_firsts: InputTensor[dtype=DType.int32, rank=1, ...],
) raises -> CustomMasks:
    """From the operands of `paged_kv_masked_attention`; refuses lengths that are neither 0 nor what they should be."""
    check_length("row_positions: its length", row_positions.dim_size(0), num_rows)
    check_length("token_offsets: its length", token_offsets.dim_size(0), batch)
    check_length("mask_starts: its length", mask_starts.dim_size(0), num_rows)
    check_length("mask_firsts: its length", mask_firsts.dim_size(0), num_rows)
    return CustomMasks(
        row_pointer(row_positions),
        row_positions.dim_size(0) > 0,
        row_pointer(token_offsets),
        token_offsets.dim_size(0) > 0,
        untracked_immutable(mask.unsafe_ptr()),
        mask.dim_size(0),
        untracked_immutable(mask_starts.unsafe_ptr()),
        mask_starts.dim_size(0) > 0,
        row_pointer(mask_firsts),
        mask_firsts.dim_size(0) > 0,
    )


def check_length(what: StaticString, found: Int, expected: Int) raises:
    """Refuses a length that is neither `expected` nor 0, which stands for an absent operand."""
    if found != 0:
        check_equal(what, found, expected)


def latent_operands[
    dtype: DType, o_dtype: DType, //
](
    o: OutputTensor[dtype=o_dtype, rank=3, ...],
    lse: OutputTensor[dtype=DType.float32, rank=2, ...],
    q_nope: InputTensor[dtype=dtype, rank=3, ...],
    q_pe: InputTensor[dtype=dtype, rank=3, ...],
    row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
    row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
    sinks: InputTensor[dtype=DType.float32, rank=1, ...],
    options: InputTensor[dtype=DType.float32, rank=1, ...],
) raises -> AttentionOperands[dtype, o_dtype, NoMasks]:
    """From the operands of `paged_kv_mla_attention` (`../latent_ops.mojo`); refuses those that do not fit."""
    check_equal("options: its length", options.dim_size(0), 3)
    var option = options.unsafe_ptr()
    var none = untracked_immutable(sinks.unsafe_ptr())
    var logits = Logits(
        scale=option[unsafe_offset=0],
        soft_cap=0,
        window_left=-1,
        alibi_slopes=none,
        has_alibi=False,
        sinks=none,
        has_sinks=sinks.dim_size(0) > 0,
    )
    var rows = AttentionRows[dtype, o_dtype](
        untracked(q_pe.unsafe_ptr()),
        untracked(o.unsafe_ptr()),
        untracked(lse.unsafe_ptr()),
        row_pointer(row_batch),
        row_pointer(row_lengths),
        q_pe.dim_size(0),
        q_pe.dim_size(1),
        v_scale=option[unsafe_offset=2],
        rope_theta=0,
        rope_scale=1,
        masks=NoMasks(),
        q_latent=untracked(q_nope.unsafe_ptr()),
        latent_scale=option[unsafe_offset=1],
    )
    check_equal("q_nope: its number of rows", q_nope.dim_size(0), rows.num_rows)
    check_equal("q_nope: its number of heads", q_nope.dim_size(1), rows.num_heads)
    if logits.has_sinks:
        check_equal("sinks: its length", sinks.dim_size(0), rows.num_heads)
    check_equal("row_batch: its length", row_batch.dim_size(0), rows.num_rows)
    check_equal("row_lengths: its length", row_lengths.dim_size(0), rows.num_rows)
    rows.check()
    return AttentionOperands[dtype, o_dtype, NoMasks](rows, logits)
