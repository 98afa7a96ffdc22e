"""The tiers of a run. Quick is what plain `pytest` runs and `-m quick` selects; `--all` is everything.

The quick tier has every test function that is not `slow`, each with a few of its cases, and kernels of few dtypes,
encodings and families: these lists say which.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

FOLDERS = ("unit", "ops", "api", "engine", "serve", "hostile")
"""Those of tests/mojo compile for minutes, and the others need more than a CPU."""
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
"""Those of queries, weights and caches; float8 beside bfloat16 alone."""
ENCODINGS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")
"""Those of weights in blocks."""
FAMILIES = ("llama", "gemma3", "gpt_oss", "qwen3_next", "lite", "glm4_moe")
"""Cases of tests/support/families.py; `lite` is DeepSeek-V2-Lite."""
CASES = 2
"""Cases of a test function: the first and the last."""
WHOLE = ("api/test_contract.py::test_run", "api/test_contract.py::test_plan", "api/test_contract.py::test_function")
WHOLE += ("engine/test_families.py::test_logits_are_those_of_transformers",)
"""Functions of which the tier has every case that its lists allow."""
HOSTILE_CASES = 250

IS_QUICK = False
"""True in a run of the quick tier; conftest.py sets it."""
HAS_FEW_ENCODINGS = False
"""True in that run, and in others where kernels of ENCODINGS alone are to be built."""

_NAMES = {*DTYPES, "float16", "float8_e5m2", "int4", "uint8", "uint16", "uint32"}
_OTHERS = _NAMES - {*DTYPES} | {"float32 over float8_e4m3fn"}


def of(dtypes: Iterable[Any]) -> list[Any]:
    """Return those of some dtypes, or of tuples of dtypes, by name, that this run has."""
    return [each for each in dtypes if not IS_QUICK or _OTHERS.isdisjoint(_words(each))]


def quick_tests(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those of a collection that the quick tier has."""
    if not items:  # the environments of other folders lack what the next lines import
        return []
    from support import families

    others = _OTHERS | {name.split(",")[0] for name in families.CASES} - set(FAMILIES)
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        function = item.nodeid.rpartition("tests/")[2].partition("[")[0]
        if item.get_closest_marker("slow") or is_of_another_encoding(item) or others & _parameters(item):
            continue
        functions[function].append(item)
    return [item for function, cases in functions.items() for item in _few(function, cases)]


def is_of_another_encoding(item: pytest.Item) -> bool:
    """Return whether a test has weights in an encoding that is not one of ENCODINGS."""
    from paged_kv.graphs.encodings import TABLE

    return not (TABLE.keys() - set(ENCODINGS)).isdisjoint(_parameters(item))


def _parameters(item: pytest.Item) -> set[str]:
    """Return the words of a test's parameters and of its name."""
    case = item.nodeid.rpartition("::")[2].partition("[")[2].rstrip("]")
    return _words([re.split("[-,]", case), getattr(item, "callspec", None) and item.callspec.params])


def _words(value: Any) -> set[str]:
    """Return the strings and the names of dtypes in a parameter, and `q over kv` of two strings."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple, set)):
        words = set().union(*map(_words, value))
        return words | {" over ".join(value)} if {*map(type, value)} == {str} else words
    return {value if isinstance(value, str) else str(getattr(value, "name", ""))}


def _few(function: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    if function in WHOLE or len(cases) <= CASES:
        return cases
    return [cases[at * (len(cases) - 1) // (CASES - 1)] for at in range(CASES)]
