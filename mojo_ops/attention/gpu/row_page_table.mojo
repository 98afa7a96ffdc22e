"""Where the tokens of one row lie, as GPU kernels read the page table."""

from ...cache.gpu_loads import DeviceCache
from .params import DecodeRows


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """A token's page, -1 where the table names one outside the pool, and its slot."""

    var page: Int32
    var slot: Int32


struct Pages(TrivialRegisterPassable):
    """The page table of one row's request."""

    var entries: Pointer[UInt32, ImmUntrackedOrigin]
    var num_pages: UInt32
    var page_size: UInt32

    @always_inline
    def __init__[
        dtype: DType, kv_dtype: DType, //
    ](out self, row: Int32, rows: DecodeRows[dtype], cache: DeviceCache[kv_dtype]):
        var columns = Int(cache.lookup_table.layout.stride[0]().value())
        self.entries = cache.lookup_table.ptr.unsafe_offset(Int(rows.request(row)) * columns)
        self.num_pages = UInt32(cache.num_pages())
        self.page_size = UInt32(cache.slots())

    @always_inline
    def place(self, token: Int32) -> Place:
        """Where a token that the row attends to lies."""
        var column = UInt32(token) // self.page_size
        var page = self.entries[unsafe_offset=Int(column)]
        return Place(Int32(page) if page < self.num_pages else -1, Int32(UInt32(token) - column * self.page_size))
