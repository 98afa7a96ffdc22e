"""Compiling before the first request, for servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_kv.errors import ContractTypeError
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.options import FLOAT8_DTYPES, KV_DTYPES, Q_DTYPES, stored_dtype
from paged_kv.runtime.libraries import Kernel, load


def warmup(
    q_dtypes: Sequence[str] | None = None, kv_dtypes: Sequence[str] | None = None, *, exact: bool = False
) -> list[str]:
    """Builds, or reads from disk, the libraries of append, gather, attention and linear layers for the given dtypes.

    Args:
        q_dtypes: The dtypes of queries: "float32", "bfloat16", "float16"; all of them where None.
        kv_dtypes: The dtypes of caches: the same, "float8_e4m3fn", "float8_e5m2", "int8" and "int4"; all of them where
            None. A cache has its queries' dtype, or one of the last four under any; other pairs are left out.
        exact: Compile for this very CPU what came with the package for a lower target; later processes take that.
            Call it before anything that runs the kernels.

    Returns:
        What is ready now, in words.

    Raises:
        ContractTypeError: a dtype is none of these.
    """
    queries = _chosen("q_dtypes", q_dtypes, Q_DTYPES)
    caches = _chosen("kv_dtypes", kv_dtypes, (*KV_DTYPES, *CODE_DTYPES))
    narrow = (*FLOAT8_DTYPES, *CODE_DTYPES)
    pairs = [(q, stored_dtype(kv)) for q in queries for kv in caches if kv == q or kv in narrow]
    kernels = [Kernel("attention", (q, kv, q)) for q, kv in pairs]
    if any(kv in FLOAT8_DTYPES for kv in caches):
        kernels.append(Kernel("append", ("uint8", "uint8")))  # float8 rows are copied
    load(kernels, exact=exact)
    return [str(library) for library in dict.fromkeys(kernel.library for kernel in kernels)]


def _chosen(argument: str, names: Sequence[str] | None, legal: Iterable[str]) -> list[str]:
    for name in names or ():
        if name not in legal:
            raise ContractTypeError(f"{argument}: expected one of {', '.join(legal)}, got {name!r}")
    return list(legal if names is None else names)
