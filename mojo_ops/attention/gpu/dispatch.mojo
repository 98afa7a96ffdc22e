"""The choice of the GPU kernel of a call of attention: the one place that decides, and says why."""

from max.gpu.host import DeviceContext

from ...cache.paged_kv_cache import DynamicKVCache
from .generic import attend_generic
from .hopper.kernel import attend_hopper
from .hopper.requirements import ON_HOPPER, hopper_refusal, hopper_shape_refusal, hopper_takes
from .params import GpuAttentionParams, rows_of
from .rope import RotaryFrequencies
from .split_kv import rows_of_pass


def attend_on_gpu[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //, gpu_kernel: StaticString
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    rotary: RotaryFrequencies,
    batch_invariant: Bool,
) raises:
    """Enqueues the Hopper kernel where the GPU is one and it takes the call, else the generic one.

    A batch-invariant call goes in passes of some rows, so that the memory of its partial results is bounded.

    Parameters:
        gpu_kernel: "best" is that; "plain" takes the generic one for every call.
    """
    var rows = Int(params.num_rows)
    var at_once = max(1, rows)
    if batch_invariant:
        at_once = rows_of_pass(Int(params.capacity), Int(params.num_heads), Int(params.value_dim()))
    for first in range(0, max(1, rows), at_once):
        var part = rows_of(params, first, min(at_once, rows - first))
        attend_rows[gpu_kernel](ctx, part, k, v, rotary, batch_invariant)


def attend_rows[
    dtype: DType, o_dtype: DType, kv_dtype: DType, //, gpu_kernel: StaticString
](
    ctx: DeviceContext,
    params: GpuAttentionParams[dtype, o_dtype],
    k: DynamicKVCache[kv_dtype],
    v: DynamicKVCache[kv_dtype],
    rotary: RotaryFrequencies,
    batch_invariant: Bool,
) raises:
    """`attend_on_gpu` in one pass."""
    comptime assert gpu_kernel == "best" or gpu_kernel == "plain", "gpu_kernel is best or plain"
    comptime if gpu_kernel == "best" and ON_HOPPER and hopper_takes(dtype, kv_dtype):
        if not device_refusal(rotary.rotates()) and not hopper_refusal(params, k, v):
            attend_hopper(ctx, params, k, v, batch_invariant)
            return
    attend_generic(ctx, params, k, v, rotary, batch_invariant)


def device_refusal(rotates: Bool) -> String:
    """The reason why no call on this GPU, or none with rotary keys, gets the Hopper kernel; empty where some do."""
    if rotates:
        return "it takes keys as they are stored, the generic kernel rotates them"
    comptime if not ON_HOPPER:
        return String("it is compiled for sm_90a alone, not for ", DeviceContext.default_device_info.name)
    return ""


def generic_reason(dtype: DType, kv_dtype: DType, head_dim: Int, group: Int, page_size: Int, rotates: Bool) -> String:
    """The reason, from dtypes and sizes, why the generic kernel answers a call; empty where the Hopper kernel does.

    `hopper_refusal` also looks at addresses and strides of the storage.
    """
    var refusal = device_refusal(rotates)
    return refusal if refusal else hopper_shape_refusal(dtype, kv_dtype, head_dim, group, page_size)
