"""Helpers of the tests: addresses without origins, and where a cell must lie."""

from std.utils import IndexList

from mojo_ops.cache.strides import PageStrides, page_shape


def untracked[T: ImplicitlyCopyable](list: List[T]) -> Pointer[T, ImmUntrackedOrigin]:
    """The elements' address; the list has to outlive it."""
    return list.unsafe_ptr().unsafe_mut_cast[False]().unsafe_origin_cast[ImmUntrackedOrigin]()


def untracked_mutable[T: ImplicitlyCopyable](mut list: List[T]) -> Pointer[T, MutUntrackedOrigin]:
    return list.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()


@fieldwise_init
struct Storage(TrivialRegisterPassable):
    """One storage array and the part of it that a view shows."""

    var hnd: Bool
    var rank: Int
    var pages: Int
    var layers: Int
    var page_size: Int
    var heads: Int
    var dim: Int
    var is_value: Bool
    var layer: Int

    def size(self) -> Int:
        """Elements of the whole array."""
        var halves = 2 if self.rank >= 5 else 1
        var layers = self.layers if self.rank == 6 else 1
        return self.pages * halves * layers * self.page_size * self.heads * self.dim

    def cell(self, page: Int, slot: Int, head: Int, dim: Int) -> Int:
        """Return an element's place: the axes of the array from the outermost to the innermost, without any stride."""
        var at = page
        if self.rank >= 5:
            at = at * 2 + (1 if self.is_value else 0)
        if self.rank == 6:
            at = at * self.layers + self.layer
        if self.hnd:
            at = (at * self.heads + head) * self.page_size + slot
        else:
            at = (at * self.page_size + slot) * self.heads + head
        return at * self.dim + dim

    def strides(self) -> PageStrides:
        """Return what the package says about the same view."""
        if self.hnd:
            return self._strides["HND"]()
        return self._strides["NHD"]()

    def _strides[kv_layout: StaticString](self) -> PageStrides:
        if self.rank == 4:
            return PageStrides.of[kv_layout](self._shape[4](), self.is_value)
        if self.rank == 5:
            return PageStrides.of[kv_layout](self._shape[5](), self.is_value)
        return PageStrides.of[kv_layout](self._shape[6](), self.is_value, self.layer)

    def shape(self) -> IndexList[4]:
        """The package's `(pages, page_size, kv_heads, head_dim)` of the array."""
        if self.hnd:
            return self._page_shape["HND"]()
        return self._page_shape["NHD"]()

    def _page_shape[kv_layout: StaticString](self) -> IndexList[4]:
        if self.rank == 4:
            return page_shape[kv_layout](self._shape[4]())
        if self.rank == 5:
            return page_shape[kv_layout](self._shape[5]())
        return page_shape[kv_layout](self._shape[6]())

    def _shape[rank: Int](self) -> IndexList[rank]:
        """The shape of the array."""
        var shape = IndexList[rank](fill=2)
        shape[0] = self.pages
        comptime if rank == 6:
            shape[2] = self.layers
        shape[rank - 3] = self.heads if self.hnd else self.page_size
        shape[rank - 2] = self.page_size if self.hnd else self.heads
        shape[rank - 1] = self.dim
        return shape
