"""The operands of one attention call, as kernels take them: rows and options."""

from extensibility import InputTensor, OutputTensor

from ..cache.checks import check_equal
from ..cache.operands import row_pointer
from ..cache.pointers import untracked, untracked_immutable
from .logits import Logits
from .params import AttentionRows


@fieldwise_init
struct AttentionOperands[dtype: DType](TrivialRegisterPassable):
    """The rows of a call and what is done to their scores, checked against each other."""

    var rows: AttentionRows[Self.dtype]
    var logits: Logits

    @staticmethod
    @always_inline
    def of(
        o: OutputTensor[dtype=Self.dtype, rank=3, ...],
        lse: OutputTensor[dtype=DType.float32, rank=2, ...],
        q: InputTensor[dtype=Self.dtype, rank=3, ...],
        row_batch: InputTensor[dtype=DType.int32, rank=1, ...],
        row_lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        alibi_slopes: InputTensor[dtype=DType.float32, rank=1, ...],
        sinks: InputTensor[dtype=DType.float32, rank=1, ...],
        window_left: Int32,
        options: InputTensor[dtype=DType.float32, rank=1, ...],
    ) raises -> Self:
        """From the operands of `paged_kv_attention` (`../ops.mojo`); refuses lengths and options that do not fit."""
        check_equal("options: its length", options.dim_size(0), 5)
        var option = options.unsafe_ptr()
        var logits = Logits(
            scale=option[unsafe_offset=0],
            soft_cap=option[unsafe_offset=1],
            window_left=Int(window_left),
            alibi_slopes=untracked_immutable(alibi_slopes.unsafe_ptr()),
            has_alibi=alibi_slopes.dim_size(0) > 0,
            sinks=untracked_immutable(sinks.unsafe_ptr()),
            has_sinks=sinks.dim_size(0) > 0,
        )
        var rows = AttentionRows[Self.dtype](
            untracked(q.unsafe_ptr()),
            untracked(o.unsafe_ptr()),
            untracked(lse.unsafe_ptr()),
            row_pointer(row_batch),
            row_pointer(row_lengths),
            q.dim_size(0),
            q.dim_size(1),
            v_scale=option[unsafe_offset=2],
            rope_theta=option[unsafe_offset=3],
            rope_scale=option[unsafe_offset=4],
        )
        if logits.has_alibi:
            check_equal("alibi_slopes: its length", alibi_slopes.dim_size(0), rows.num_heads)
        if logits.has_sinks:
            check_equal("sinks: its length", sinks.dim_size(0), rows.num_heads)
        rows.check()
        check_equal("row_batch: its length", row_batch.dim_size(0), rows.num_rows)
        check_equal("row_lengths: its length", row_lengths.dim_size(0), rows.num_rows)
        return Self(rows, logits)
