"""Attention calls on the CPU: from numbers to a result, for a library of kernels."""

from ...cache.operands import KVCachePair
from ...isa.codes import is_codes
from ..call import AttentionCall
from ..checks import check_rows
from ..latent_call import LatentCall
from ..row_masks import NoMasks, RowMasks
from .dispatch import attend_on_cpu


def attend[dtype: DType, o_dtype: DType, kv_dtype: DType, *, masked: Bool, rotates: Bool](call: AttentionCall) raises:
    """Computes a call, whose rows have masks or not."""
    var pair = KVCachePair[kv_dtype, codes=is_codes(kv_dtype)].of_memory(call.cache)
    comptime if masked:
        attend_rows[dtype, o_dtype, rotates](call, pair, call.masks.masks(call.num_rows, pair.table.batch))
    else:
        attend_rows[dtype, o_dtype, rotates](call, pair, NoMasks())


def attend_rows[
    Masks: RowMasks, //, dtype: DType, o_dtype: DType, rotates: Bool
](call: AttentionCall, pair: KVCachePair, masks: Masks) raises:
    """Computes the rows of a call, which see what `masks` let through."""
    var rows = call.rows[dtype, o_dtype](masks)
    var logits = call.logits()
    call.check_cache(pair, masked=Masks.has_masks)
    logits.check()
    check_rows(pair.table, rows.row_batch, rows.row_lengths, rows.num_rows, masks, logits)
    masks.check(rows.row_batch, rows.row_lengths, rows.num_rows, pair.table.batch)
    attend_on_cpu[rotates=rotates](
        rows, pair.k, pair.v, logits, call.workers, deterministic=call.options[].deterministic != 0
    )


def attend_latent[dtype: DType, o_dtype: DType, kv_dtype: DType](call: LatentCall) raises:
    """Computes a call of latent attention."""
    var pair = KVCachePair[kv_dtype].of_memory(call.cache)
    var rows = call.rows[dtype, o_dtype]()
    call.check_cache(pair)
    var logits = call.logits()
    check_rows(pair.table, rows.row_batch, rows.row_lengths, rows.num_rows, rows.masks, logits)
    attend_on_cpu[latent=True](
        rows, pair.k, pair.v, logits, call.workers, deterministic=call.options[].deterministic != 0
    )
