"""The page table of a call, and its checks.

Every message names the argument, the request and the value.
"""

from std.math import ceildiv

from .pointers import TablePointer


@fieldwise_init
struct PageTable(TrivialRegisterPassable):
    """A dense page table `[batch, max_pages]` over a pool of `num_pages` pages of `page_size` slots."""

    var entries: TablePointer
    var batch: Int
    var max_pages: Int
    var num_pages: Int
    var page_size: Int

    @no_inline
    def check_shape(self) raises:
        if self.page_size < 1:
            raise Error("page_size must be at least 1, the cache has ", self.page_size)

    def page(self, request: Int, page_slot: Int) raises -> Int:
        """The page id in one slot of the table, refused where the pool has no such page."""
        var page = Int(self.entries[unsafe_offset=request * self.max_pages + page_slot])
        if page >= self.num_pages:
            raise Error(
                "lookup_table: request ",
                request,
                ", page slot ",
                page_slot,
                " holds page id ",
                page,
                ", outside the pool's [0, ",
                self.num_pages,
                ")",
            )
        return page

    @no_inline
    def check_tokens(self, what: StaticString, request: Int, first: Int, length: Int) raises:
        """Refuses a request whose tokens `[first, length)` do not all lie in pages of the pool."""
        var used = ceildiv(length, self.page_size)
        if used > self.max_pages:
            raise Error(
                what,
                ": request ",
                request,
                " has ",
                length,
                " tokens, which need ",
                used,
                " pages of ",
                self.page_size,
                ", but lookup_table has ",
                self.max_pages,
                " columns",
            )
        for page_slot in range(first // self.page_size, used):
            _ = self.page(request, page_slot)
