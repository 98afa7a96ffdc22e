"""Compiling before the first request, for servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from max.dtype import DType

from paged_kv.errors import ContractTypeError
from paged_kv.graphs.ops import BITS, CODES, DTYPES, KV_DTYPES
from paged_kv.options import FLOAT8_DTYPES
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant


def warmup(
    q_dtypes: Sequence[str] | None = None, kv_dtypes: Sequence[str] | None = None, *, exact: bool = False
) -> list[str]:
    """Compiles, or reads from disk, every variant of append, gather and attention for the given dtypes.

    Args:
        q_dtypes: Of queries: "float32", "bfloat16", "float16"; all of them where None.
        kv_dtypes: Of caches: the same, "float8_e4m3fn", "float8_e5m2", "int8" and "int4"; all of them where None. A
            cache has its queries' dtype, or one of the last four under any; other pairs are left out.
        exact: Compile for this very CPU what came with the package for a lower target; later processes take that.
            Call it before anything that runs the kernels.

    Returns:
        What is ready now, in words.

    Raises:
        ContractTypeError: a dtype is none of these.
    """
    queries = _chosen("q_dtypes", q_dtypes, {dtype.name: dtype for dtype in DTYPES})
    codes = {name: memory for memory, name in CODES.items()}
    caches = _chosen("kv_dtypes", kv_dtypes, {dtype.name: dtype for dtype in KV_DTYPES} | codes)
    narrow = (*FLOAT8_DTYPES, *(memory.name for memory in CODES))
    variants = [Variant("attention", q, kv) for q in queries for kv in caches if kv == q or kv.name in narrow]
    widths = {kv.size_in_bytes for kv in caches}
    copied = [bits for bits in BITS if bits.size_in_bytes in widths]
    variants += [variant for bits in copied for variant in Variant("append", bits, bits).family()]
    for memory in (kv for kv in caches if kv in CODES):
        variants += [*(Variant("append", q, memory) for q in queries), Variant("gather", DType.float32, memory)]
    default_runtime().load(variants, exact=exact)
    return [str(variant) for variant in variants]


def _chosen(argument: str, names: Sequence[str] | None, dtypes: Mapping[str, DType]) -> list[DType]:
    for name in names or ():
        if name not in dtypes:
            raise ContractTypeError(f"{argument}: {name!r} is none of {', '.join(dtypes)}")
    return [dtypes[name] for name in (dtypes if names is None else names)]
