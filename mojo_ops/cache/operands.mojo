"""The operands that every op over pages shares, as kernels take them: views of K and V, and the page table."""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from std.sys import size_of
from std.utils import IndexList

from ..isa.codes import SCALE_BYTES, STEP, elements_of, is_codes, scale_units, units_of
from .checks import check_equal, check_same_cache, check_view
from .page_table import PageTable
from .paged_kv_cache import DynamicKVCache
from .pointers import RowPointer, constant_at, memory_at, untracked_immutable
from .strides import PageStrides, page_shape


@fieldwise_init
struct CacheMemory(TrivialRegisterPassable):
    """The memory of a call's K and V, and their page table: addresses and numbers of 64 bits, as a C program knows
    them.
    """

    var k: Int
    """The address of K's storage."""
    var k_size: Int
    """Its elements."""
    var v: Int
    var v_size: Int
    var pages: Int
    var page_size: Int
    var kv_heads: Int
    var k_dim: Int
    """The last dimension of K: of codes, that of a stored head."""
    var k_strides: PageStrides
    var v_strides: PageStrides
    var v_dim: Int
    var entries: Int
    """The address of the page table `[batch, max_pages]` uint32."""
    var batch: Int
    var max_pages: Int

    @staticmethod
    def of[
        dtype: DType, rank: Int, //, kv_layout: StaticString
    ](
        k_blocks: MutableInputTensor[dtype=dtype, rank=rank, ...],
        v_blocks: MutableInputTensor[dtype=dtype, rank=rank, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        view: InputTensor[dtype=DType.int64, rank=1, ...],
    ) raises -> Self:
        """From an op's operands (`../ops.mojo`); refuses arrays and views that do not hold a cache."""
        var numbers = untracked_immutable(view.unsafe_ptr())
        var shape: IndexList[4]
        var v_dim: Int
        var k_strides: PageStrides
        var v_strides: PageStrides
        comptime if kv_layout == "STRIDED":
            comptime assert rank == 1, "strided storage is flat"
            var length = view.dim_size(0)
            if length != 13:
                check_equal("view: its length", length, 12)
            shape = IndexList[4](
                Int(numbers[unsafe_offset=0]),
                Int(numbers[unsafe_offset=1]),
                Int(numbers[unsafe_offset=2]),
                Int(numbers[unsafe_offset=3]),
            )
            k_strides = PageStrides.read(numbers.unsafe_offset(4))
            v_strides = PageStrides.read(numbers.unsafe_offset(8))
            v_dim = Int(numbers[unsafe_offset=12]) if length == 13 else shape[3]
        elif kv_layout == "LATENT":
            comptime assert rank == 4, "latent storage is [pages, layers, page_size, Dv + D]"
            check_equal("view: its length", view.dim_size(0), 2)
            v_dim = Int(numbers[unsafe_offset=1])
            shape, k_strides, v_strides = latent_views(k_blocks.shape(), Int(numbers[unsafe_offset=0]), v_dim)
        else:
            check_same_cache(k_blocks.shape(), v_blocks.shape(), Int(k_blocks.unsafe_ptr()), Int(v_blocks.unsafe_ptr()))
            check_equal("view: its length", view.dim_size(0), 1)
            var layer = Int(numbers[unsafe_offset=0])
            var layers = k_blocks.dim_size(2) if rank == 6 else 1
            if layer < 0 or layer >= layers:
                raise Error("layer is ", layer, ", the cache has ", layers)
            shape = page_shape[kv_layout](k_blocks.shape())
            k_strides = PageStrides.of[kv_layout](k_blocks.shape(), False, layer)
            v_strides = PageStrides.of[kv_layout](v_blocks.shape(), True, layer)
            v_dim = shape[3]
        return Self(
            Int(k_blocks.unsafe_ptr()),
            k_blocks.size(),
            Int(v_blocks.unsafe_ptr()),
            v_blocks.size(),
            shape[0],
            shape[1],
            shape[2],
            shape[3],
            k_strides,
            v_strides,
            v_dim,
            Int(lookup_table.unsafe_ptr()),
            lookup_table.dim_size(0),
            lookup_table.dim_size(1),
        )


@fieldwise_init
struct KVCachePair[dtype: DType, codes: Bool = False](TrivialRegisterPassable):
    """The K and V views of one call, checked against each other, and their page table.

    Parameters:
        dtype: The dtype of the storage.
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
        return Self.of_memory(CacheMemory.of[kv_layout](k_blocks, v_blocks, lookup_table, view))

    @staticmethod
    def of_memory(memory: CacheMemory) raises -> Self:
        """Refuses views that run out of the memory, and a last dimension that no head of codes has."""
        var k_shape = IndexList[4](memory.pages, memory.page_size, memory.kv_heads, memory.k_dim)
        var v_shape = k_shape
        v_shape[3] = memory.v_dim
        check_view("k_blocks", k_shape, memory.k_strides, memory.k_size)
        check_view("v_blocks", v_shape, memory.v_strides, memory.v_size)
        comptime if Self.codes:
            k_shape[3] = Self.head_elements("k_blocks", k_shape[3])
            v_shape[3] = Self.head_elements("v_blocks", v_shape[3])
        var entries = constant_at[DType.uint32](memory.entries)
        var k = memory_at[Self.dtype](memory.k)
        var v = memory_at[Self.dtype](memory.v)
        return Self(
            DynamicKVCache[Self.dtype](k, k_shape, memory.k_strides, entries, memory.batch, memory.max_pages),
            DynamicKVCache[Self.dtype](v, v_shape, memory.v_strides, entries, memory.batch, memory.max_pages),
            PageTable(entries, memory.batch, memory.max_pages, k_shape[0], k_shape[1]),
        )

    @staticmethod
    def head_elements(what: StaticString, units: Int) raises -> Int:
        """The head_dim of stored heads of codes; refuses a size that no head of a multiple of 8 elements has."""
        comptime assert is_codes(Self.dtype), "only heads of codes have scales"
        var count = units - scale_units(Self.dtype)
        if count < 0 or count % units_of(Self.dtype, STEP) != 0:
            raise Error(
                what,
                ": heads of ",
                units * size_of[Self.dtype](),
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
](storage: IndexList[rank], layer: Int, value_dim: Int) raises -> Tuple[IndexList[4], PageStrides, PageStrides]:
    """The shape of K and the strides of K and V in `[pages, layers, page_size, Dv + D]`, where a slot is its V and
    then its K.
    """
    if layer < 0 or layer >= storage[1]:
        raise Error("layer is ", layer, ", the cache has ", storage[1])
    var width = storage[3]
    if value_dim < 1 or value_dim >= width:
        raise Error("ckv: its width is ", value_dim, ", the slots of the cache are ", width, " elements wide")
    var v = PageStrides(layer * storage[2] * width, storage[1] * storage[2] * width, width, width)
    var k = PageStrides(v.start + value_dim, v.page, v.slot, v.head)
    return (IndexList[4](storage[0], storage[2], 1, width - value_dim), k, v)


@always_inline
def row_pointer(tensor: InputTensor[dtype=DType.int32, rank=1, ...]) -> RowPointer:
    """The address of a vector operand with an int32 for each row."""
    return untracked_immutable(tensor.unsafe_ptr())
