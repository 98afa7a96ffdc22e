"""Graphs that are compiled together and lie in one file: of the array API, or a model's step.

A module of three graphs compiles in half the time of three modules, and loads in 15 ms where one takes 12 (for haswell,
on Zen 5, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, Module

from paged_kv.graphs.ops import BITS, CODES, DTYPES, KV_DTYPES
from paged_kv.options import FLOAT8_DTYPES
from paged_kv.runtime.compile_key import CompileKey
from paged_kv.runtime.variants import Op, Variant


@dataclass(frozen=True)
class GraphFamily:
    """What a compile and a load need. `kernel_build` sends it to another process, so there all of it can be pickled."""

    keys: Mapping[str, CompileKey]
    """What each graph depends on, by its name."""
    build: Callable[[Module, Sequence[str]], None]
    """Adds the graphs of the given names to a module."""
    weights: Callable[[], Mapping[str, Any]] = dict
    """Values for the graphs' weights by name, without which MAX loads no graph that has some. A file holds none."""


_ATTENTION: tuple[Op, ...] = ("attention", "masked_attention", "mla_attention")


def _api_families() -> dict[str, tuple[Variant, ...]]:
    """Of every variant that the array API loads, but for outputs of another dtype than q's over codes.

    A float8 query is widened before the op and a float8 output rounded after it, so queries and outputs are of three
    dtypes here; a cache has its queries' dtype or a float8 one, or holds codes, which no latents are.
    """
    families: dict[str, tuple[Variant, ...]] = {}
    for op in _ATTENTION:
        for q in DTYPES:
            for kv in KV_DTYPES:
                if kv == q or kv.name in FLOAT8_DTYPES:
                    outputs = (None, *(dtype for dtype in DTYPES if dtype != q))
                    members = tuple(Variant(op, q, kv, output) for output in outputs)
                    families[members[0].name] = members
    for op in _ATTENTION[:2]:
        for q in DTYPES:
            members = tuple(Variant(op, q, memory) for memory in CODES)
            families[f"{op}_{q.name}_codes"] = members
    moves: list[tuple[Op, DType]] = [("append", q) for q in DTYPES] + [("gather", DType.float32)]
    families["codes"] = tuple(Variant(op, rows, memory) for memory in CODES for op, rows in moves)
    families["copies"] = tuple(variant for bits in BITS for variant in Variant("append", bits, bits).family())
    families["merges"] = tuple(Variant("merge", dtype, dtype) for dtype in DTYPES)
    return families


API_FAMILIES = _api_families()
"""The variants that lie in one file when they are compiled ahead, by the file's name."""

API_VARIANTS = frozenset(variant for family in API_FAMILIES.values() for variant in family)


def api_families() -> dict[str, GraphFamily]:
    """What compiles and loads `API_FAMILIES`."""
    return {
        name: GraphFamily({variant.name: variant.key() for variant in variants}, partial(_build, variants))
        for name, variants in API_FAMILIES.items()
    }


def _build(variants: Sequence[Variant], module: Module, names: Sequence[str]) -> None:
    for variant in variants:
        if variant.name in names:
            variant.build(module, DeviceRef.CPU())
