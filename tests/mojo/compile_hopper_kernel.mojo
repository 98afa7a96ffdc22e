"""The Hopper kernel in every variant: compiled for sm_90a by tests/gpu/model, never run."""

from std.utils import IndexList
from max.gpu.host import DeviceContext

from mojo_ops.attention.gpu.hopper.kernel import attend_hopper
from mojo_ops.attention.gpu.params import GpuAttentionParams
from mojo_ops.attention.gpu.row_masks import GpuNoMasks
from mojo_ops.attention.logits import ScoreOptions
from mojo_ops.cache.paged_kv_cache import DynamicKVCache
from mojo_ops.cache.pointers import untracked, untracked_immutable
from mojo_ops.cache.strides import PageStrides


def launch[dtype: DType, kv_dtype: DType](ctx: DeviceContext) raises:
    """The variants of one pair of dtypes: which of them a call gets is decided when it runs."""
    var memory = ctx.enqueue_create_buffer[DType.float32](1024)
    var floats = untracked(memory.unsafe_ptr())
    var heads = untracked_immutable(memory.unsafe_ptr())
    var numbers = heads.unsafe_bitcast[Int32]()
    var q = floats.unsafe_bitcast[Scalar[dtype]]()
    var params = GpuAttentionParams[dtype](
        q,
        q,
        floats,
        numbers,
        numbers,
        heads,
        heads,
        1,
        8,
        64,
        1,
        16,
        -1,
        ScoreOptions(1, soft_cap=0),
        1,
        0,
        0,
        GpuNoMasks(),
    )
    var cache = DynamicKVCache[kv_dtype](
        floats.unsafe_bitcast[Scalar[kv_dtype]](),
        IndexList[4](1, 16, 1, 64),
        PageStrides(0, 1024, 64, 64),
        numbers.unsafe_bitcast[UInt32](),
        1,
        1,
    )
    attend_hopper(ctx, params, cache, cache, False)
    _ = memory^


def main() raises:
    var ctx = DeviceContext()
    launch[DType.bfloat16, DType.bfloat16](ctx)
    launch[DType.float16, DType.float16](ctx)
    launch[DType.bfloat16, DType.float8_e4m3fn](ctx)
    launch[DType.float16, DType.float8_e4m3fn](ctx)
    launch[DType.bfloat16, DType.float8_e5m2](ctx)
