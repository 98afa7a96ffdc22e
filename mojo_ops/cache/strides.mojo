"""K and V in a storage array: the strides of the three layouts (`README.md` draws them)."""

from std.utils import IndexList


@fieldwise_init
struct PageStrides(Equatable, TrivialRegisterPassable):
    """The strides of element `[page, slot, head, 0]` in a storage array, in elements.

    `start + page * page_stride + slot * slot_stride + head * head_stride`, 64 bits each.
    """

    var start: Int
    var page: Int
    var slot: Int
    var head: Int

    @staticmethod
    def read(numbers: Pointer[Int64, ImmUntrackedOrigin]) -> Self:
        """The four strides from memory, in the order of the fields."""
        return Self(
            Int(numbers[unsafe_offset=0]),
            Int(numbers[unsafe_offset=1]),
            Int(numbers[unsafe_offset=2]),
            Int(numbers[unsafe_offset=3]),
        )

    @staticmethod
    def of[kv_layout: StaticString, rank: Int](shape: IndexList[rank], is_value: Bool, layer: Int = 0) -> Self:
        """The strides of K or V inside a contiguous storage array.

        Parameters:
            kv_layout: "NHD" (heads inside a slot) or "HND" (slots inside a head).
            rank: 4: K or V alone, `[page, ...]`; 5: both, `[page, 2, ...]`;
                6: both, of every layer, `[page, 2, layer, ...]`.

        Args:
            shape: The shape of the array.
            is_value: False for K (index 0), True for V (index 1); unused for rank 4.
            layer: The layer; unused below rank 6.
        """
        comptime assert kv_layout == "NHD" or kv_layout == "HND", "kv_layout is NHD or HND"
        comptime assert rank >= 4 and rank <= 6, "a cache has 4, 5 or 6 dimensions"
        var head_dim = shape[rank - 1]
        var row = shape[rank - 2] * head_dim
        var half = shape[rank - 3] * row
        var start = 0
        comptime if rank == 6:
            start = layer * half
            half *= shape[2]
        var page = half
        comptime if rank >= 5:
            start += half if is_value else 0
            page *= 2
        comptime if kv_layout == "NHD":
            return Self(start, page, slot=row, head=head_dim)
        else:
            return Self(start, page, slot=head_dim, head=row)


def page_shape[kv_layout: StaticString, rank: Int](shape: IndexList[rank]) -> IndexList[4]:
    """`(pages, page_size, kv_heads, head_dim)` of a storage array."""
    comptime nhd = kv_layout == "NHD"
    var slots = shape[rank - 3] if nhd else shape[rank - 2]
    var heads = shape[rank - 2] if nhd else shape[rank - 3]
    return IndexList[4](shape[0], slots, heads, shape[rank - 1])
