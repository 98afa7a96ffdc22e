"""An op of one's own over paged-kv's pages: the mean key of every request and KV head."""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from layout import UNKNOWN_VALUE
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext

# The package `mojo_ops`, as paged-kv installs it: mean_key.py names its folder to the compiler.
from mojo_ops.cache.page_table import PageTable
from mojo_ops.cache.paged_kv_cache import KVCacheStaticParams, PagedKVCache
from mojo_ops.cache.pointers import untracked, untracked_immutable
from mojo_ops.cache.strides import PageStrides, page_shape

comptime SIMD_WIDTH = 8
comptime UNKNOWN_HEADS = KVCacheStaticParams(UNKNOWN_VALUE, UNKNOWN_VALUE)


@extensibility.register("example_mean_key")
struct MeanKey:
    """The mean `[B, Hk, D]` float32 of the first `lengths[b]` (`[B]` int32) keys of request b; 0 where there are none.

    blocks `[pages, 2, page_size, Hk, D]`, lookup_table `[B, max_pages]` uint32. D is a multiple of 8.
    """

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        mean: OutputTensor[dtype=DType.float32, rank=3, ...],
        lengths: InputTensor[dtype=DType.int32, rank=1, ...],
        lookup_table: InputTensor[dtype=DType.uint32, rank=2, ...],
        blocks: MutableInputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var shape = page_shape["NHD"](blocks.shape())  # (pages, page_size, Hk, D)
        var entries = untracked_immutable(lookup_table.unsafe_ptr())
        var batch = lookup_table.dim_size(0)
        var max_pages = lookup_table.dim_size(1)
        var counts = untracked_immutable(lengths.unsafe_ptr())
        if lengths.dim_size(0) != batch or shape[3] % SIMD_WIDTH:
            raise Error("lengths must have a number for each request, and D must be a multiple of ", SIMD_WIDTH)
        var table = PageTable(entries, batch, max_pages, shape[0], shape[1])
        for request in range(batch):  # refuses a page that the cache has not, before anything is read
            table.check_tokens("lengths", request, 0, Int(counts[unsafe_offset=request]))

        var keys = PagedKVCache[dtype, UNKNOWN_HEADS, UNKNOWN_VALUE](
            untracked(blocks.unsafe_ptr()),
            shape,
            PageStrides.of["NHD"](blocks.shape(), False),
            entries,
            batch,
            max_pages,
        )
        var heads = keys.num_heads()
        var result = untracked(mean.unsafe_ptr())

        def task(index: Int) {var keys, var counts, var result, var heads}:
            var request, head = divmod(index, heads)
            var length = Int(counts[unsafe_offset=request])
            var scale = Float32(1) / Float32(max(length, 1))
            for dim in range(0, keys.head_dim(), SIMD_WIDTH):
                var sum = SIMD[DType.float32, SIMD_WIDTH](0)
                for token in range(length):
                    sum += keys.load[SIMD_WIDTH](request, head, token, dim).cast[DType.float32]()
                result.unsafe_offset(index * keys.head_dim() + dim).unsafe_store(sum * scale)

        sync_parallelize(task, batch * heads)
