"""Libraries of kernels in a test run: the first of several workers that needs one builds it, the others then find it.

A run of all tests builds with it all others of its dtype, since a program of many libraries takes little longer than
that of one.
"""

from collections.abc import Sequence
from functools import wraps
from pathlib import Path

import pytest

from paged_kv.runtime import libraries, program_ops
from paged_kv.runtime.libraries import ALL_ENCODINGS, Kernel, Library
from support.dtype_pairs import LINEAR_PAIRS
from support.op_graphs import one_process_at_a_time

OF_TESTS_ALONE = [
    *(Kernel(kind, (bits, bits)) for bits in ("uint16", "uint32") for kind in ("append", "gather")),
    *(Kernel("linear", pair) for pair in LINEAR_PAIRS),
    *(Kernel(kind, ("float32", "bfloat16", "float32")) for kind in ("attention", "attention_rotated")),
    *(
        Kernel(kind, ("bfloat16", cache, "float32"))
        for cache in ("bfloat16", "float8_e4m3fn")
        for kind in ("attention", "masked_attention", "masked_attention_rotated")
    ),
    Kernel("attention", ("float32", "float32", "float16")),
]
"""Kernels that tests call and no call of the API, or one with an output of another dtype."""
RARE = [("float16", "uint8"), ("float16", "float8_e4m3fn"), ("float16", "float8_e5m2")]
"""Queries and caches that few tests have."""
SELDOM = {"float16", "uint8", "uint16", "uint32"}
"""Dtypes of few libraries, which are built together."""


def install(*, of_all_tests: bool) -> None:
    """Changes where this process gets its libraries, for as long as it lives."""
    get_paths = libraries._paths

    @wraps(get_paths)
    def paths(needed: Sequence[Library], *, exact: bool = False) -> dict[Library, Path]:
        if len(libraries._there(needed, exact=exact)) < len(needed):
            with one_process_at_a_time("libraries"):
                get_paths(with_others(needed) if of_all_tests else needed, exact=exact)
        return get_paths(needed, exact=exact)

    patch = pytest.MonkeyPatch()
    patch.setattr(libraries, "_paths", paths)
    # Of quantised weights one library for all tests, where a user's machine builds one for those of each file.
    patch.setattr(program_ops, "built_encodings", lambda *_: ALL_ENCODINGS)


def with_others(needed: Sequence[Library]) -> list[Library]:
    """Some libraries, and those of the same dtype that tests need; that of quantised weights, the longest, is apart."""
    dtypes = {library.dtypes[0] for library in needed if not is_quantised(library)}
    if not dtypes.isdisjoint(SELDOM):
        dtypes |= SELDOM
    others = [each for each in libraries.api_libraries() if each.dtypes[:2] not in RARE]
    others += [kernel.library for kernel in OF_TESTS_ALONE]
    others = [each for each in others if each.dtypes[0] in dtypes and not is_quantised(each)]
    return list(dict.fromkeys([*needed, *others]))


def is_quantised(library: Library) -> bool:
    """Return whether it multiplies by weights in blocks."""
    return library.mask != 0
