"""PagedKVCache: a register-passable view of the pages of one layer's K or V.

The view owns nothing. `offset` alone computes addresses; `README.md` draws the layouts and the arithmetic.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils import IndexList
from layout import ComptimeInt, Coord, IntTuple, Layout, TileTensor, UNKNOWN_VALUE
from layout.tile_layout import Layout as TileLayout
from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle

from .pointers import TablePointer
from .static_params import KVCacheStaticParams, UNKNOWN_STATIC_PARAMS
from .strides import PageStrides
from .tensor_map import PageTensorMap, box_slots, create_tensor_map


struct PagedKVCache[dtype_: DType, kv_params_: KVCacheStaticParams, page_size: Int](
    DevicePassable, TrivialRegisterPassable
):
    """A strided view `[page, slot, kv_head, head_dim]` of K or V, with its page table.

    Token `t` of request `b` lies in slot `t % page_size` of page `lookup_table[b, t // page_size]`.

    Parameters:
        dtype_: The storage type.
        kv_params_: KV heads and head size, each known or `UNKNOWN_VALUE`.
        page_size: Slots in a page, any integer >= 1, or `UNKNOWN_VALUE`.
    """

    comptime dtype = Self.dtype_
    comptime kv_params = Self.kv_params_
    comptime page_size_ = Self.page_size

    # All strides but the last are run-time values: one type serves NHD, HND and the buffer of all layers.
    comptime blocks_shape = IntTuple(UNKNOWN_VALUE, Self.page_size, Self.kv_params.num_heads, Self.kv_params.head_size)
    comptime blocks_layout = Layout(Self.blocks_shape, IntTuple(UNKNOWN_VALUE, UNKNOWN_VALUE, UNKNOWN_VALUE, 1))
    comptime BlocksLayout = TileLayout[
        shape_types=Coord[Int64, Int64, Int64, Int64].element_types,
        stride_types=Coord[Int64, Int64, Int64, ComptimeInt[1]].element_types,
    ]
    comptime LengthsLayout = TileLayout[
        shape_types=Coord[Int64].element_types, stride_types=Coord[ComptimeInt[1]].element_types
    ]
    comptime TableLayout = TileLayout[
        shape_types=Coord[Int64, Int64].element_types,
        stride_types=Coord[Int64, ComptimeInt[1]].element_types,
    ]
    comptime blocks_type = TileTensor[Self.dtype, Self.BlocksLayout, MutUntrackedOrigin]
    comptime cache_lengths_type = TileTensor[DType.uint32, Self.LengthsLayout, ImmUntrackedOrigin]
    comptime lookup_table_type = TileTensor[DType.uint32, Self.TableLayout, ImmUntrackedOrigin]
    comptime BlocksPointer = Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    comptime device_type: AnyType = Self

    var blocks: Self.blocks_type
    """`[pages, page_size, kv_heads, head_dim]`, strided."""
    var cache_lengths: Self.cache_lengths_type
    """`[B]`: tokens the cache holds for each request; before a step's append, its new tokens are excluded."""
    var lookup_table: Self.lookup_table_type
    """`[B, max_pages]`: the page of each run of `page_size` tokens."""
    var max_seq_length: UInt32
    """The most new tokens of any request in this step."""
    var max_cache_length: UInt32
    """The greatest entry of `cache_lengths`."""

    def __init__(
        out self,
        blocks: Self.blocks_type,
        cache_lengths: Self.cache_lengths_type,
        lookup_table: Self.lookup_table_type,
        max_seq_length: UInt32,
        max_cache_length: UInt32,
    ):
        self.blocks = blocks
        self.cache_lengths = cache_lengths
        self.lookup_table = lookup_table
        self.max_seq_length = max_seq_length
        self.max_cache_length = max_cache_length

    def __init__(
        out self,
        storage: Self.BlocksPointer,
        shape: IndexList[4],
        strides: PageStrides,
        lookup_table: TablePointer,
        batch: Int,
        max_pages: Int,
        cache_lengths: Optional[TablePointer] = None,
        max_seq_length: Int = 0,
        max_cache_length: Int = 0,
    ):
        """A view of raw memory.

        Args:
            storage: The first element of the storage array.
            shape: `(pages, page_size, kv_heads, head_dim)`.
            strides: Where the view's elements lie, from `PageStrides.of` or given freely.
            lookup_table: `[batch, max_pages]`, row-major.
            batch: Requests.
            max_pages: Columns of the lookup table.
            cache_lengths: `[batch]`; without it the view holds no lengths.
            max_seq_length: See the field.
            max_cache_length: See the field.
        """
        self.blocks = Self.blocks_type(
            ptr=storage.unsafe_offset(strides.start),
            layout=Self.BlocksLayout(
                Coord(Int64(shape[0]), Int64(shape[1]), Int64(shape[2]), Int64(shape[3])),
                Coord(Int64(strides.page), Int64(strides.slot), Int64(strides.head), ComptimeInt[1]()),
            ),
        )
        self.cache_lengths = Self.cache_lengths_type(
            ptr=cache_lengths.or_else(lookup_table),
            layout=Self.LengthsLayout(Coord(Int64(batch if cache_lengths else 0)), Coord(ComptimeInt[1]())),
        )
        self.lookup_table = Self.lookup_table_type(
            ptr=lookup_table,
            layout=Self.TableLayout(Coord(Int64(batch), Int64(max_pages)), Coord(Int64(max_pages), ComptimeInt[1]())),
        )
        self.max_seq_length = UInt32(max_seq_length)
        self.max_cache_length = UInt32(max_cache_length)

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """The name that an error about a kernel's arguments shows."""
        return String("PagedKVCache[", Self.dtype, ", ", Self.kv_params, ", ", Self.page_size, "]")

    @staticmethod
    def get_device_type_name() -> String:
        return Self.get_type_name()

    @staticmethod
    def max_tile_size() -> Int:
        """The most tokens that one `block_paged_ptr` can span: a page's; `UNKNOWN_VALUE` where the type has none."""
        return Self.page_size

    # Sizes: a compile-time constant where the type has it, so that divisions by it are shifts or products.

    @always_inline
    def num_pages(self) -> Int:
        return Int(self.blocks.dim[0]())

    @always_inline
    def slots(self) -> Int:
        """Slots in a page."""
        comptime if Self.page_size != UNKNOWN_VALUE:
            return Self.page_size
        else:
            return Int(self.blocks.dim[1]())

    @always_inline
    def num_heads(self) -> Int:
        comptime if Self.kv_params.num_heads != UNKNOWN_VALUE:
            return Self.kv_params.num_heads
        else:
            return Int(self.blocks.dim[2]())

    @always_inline
    def head_dim(self) -> Int:
        comptime if Self.kv_params.head_size != UNKNOWN_VALUE:
            return Self.kv_params.head_size
        else:
            return Int(self.blocks.dim[3]())

    @always_inline
    def shape(self) -> IndexList[4]:
        """`(pages, page_size, kv_heads, head_dim)`."""
        return IndexList[4](self.num_pages(), self.slots(), self.num_heads(), self.head_dim())

    @always_inline
    def strides(self) -> PageStrides:
        """The view's strides; `start` is 0, for `blocks` already begins there."""
        return PageStrides(
            0,
            Int(self.blocks.layout.stride[0]().value()),
            Int(self.blocks.layout.stride[1]().value()),
            Int(self.blocks.layout.stride[2]().value()),
        )

    # Lengths

    @always_inline
    def cache_lengths_nd(self) -> Self.cache_lengths_type:
        """The lengths of all requests, `[B]`."""
        return self.cache_lengths

    @always_inline
    def cache_length(self, batch_idx: Int) -> Int:
        """The tokens cached for one request."""
        debug_assert(batch_idx < Int(self.cache_lengths.dim[0]()), "the view holds no length for request ", batch_idx)
        return Int(self.cache_lengths.ptr[unsafe_offset=batch_idx])

    def empty_cache(self) -> Bool:
        """True where no request has a cached token."""
        return self.max_cache_length == 0

    def max_prompt_length(self) -> UInt32:
        """The most new tokens of any request in this step."""
        return self.max_seq_length

    def max_context_length(self) -> UInt32:
        """The longest cached length of any request."""
        return self.max_cache_length

    # Addresses

    @always_inline
    def page(self, batch_idx: Int, page_slot: Int) -> Int:
        """The id of the `page_slot`-th page of a request."""
        var columns = Int(self.lookup_table.layout.stride[0]().value())
        debug_assert(page_slot < columns, "page slot ", page_slot, " of a lookup table with ", columns, " columns")
        return Int(self.lookup_table.ptr[unsafe_offset=batch_idx * columns + page_slot])

    @always_inline
    def locate(self, batch_idx: Int, tok_idx: Int) -> Tuple[Int, Int]:
        """The page and the slot of a token."""
        var page_slot, slot = divmod(tok_idx, self.slots())
        return (self.page(batch_idx, page_slot), slot)

    @always_inline
    def offset(self, page: Int, slot: Int, head_idx: Int, head_dim_idx: Int = 0) -> Int:
        """Elements from the start of `blocks` to `[page, slot, head_idx, head_dim_idx]`."""
        var at = self.strides()
        return page * at.page + slot * at.slot + head_idx * at.head + head_dim_idx

    @always_inline
    def from_head(self, head: Int) -> Self:
        """The same cache, whose first KV head is `head`; `num_heads` still counts all."""
        var part = self
        var start = self.blocks.ptr.unsafe_offset(head * self.strides().head)
        part.blocks = Self.blocks_type(ptr=start, layout=self.blocks.layout)
        return part

    @always_inline
    def row_idx(self, batch_idx: UInt32, tok_idx: UInt32) -> Int:
        """The token's row, where the memory is viewed as a matrix with rows of `row_pitch` elements.

        64 bits, unlike the 32 of MAX's struct: in HND a row is one slot of one head, so a large pool has more than 2^32
        of them. Needs a page stride that is a multiple of the slot stride, as in every contiguous layout.
        """
        var page, slot = self.locate(Int(batch_idx), Int(tok_idx))
        return page * (self.strides().page // self.row_pitch()) + slot

    @always_inline
    def col_idx(self, head_idx: UInt32) -> Int:
        """The first column of a head in the matrix of `row_idx` (past `row_pitch` in HND)."""
        return Int(head_idx) * self.strides().head

    @always_inline
    def row_pitch(self) -> Int:
        """Elements from one row of the matrix of `row_idx` to the next: the slot stride."""
        return self.strides().slot

    @always_inline
    def block_paged_ptr[
        tile_size: Int
    ](self, batch_idx: Int, start_tok_idx: Int, head_idx: Int, head_dim_idx: Int = 0) -> Self.BlocksPointer:
        """The address of a token's head; the next `tile_size - 1` tokens follow at `row_pitch`.

        Parameters:
            tile_size: How many tokens are read from here; a tile must not cross a page.
        """
        comptime assert (
            Self.page_size == UNKNOWN_VALUE or Self.page_size % tile_size == 0
        ), "a tile must not cross a page: page_size is no multiple of tile_size"
        var page, slot = self.locate(batch_idx, start_tok_idx)
        debug_assert(
            slot + tile_size <= self.slots(), "a tile of ", tile_size, " tokens at slot ", slot, " crosses a page"
        )
        return self.blocks.ptr.unsafe_offset(self.offset(page, slot, head_idx, head_dim_idx))

    @always_inline
    def load[width: Int](self, bs: Int, head_idx: Int, tok_idx: Int, head_dim_idx: Int) -> SIMD[Self.dtype, width]:
        """`width` elements of token `tok_idx` of request `bs`, from `head_dim_idx` on."""
        return self.block_paged_ptr[1](bs, tok_idx, head_idx, head_dim_idx).unsafe_load[width=width]()

    @always_inline
    def store(self, bs: Int, head_idx: Int, tok_idx: Int, head_dim_idx: Int, val: SIMD[Self.dtype, _]):
        """Writes `val` to token `tok_idx` of request `bs`, from `head_dim_idx` on."""
        self.block_paged_ptr[1](bs, tok_idx, head_idx, head_dim_idx).unsafe_store(val)

    # TMA

    def create_tma_tile[
        tile_m: Int, tile_n: Int, swizzle_mode: TensorMapSwizzle, *, is_k_major: Bool = True
    ](self, ctx: DeviceContext) raises -> PageTensorMap[
        Self.dtype, box_slots(Self.page_size, tile_m), tile_n, swizzle_mode, is_k_major
    ]:
        """The cache's tensor map; `tma_coords` gives the coordinates of a copy.

        Its dimensions are `[page, slot, head, dim]`, so that any strides and any number of rows are valid (MAX's own
        map is a matrix of `row_idx` and `col_idx`). A copy stays within one page and one head.

        Parameters:
            tile_m: Tokens in a tile; a box has as many slots, but no more than a page
                (where `page_size` is unknown, the caller picks a `tile_m` that divides the page).
            tile_n: Elements of a head that one `async_copy_4d` fetches; whole swizzle atoms.
            swizzle_mode: How rows of a box are permuted in shared memory.
            is_k_major: Whether the matrix multiply reduces over head_dim (K) or over tokens (V). A box has the same
                bytes either way; the types differ.

        Args:
            ctx: The device that holds the cache.

        Raises:
            Where the hardware cannot address the cache: address and strides must be multiples of 16 bytes.
        """
        return create_tensor_map[box_slots(Self.page_size, tile_m), tile_n, swizzle_mode, is_k_major=is_k_major](
            ctx, self.blocks.ptr, self.shape(), self.strides()
        )

    @always_inline
    def tma_coords(
        self, batch_idx: Int, tok_idx: Int, head_idx: Int, head_dim_idx: Int = 0
    ) -> Tuple[Int, Int, Int, Int]:
        """Return where the box begins that starts with this token: `(dim, head, slot, page)`."""
        var page, slot = self.locate(batch_idx, tok_idx)
        return (head_dim_idx, head_idx, slot, page)


comptime DynamicKVCache[dtype: DType] = PagedKVCache[dtype, UNKNOWN_STATIC_PARAMS, UNKNOWN_VALUE]
"""The view that the ops make: page size, KV heads and head_dim are run-time values."""
