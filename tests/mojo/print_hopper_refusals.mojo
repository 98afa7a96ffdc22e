"""Prints which calls the Hopper kernel refuses: gpu_compile/test_kernel_choice.py compares them with the rules in words.

A line is: q_dtype kv_dtype head_dim group page_size refusal (or "-").
"""

from std.utils import IndexList

from mojo_ops.attention.gpu.hopper.requirements import hopper_refusal
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.strides import PageStrides
from support import untracked, untracked_mutable

comptime KV_HEADS = 2


def print_calls[dtype: DType, kv_dtype: DType]():
    # Only addresses are used.
    var floats = List[Float32](length=16, fill=0)
    var integers = List[Int32](length=4, fill=0)
    var table = List[UInt32](length=4, fill=0)
    var base = untracked_mutable(floats)
    var q = base.unsafe_bitcast[Scalar[dtype]]()
    var numbers = untracked(integers)
    var heads = untracked(floats)
    for head_dim in [8, 64, 96, 128, 256, 512]:
        for group in [1, 7, 16, 17]:
            for page_size in [1, 4, 5, 8, 16, 20, 24, 100, 128, 256]:
                var params = GpuAttentionParams[dtype](
                    q,
                    q,
                    base,
                    numbers,
                    numbers,
                    heads,
                    heads,
                    1,
                    Int32(group * KV_HEADS),
                    Int32(head_dim),
                    1,
                    1,
                    -1,
                    1,
                    0,
                    1,
                    0,
                    0,
                    GpuNoMasks(),
                )
                var at = PageStrides(0, page_size * KV_HEADS * head_dim, KV_HEADS * head_dim, head_dim)
                var cache = DynamicKVCache[kv_dtype](
                    Pointer[Scalar[kv_dtype], MutUntrackedOrigin](unsafe_from_address=4096),
                    IndexList[4](3, page_size, KV_HEADS, head_dim),
                    at,
                    untracked(table),
                    1,
                    1,
                )
                var refusal = hopper_refusal(params, cache, cache)
                print(dtype, kv_dtype, head_dim, group, page_size, refusal if refusal else "-")
    _ = floats^
    _ = integers^
    _ = table^


def main():
    comptime for dtype in [DType.float32, DType.float16, DType.bfloat16]:
        print_calls[dtype, dtype]()
        print_calls[dtype, DType.float8_e4m3fn]()
        print_calls[dtype, DType.float8_e5m2]()
