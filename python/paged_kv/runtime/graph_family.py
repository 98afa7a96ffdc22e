"""Graphs that are compiled together and lie in one file: of the array API, or a model's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from max.graph import DeviceRef, Module

from paged_kv.runtime.api_variants import API_FAMILIES, variant_key
from paged_kv.runtime.compile_key import CompileKey
from paged_kv.runtime.variants import Variant


@dataclass(frozen=True)
class GraphFamily:
    """What a compile and a load need. `kernel_build` sends it to another process, so there all of it can be pickled."""

    keys: Mapping[str, CompileKey]
    """What each graph depends on, by its name."""
    build: Callable[[Module, Sequence[str]], None]
    """Adds the graphs of the given names to a module."""
    weights: Callable[[], Mapping[str, Any]] = dict
    """Values for the graphs' weights by name, without which MAX loads no graph that has some. A file holds none."""


def api_families() -> dict[str, GraphFamily]:
    """Those of every variant of the array API, by the name of the file."""
    return {
        name: GraphFamily({variant.name: variant_key(variant) for variant in variants}, partial(_build, variants))
        for name, variants in API_FAMILIES.items()
    }


def _build(variants: Sequence[Variant], module: Module, names: Sequence[str]) -> None:
    for variant in variants:
        if variant.name in names:
            variant.build(module, DeviceRef.CPU())
