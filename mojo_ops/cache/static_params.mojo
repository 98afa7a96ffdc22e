"""Sizes that are part of a cache's type."""

from layout import UNKNOWN_VALUE


@fieldwise_init
struct KVCacheStaticParams(Equatable, TrivialRegisterPassable, Writable):
    """Sizes that a cache's type has at compile time; `UNKNOWN_VALUE` leaves a field to run time."""

    var num_heads: Int
    """KV heads."""
    var head_size: Int
    """Elements in one head (head_dim)."""
    var is_mla: Bool
    """True where one latent cache serves as both K and V."""

    def __init__(out self, num_heads: Int, head_size: Int):
        self.num_heads = num_heads
        self.head_size = head_size
        self.is_mla = False


comptime UNKNOWN_STATIC_PARAMS = KVCacheStaticParams(UNKNOWN_VALUE, UNKNOWN_VALUE)
"""KV heads and head_dim are run-time values."""
