"""Libraries of kernels in a test run: the first of several workers that needs one builds it, the others then find it.

A run of all tests builds with it all others of its dtype, since a program of many libraries takes little longer than
that of one.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import wraps
from pathlib import Path

import pytest

from paged_kv.graphs.encodings import ENCODINGS
from paged_kv.runtime import libraries, program_ops
from paged_kv.runtime.libraries import ALL_ENCODINGS, Kernel, Library
from support import tiers
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
FIRST = ("float32", "bfloat16")
SELDOM = {"float16", "uint8", "uint16", "uint32"}
"""Dtypes of few libraries, which are built together."""


def install(*, of_all_tests: bool, worker: int | None) -> None:
    """Changes where this process gets its libraries, for as long as it lives. The first two workers of a run of all
    tests build those of the dtypes that most tests need, one dtype each.
    """
    get_paths = libraries._paths

    @wraps(get_paths)
    def paths(needed: Sequence[Library], *, exact: bool = False) -> dict[Library, Path]:
        for dtype, group in by_dtype(needed).items():
            if len(libraries._there(group, exact=exact)) < len(group):
                with one_process_at_a_time(f"libraries-{dtype}"):
                    get_paths(with_others(group) if of_all_tests else group, exact=exact)
        return get_paths(needed, exact=exact)

    patch = pytest.MonkeyPatch()
    patch.setattr(libraries, "_paths", paths)
    # Of quantised weights one library for all tests, where a user's machine builds one for those of each file.
    of_tier = sum(1 << ENCODINGS.index(name) for name in tiers.ENCODINGS) if tiers.HAS_FEW_ENCODINGS else ALL_ENCODINGS
    patch.setattr(program_ops, "built_encodings", lambda *_: of_tier)
    if of_all_tests and worker is not None and worker < len(FIRST):
        paths([Kernel("merge", (FIRST[worker],)).library])


def by_dtype(needed: Sequence[Library]) -> dict[str, list[Library]]:
    """The libraries that are built together: those of one dtype, and of quantised weights."""
    groups: dict[str, list[Library]] = defaultdict(list)
    for library in needed:
        dtype = library.dtypes[0]
        if is_quantised(library):
            group = "quantised"
        elif dtype in SELDOM:
            group = FIRST[0] if tiers.IS_QUICK and of_bits(library) else "seldom"
        else:
            group = dtype
        groups[group].append(library)
    return groups


def with_others(group: Sequence[Library]) -> list[Library]:
    """Some libraries of `by_dtype`, and the others of their group that the run's tests need."""
    (name,) = by_dtype(group)
    others = [each for each in libraries.api_libraries() if each.dtypes[:2] not in RARE]
    others += [kernel.library for kernel in OF_TESTS_ALONE]
    if tiers.IS_QUICK:
        others = [each for each in others if of_bits(each) or tiers.of([each.dtypes[:2]])]
    others = by_dtype(others).get(name, []) if name != "quantised" else []
    return list(dict.fromkeys([*group, *others]))


def of_bits(library: Library) -> bool:
    """Return whether it copies elements without a look at them."""
    return library.dtypes[0].startswith("uint")


def is_quantised(library: Library) -> bool:
    """Return whether it multiplies by weights in blocks."""
    return library.mask != 0
