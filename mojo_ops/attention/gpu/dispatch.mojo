"""Which GPU kernel answers a call of attention: the one place that decides.

`python/paged_kv/gpu_kernels.py` says the same to people; tests/test_gpu_kernels.py compares the two.
"""

from max.gpu.host import DeviceContext

from ...cache.gpu_loads import DeviceCache
from .generic import attend_plain
from .hopper.kernel import ON_HOPPER, attend_hopper, hopper_refusal, hopper_takes
from .params import DecodeRows
from .rope import Turns


def attend_on_gpu[
    dtype: DType, kv_dtype: DType, //, gpu_kernel: StaticString
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    turns: Turns,
    batch_invariant: Bool,
) raises:
    """Enqueues the Hopper kernel where the GPU is one and it takes the call, else the plain one.

    Rotary keys are for the plain one: Hopper's takes keys as they are stored.

    Parameters:
        gpu_kernel: "best" is that; "plain" takes the plain one anyhow.
    """
    comptime assert gpu_kernel == "best" or gpu_kernel == "plain", "gpu_kernel is best or plain"
    comptime if gpu_kernel == "best" and ON_HOPPER and hopper_takes[dtype, kv_dtype]():
        if not turns.is_on() and not hopper_refusal(rows, k, v):
            attend_hopper(ctx, rows, k, v, batch_invariant)
            return
    attend_plain(ctx, rows, k, v, turns, batch_invariant)
