"""Compiling before the first request, for servers."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType

from paged_kv.errors import ContractTypeError
from paged_kv.graphs.ops import BITS, DTYPES, KV_DTYPES
from paged_kv.options import FLOAT8_DTYPES
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant


def warmup(
    q_dtypes: Sequence[str] | None = None, kv_dtypes: Sequence[str] | None = None, *, exact: bool = False
) -> list[str]:
    """Compiles, or reads from disk, every variant of append, gather and attention for the given dtypes.

    Args:
        q_dtypes: Of queries: "float32", "bfloat16", "float16"; all of them where None.
        kv_dtypes: Of caches: the same, "float8_e4m3fn" and "float8_e5m2"; all of them where None. A cache has its
            queries' dtype or a float8 one; other pairs are left out.
        exact: Compile for this very CPU what came with the package for a lower target; later processes take that.
            Call it before anything that runs the kernels.

    Returns:
        What is ready now, in words.

    Raises:
        ContractTypeError: a dtype is none of these.
    """
    queries = DTYPES if q_dtypes is None else [_choose("q_dtypes", name, DTYPES) for name in q_dtypes]
    caches = KV_DTYPES if kv_dtypes is None else [_choose("kv_dtypes", name, KV_DTYPES) for name in kv_dtypes]
    variants = [Variant("attention", q, kv) for q in queries for kv in caches if kv == q or kv.name in FLOAT8_DTYPES]
    widths = {kv.size_in_bytes for kv in caches}
    copied = [bits for bits in BITS if bits.size_in_bytes in widths]
    variants += [variant for bits in copied for variant in Variant("append", bits, bits).family()]
    default_runtime().load(variants, exact=exact)
    return [str(variant) for variant in variants]


def _choose(argument: str, name: str, dtypes: Sequence[DType]) -> DType:
    for dtype in dtypes:
        if dtype.name == name:
            return dtype
    raise ContractTypeError(f"{argument}: {name!r} is none of {', '.join(dtype.name for dtype in dtypes)}")
