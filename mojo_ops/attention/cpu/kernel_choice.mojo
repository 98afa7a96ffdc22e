"""Which CPU kernel answers a call of attention: rules that `ops.mojo` follows and `paged-kv doctor` prints."""

from ...isa.amx import HAS_AMX
from .amx.prefill_workspace import WIDE
from .dispatch import Engines, vector_queries


def rotates_keys(rope_theta: Float32) -> Bool:
    """Whether keys lie un-rotated in the cache: the portable loop of `rotary_keys.mojo` is for them alone."""
    return rope_theta != 0


def cpu_kernel[dtype: DType, kv_dtype: DType](group: Int) -> String:
    """The room of the kernel that decodes without rotary keys, and the reason.

    Parameters:
        dtype: Of q.
        kv_dtype: Of the cache.

    Args:
        group: Query heads a KV head: the queries of one row; rows of the same request add theirs.
    """
    var engines = Engines[dtype, kv_dtype]()
    comptime if not HAS_AMX:
        return "cpu/vectors: the CPU target has no AMX"
    comptime if not engines.may_use_amx:
        return "cpu/vectors: AMX takes bfloat16 with a cache of the same or float8"
    if not engines.permitted:
        return "cpu/vectors: the operating system does not grant AMX"
    comptime limit = vector_queries(kv_dtype)
    if not engines.amx(group):
        return String("cpu/vectors: ", group, " queries a KV head; cpu/amx takes more than ", limit)
    if group < WIDE:
        return String("cpu/amx: more than ", limit, " queries a KV head")
    return String("cpu/amx: ", WIDE, " queries a KV head and more, as in prefill")
