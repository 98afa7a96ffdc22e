"""QuantisedKVCache: a view of pages of codes that loads and stores numbers."""

from ..isa.codes import is_codes, load_codes, scale_of, store_head
from .paged_kv_cache import PagedKVCache
from .static_params import KVCacheStaticParams


struct QuantisedKVCache[dtype: DType, kv_params: KVCacheStaticParams, page_size: Int](TrivialRegisterPassable):
    """The pages of one layer's K or V, whose heads are codes and a scale (`README.md`, "Codes and scales").

    Parameters:
        dtype: The dtype of the memory of a format of codes (`../isa/codes.mojo`).
        kv_params: KV heads and elements of a head, each known or `UNKNOWN_VALUE`.
        page_size: Slots in a page, or `UNKNOWN_VALUE`.
    """

    comptime View = PagedKVCache[Self.dtype, Self.kv_params, Self.page_size]

    var stored: Self.View
    """The heads as they lie in memory; its head_dim counts elements, its strides and offsets stored numbers."""

    def __init__(out self, stored: Self.View):
        comptime assert is_codes(Self.dtype), "memory of this type holds no codes"
        self.stored = stored

    @always_inline
    def scale(self, bs: Int, head_idx: Int, tok_idx: Int) -> Float32:
        """Return what the codes of a head of token `tok_idx` of request `bs` are multiplied by."""
        return scale_of(self.stored.block_paged_ptr[1](bs, tok_idx, head_idx), self.stored.head_dim())

    @always_inline
    def load[width: Int](self, bs: Int, head_idx: Int, tok_idx: Int, head_dim_idx: Int) -> SIMD[DType.float32, width]:
        """`width` elements of token `tok_idx` of request `bs`, from `head_dim_idx` on; both are even."""
        var head = self.stored.block_paged_ptr[1](bs, tok_idx, head_idx)
        return load_codes[width](head, head_dim_idx) * scale_of(head, self.stored.head_dim())

    @always_inline
    def store[
        source_dtype: DType, //
    ](self, bs: Int, head_idx: Int, tok_idx: Int, head: Pointer[Scalar[source_dtype], _]):
        """Quantises a head of token `tok_idx` of request `bs`: all of its elements, which share a scale."""
        store_head(self.stored.block_paged_ptr[1](bs, tok_idx, head_idx), head, self.stored.head_dim())
