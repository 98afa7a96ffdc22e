"""A run of the op tests for queries of one dtype alone, which compiles a third of what all dtypes take."""

import re

import pytest

from support import cases, dtype_pairs, harness

KV_DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of the caches beside one of the queries' own dtype."""

WITHOUT_DTYPE = frozenset({"test_any_options"})
"""Tests whose names have no dtype, and that take it from `cases.DTYPES`."""
OF_NO_DTYPE = frozenset({"test_quantised.py"})
"""Files whose tests have float32 activations whatever the dtype is."""


def install(dtype: str) -> None:
    """Narrows what tests take dtypes from. To be called before test modules are imported, because they read it."""
    cases.DTYPES = harness.DTYPES = (dtype,)
    harness.PAIRS = tuple((dtype, kv_dtype) for kv_dtype in (dtype, *KV_DTYPES))
    harness.MASKED_PAIRS = harness.PAIRS[:2]
    dtype_pairs.LINEAR_PAIRS = ((dtype, dtype),)


def deselect_others(dtype: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of `dtype`; others would compile what they need."""
    others = [item for item in items if not _is_of(dtype, item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _is_of(dtype: str, item: pytest.Item) -> bool:
    function, _, parameters = item.nodeid.rpartition("::")[2].partition("[")
    named = re.findall(r"(?<!b)float(?:16|32)|bfloat16", parameters)
    return item.path.name in OF_NO_DTYPE or function in WITHOUT_DTYPE or set(named) == {dtype}
