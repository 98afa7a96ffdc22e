"""Checks of an attention call, before anything is written.

Every message names the argument, the request and the value.
"""

from ..cache.checks import check_equal
from ..cache.page_table import PageTable
from ..cache.pointers import RowPointer
from .logits import Logits
from .params import first_in_window
from .row_masks import RowMasks


def check_rows[
    Masks: RowMasks, //
](table: PageTable, row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, masks: Masks, logits: Logits) raises:
    """Checks the rows of an attention call and every page that they read."""
    table.check_shape()
    var first = List[Int](length=table.batch, fill=Int.MAX)
    var longest = List[Int](length=table.batch, fill=0)
    for row in range(num_rows):
        var request = Int(row_batch[unsafe_offset=row])
        var length = Int(row_lengths[unsafe_offset=row])
        if request < -1 or request >= table.batch:
            raise Error("row_batch: row ", row, " names request ", request, " of ", table.batch)
        if length < 0:
            raise Error("row_lengths: row ", row, " (request ", request, ") has length ", length)
        if request >= 0 and length > 0:
            var begin = first_in_window(masks, row, request, length, logits)
            if begin < length:
                first[request] = min(first[request], begin)
                longest[request] = max(longest[request], length)
    for request in range(table.batch):
        if longest[request] > 0:
            table.check_tokens("row_lengths", request, first[request], longest[request])


@no_inline
def check_heads(q_heads: Int, kv_heads: Int, q_dim: Int, kv_dim: Int) raises:
    """Checks that q has whole groups of query heads, and the head_dim of the cache, 8 to 512 in multiples of 8."""
    if kv_heads < 1 or q_heads % kv_heads != 0:
        raise Error("q: its ", q_heads, " heads are no multiple of the cache's ", kv_heads, " KV heads")
    check_equal("q: its head_dim", q_dim, kv_dim)
    check_dim("head_dim", kv_dim)


@no_inline
def check_dim(what: StaticString, dim: Int) raises:
    if dim < 8 or dim > 512 or dim % 8 != 0:
        raise Error(what, " must be a multiple of 8 from 8 to 512, not ", dim)


@no_inline
def check_width(query: StaticString, query_dim: Int, cache: StaticString, dim: Int) raises:
    """Checks that a part of q has the width of its part of the cache."""
    if query_dim != dim:
        raise Error(query, ": its width is ", query_dim, ", ", cache, " ", dim)
