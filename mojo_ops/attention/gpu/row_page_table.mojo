"""The page table of one row, as GPU kernels read it."""

from ...cache.paged_kv_cache import DynamicKVCache
from .params import GpuAttentionParams


@fieldwise_init
struct TokenSlot(TrivialRegisterPassable):
    """A token's page, -1 where the table names one outside the pool, and its slot."""

    var page: Int32
    var slot: Int32


struct RowPageTable(TrivialRegisterPassable):
    """The page table of one row's request."""

    var entries: Pointer[UInt32, ImmUntrackedOrigin]
    var num_pages: UInt32
    var page_size: UInt32

    @always_inline
    def __init__[
        kv_dtype: DType, //
    ](out self, row: Int32, params: GpuAttentionParams, cache: DynamicKVCache[kv_dtype]):
        var columns = Int(cache.lookup_table.layout.stride[0]().value())
        self.entries = cache.lookup_table.ptr.unsafe_offset(Int(params.request(row)) * columns)
        self.num_pages = UInt32(cache.num_pages())
        self.page_size = UInt32(cache.slots())

    @always_inline
    def locate(self, token: Int32) -> TokenSlot:
        """Page and slot of a token that the row attends to."""
        var column = UInt32(token) // self.page_size
        var page = self.entries[unsafe_offset=Int(column)]
        return TokenSlot(Int32(page) if page < self.num_pages else -1, Int32(UInt32(token) - column * self.page_size))
