"""Checks of an attention call, before anything is written.

Every message names the argument, the request and the value.
"""

from ..cache.checks import check_equal
from ..cache.page_table import PageTable
from ..cache.pointers import RowPointer
from .logits import Logits


def check_rows(table: PageTable, row_batch: RowPointer, row_lengths: RowPointer, num_rows: Int, logits: Logits) raises:
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
            first[request] = min(first[request], logits.first_token(length))
            longest[request] = max(longest[request], length)
    for request in range(table.batch):
        if longest[request] > 0:
            table.check_tokens("row_lengths", request, first[request], longest[request])


def check_heads(q_heads: Int, kv_heads: Int, q_dim: Int, kv_dim: Int) raises:
    """Checks that q has whole groups of query heads, and the head_dim of the cache, 8 to 512 in multiples of 8."""
    if kv_heads < 1 or q_heads % kv_heads != 0:
        raise Error("q: its ", q_heads, " heads are no multiple of the cache's ", kv_heads, " KV heads")
    check_equal("q: its head_dim", q_dim, kv_dim)
    if kv_dim < 8 or kv_dim > 512 or kv_dim % 8 != 0:
        raise Error("head_dim must be a multiple of 8 from 8 to 512, not ", kv_dim)
