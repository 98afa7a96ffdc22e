"""What the type of a cache knows at compile time."""

from layout import UNKNOWN_VALUE


@fieldwise_init
struct KVCacheStaticParams(Equatable, TrivialRegisterPassable, Writable):
    """What a cache's type knows at compile time; `UNKNOWN_VALUE` leaves a field to run time."""

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
