"""Requirements of the Hopper kernel: rules that `../dispatch.mojo` follows and `paged-kv doctor` prints."""

from std.sys import size_of
from max.gpu.host import DeviceContext
from max.gpu.host.info import H100

from ....cache.paged_kv_cache import DynamicKVCache
from ....cache.tensor_map import ATOM_BYTES, GROUP_SLOTS
from ....isa.codes import cache_name
from ....isa.convert import is_float8
from ..params import GpuAttentionParams
from .tiles import CopyBox, MIN_BOX_BITS

comptime ON_HOPPER = DeviceContext.default_device_info.compute == H100.compute
"""True if the program is compiled for a GPU that this kernel runs on."""


def hopper_takes(dtype: DType, kv_dtype: DType) -> Bool:
    """Return whether the kernel exists for such a query and cache: only then can it be instantiated."""
    var is_16_bit = dtype == DType.bfloat16 or dtype == DType.float16
    return is_16_bit and (kv_dtype == dtype or is_float8(kv_dtype))


def hopper_shape_refusal(dtype: DType, kv_dtype: DType, head_dim: Int, group: Int, page_size: Int) -> String:
    """The reason, from dtypes and sizes, why this kernel does not serve a call; empty where they do not exclude it.

    Args:
        dtype: The dtype of q.
        kv_dtype: The dtype of the cache.
        head_dim: D.
        group: Query heads a KV head.
        page_size: Slots in a page.
    """
    if not hopper_takes(dtype, kv_dtype):
        return String(
            "it takes bfloat16 or float16 with a cache of the same or float8, not ",
            dtype,
            " with ",
            cache_name(kv_dtype),
        )
    if head_dim != 64 and head_dim != 128 and head_dim != 256:
        return String("it takes head_dim 64, 128 and 256, not ", head_dim)
    if group > 16:
        return String("it takes up to 16 query heads a KV head, not ", group)
    if page_size < 1 or CopyBox.of_page(page_size).bits < MIN_BOX_BITS:
        return String("it copies 8 slots of a page and more at once; page_size ", page_size, " is no multiple of 8")
    return ""


def hopper_storage_refusal[kv_dtype: DType, //](what: StaticString, cache: DynamicKVCache[kv_dtype]) -> String:
    """The reason why the copy engine cannot address a cache, as `check_tensor_map` has it; empty where it can."""
    if cache.num_pages() < 1 or cache.num_heads() < 1:
        return String(what, " has no page or no head")
    var strides = cache.strides()
    comptime bytes = size_of[kv_dtype]()
    if Int(cache.blocks.ptr) % 16 != 0:
        return String(what, " begins at an address that is no multiple of 16 bytes")
    for elements in [strides.page, strides.slot, GROUP_SLOTS * strides.slot, strides.head]:
        if elements * bytes % 16 != 0:
            return String(what, " has a stride of ", elements * bytes, " bytes, no multiple of 16")
        if elements * bytes >= 1 << 40:
            return String(what, " has a stride of ", elements * bytes, " bytes, which takes more than 40 bits")
    if bytes > 1 and cache.num_heads() > 1 and strides.head * bytes % ATOM_BYTES != 0:
        return String(what, " has heads ", strides.head * bytes, " bytes apart, no multiple of ", ATOM_BYTES)
    return ""


def hopper_refusal[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //
](params: GpuAttentionParams[dtype, o_dtype], k: DynamicKVCache[kv_dtype], v: DynamicKVCache[kv_dtype]) -> String:
    """The reason, from dtypes, sizes, addresses and strides, why this kernel does not serve a call; else empty."""
    var group = Int(params.num_heads) // max(1, k.num_heads())
    var refusal = hopper_shape_refusal(dtype, kv_dtype, Int(params.head_dim), group, k.slots())
    if refusal:
        return refusal
    return String(hopper_storage_refusal("k_blocks", k), hopper_storage_refusal("v_blocks", v))
