"""Which GPU kernel answers a call of attention."""

from max.gpu.host import DeviceContext

from .decode_gpu import DeviceCache, attend_plain
from .decode_rows import DecodeRows


def attend_on_gpu[
    dtype: DType, kv_dtype: DType, //
](
    ctx: DeviceContext,
    rows: DecodeRows[dtype],
    k: DeviceCache[kv_dtype],
    v: DeviceCache[kv_dtype],
    batch_invariant: Bool,
) raises:
    """Enqueues the kernel that `python/paged_kv/gpu_kernels.py` names for such a call."""
    attend_plain(ctx, rows, k, v, batch_invariant)
