"""The operands that every op over pages shares, as kernels take them: views of K and V, and the page table."""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from std.utils import IndexList

from ..isa.codes import SCALE_BYTES, STEP, elements_of, is_codes, units_of
from .checks import check_equal, check_same_cache, check_view
from .page_table import PageTable
from .paged_kv_cache import DynamicKVCache
from .pointers import RowPointer, TablePointer, untracked, untracked_immutable
from .strides import PageStrides, page_shape


@fieldwise_init
struct KVCachePair[dtype: DType, codes: Bool = False](TrivialRegisterPassable):
    """The K and V views of one call, checked against each other, and their page table.

    Parameters:
        dtype: Of the storage.
        codes: Whether a head is codes and a scale (`../isa/codes.mojo`). The last dimension of the storage, and of a
            strided view, is then that of a stored head, that of `k` and `v` its elements.
    """

    var k: DynamicKVCache[Self.dtype]
    var v: DynamicKVCache[Self.dtype]
    var table: PageTable

    @staticmethod
    def of[
        rank: Int, //, kv_layout: StaticString
    ](
        k_blocks: MutableInputTensor[dtype=Self.dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=Self.dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
    ) raises -> Self:
        """From an op's operands (`../ops.mojo`); refuses arrays and views that do not hold a cache."""
        var k_storage = untracked(k_blocks.unsafe_ptr())
        var v_storage = untracked(v_blocks.unsafe_ptr())
        var numbers = untracked_immutable(view.unsafe_ptr())
        var entries = untracked_immutable(lookup_table.unsafe_ptr())
        var batch = lookup_table.dim_size(0)
        var max_pages = lookup_table.dim_size(1)
        comptime if kv_layout == "STRIDED":
            comptime assert rank == 1, "strided storage is flat"
            var length = view.dim_size(0)
            if length != 13:
                check_equal("view: its length", length, 12)
            return Self.of_strided(
                k_storage, k_blocks.size(), v_storage, v_blocks.size(), numbers, length, entries, batch, max_pages
            )
        var shape: IndexList[4]
        var v_shape: IndexList[4]
        var k_strides: PageStrides
        var v_strides: PageStrides
        comptime if kv_layout == "LATENT":
            comptime assert rank == 4, "latent storage is [pages, layers, page_size, Dv + D]"
            check_equal("view: its length", view.dim_size(0), 2)
            shape, v_shape, k_strides, v_strides = latent_views(
                k_blocks.shape(), Int(numbers[unsafe_offset=0]), Int(numbers[unsafe_offset=1])
            )
        else:
            check_same_cache(k_blocks.shape(), v_blocks.shape(), Int(k_storage), Int(v_storage))
            check_equal("view: its length", view.dim_size(0), 1)
            var layer = Int(numbers[unsafe_offset=0])
            var layers = k_blocks.dim_size(2) if rank == 6 else 1
            if layer < 0 or layer >= layers:
                raise Error("layer is ", layer, ", the cache has ", layers)
            shape = page_shape[kv_layout](k_blocks.shape())
            k_strides = PageStrides.of[kv_layout](k_blocks.shape(), False, layer)
            v_strides = PageStrides.of[kv_layout](v_blocks.shape(), True, layer)
            v_shape = shape
        return Self.of_views(k_storage, shape, k_strides, v_storage, v_shape, v_strides, entries, batch, max_pages)

    @staticmethod
    def of_strided(
        k_storage: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        k_size: Int,
        v_storage: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        v_size: Int,
        view: Pointer[Int64, ImmUntrackedOrigin],
        length: Int,
        entries: TablePointer,
        batch: Int,
        max_pages: Int,
    ) raises -> Self:
        """From flat memory of `k_size` and `v_size` elements; `view` has 12 or 13 numbers (`../ops.mojo`), the last of
        which, where it is there, is V's head_dim. Refuses views that run out of the memory.
        """
        var shape = IndexList[4](
            Int(view[unsafe_offset=0]),
            Int(view[unsafe_offset=1]),
            Int(view[unsafe_offset=2]),
            Int(view[unsafe_offset=3]),
        )
        var k_strides = PageStrides.read(view.unsafe_offset(4))
        var v_strides = PageStrides.read(view.unsafe_offset(8))
        var v_shape = shape
        if length == 13:
            v_shape[3] = Int(view[unsafe_offset=12])
        check_view("k_blocks", shape, k_strides, k_size)
        check_view("v_blocks", v_shape, v_strides, v_size)
        return Self.of_views(k_storage, shape, k_strides, v_storage, v_shape, v_strides, entries, batch, max_pages)

    @staticmethod
    @always_inline
    def of_views(
        k_storage: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        k_shape: IndexList[4],
        k_strides: PageStrides,
        v_storage: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        v_shape: IndexList[4],
        v_strides: PageStrides,
        entries: TablePointer,
        batch: Int,
        max_pages: Int,
    ) raises -> Self:
        """From checked views; refuses a last dimension that no head of codes has."""
        var k_heads = k_shape
        var v_heads = v_shape
        comptime if Self.codes:
            k_heads[3] = Self.head_elements("k_blocks", k_heads[3])
            v_heads[3] = Self.head_elements("v_blocks", v_heads[3])
        return Self(
            DynamicKVCache[Self.dtype](k_storage, k_heads, k_strides, entries, batch, max_pages),
            DynamicKVCache[Self.dtype](v_storage, v_heads, v_strides, entries, batch, max_pages),
            PageTable(entries, batch, max_pages, k_heads[0], k_heads[1]),
        )

    @staticmethod
    def head_elements(what: StaticString, units: Int) raises -> Int:
        """The head_dim of stored heads of codes; refuses a size that no head of a multiple of 8 elements has."""
        comptime assert is_codes(Self.dtype), "codes lie in memory of int8 or uint8"
        var count = units - SCALE_BYTES
        if count < 0 or count % units_of(Self.dtype, STEP) != 0:
            raise Error(
                what,
                ": heads of ",
                units,
                " bytes are not the codes of a multiple of 8 elements and ",
                SCALE_BYTES,
                " bytes of scale",
            )
        return elements_of(Self.dtype, units)

    def check_token_rows(self, k_shape: IndexList[3], v_shape: IndexList[3]) raises:
        """Checks that k and v `[N, Hk, D]`, the contiguous rows beside the cache, fit it and each other."""
        check_equal("v: its number of tokens", v_shape[0], k_shape[0])
        check_equal("k: its number of KV heads", k_shape[1], self.k.num_heads())
        check_equal("v: its number of KV heads", v_shape[1], self.k.num_heads())
        check_equal("k: its head_dim", k_shape[2], self.k.head_dim())
        check_equal("v: its head_dim", v_shape[2], self.v.head_dim())


def latent_views[
    rank: Int, //
](storage: IndexList[rank], layer: Int, value_dim: Int) raises -> Tuple[
    IndexList[4], IndexList[4], PageStrides, PageStrides
]:
    """Shapes and strides of K and V in `[pages, layers, page_size, Dv + D]`, where a slot is its V and then its K."""
    if layer < 0 or layer >= storage[1]:
        raise Error("layer is ", layer, ", the cache has ", storage[1])
    var width = storage[3]
    if value_dim < 1 or value_dim >= width:
        raise Error("ckv: its width is ", value_dim, ", the slots of the cache are ", width, " elements wide")
    var v = PageStrides(layer * storage[2] * width, storage[1] * storage[2] * width, width, width)
    var k = PageStrides(v.start + value_dim, v.page, v.slot, v.head)
    var v_shape = IndexList[4](storage[0], storage[2], 1, value_dim)
    return (IndexList[4](storage[0], storage[2], 1, width - value_dim), v_shape, k, v)


@always_inline
def row_pointer(tensor: InputTensor[dtype=DType.int32, rank=1, ...]) -> RowPointer:
    """The address of a vector operand with an int32 for each row."""
    return untracked_immutable(tensor.unsafe_ptr())
