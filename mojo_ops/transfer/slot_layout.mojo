"""The part of a cache that one copy can serve: a head, a slot, or a run of adjacent slots."""

from std.sys import size_of

from ..cache.paged_kv_cache import PagedKVCache

comptime BYTES_PER_TASK = 256 * 1024
"""Bytes of rows for one task of a thread."""


@fieldwise_init
struct SlotLayout(TrivialRegisterPassable):
    """The heads of a slot, and whether they and the slots of a page are adjacent."""

    var num_heads: Int
    var head_dim: Int
    var adjacent_heads: Bool
    """A slot is one range of memory."""
    var adjacent_slots: Bool
    """So are the slots of a page that follow each other."""

    @staticmethod
    def of(cache: PagedKVCache) -> Self:
        var heads = cache.num_heads()
        var dim = cache.head_dim()
        var adjacent_heads = cache.strides().head == dim or heads == 1
        return Self(heads, dim, adjacent_heads, adjacent_heads and cache.strides().slot == heads * dim)

    @always_inline
    def elements(self) -> Int:
        """Return the elements of a row: one token with all its KV heads."""
        return self.num_heads * self.head_dim


def rows_per_task[dtype: DType](cache: PagedKVCache) -> Int:
    """Rows of elements of `dtype`, which is not the cache's where that holds codes."""
    return max(1, BYTES_PER_TASK // max(1, cache.num_heads() * cache.head_dim() * size_of[dtype]()))
