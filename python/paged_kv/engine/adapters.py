"""The LoRA adapters of a model: which are loaded, their weights in stacks, and the step that adds them.

The step is read from its graph anew when an adapter is loaded or its weights are dropped (0.3 s for 30 layers), while
other steps run, so no option says how many adapters there will be, of which rank, and of which layers. A step
without rows of adapters is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import shown
from paged_kv.checkpoint.adapters import AdapterWeights, read_adapter
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.graphs.models.adapters import AdapterStacks
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.runtime.program import Program

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. Its weights stay as long as it is referred to: by its name, and by requests that use it."""

    name: str
    index: int
    """Its place in the stacks."""
    digest: str
    """Adapters of equal digests compute the same, so they may share pages of prefixes."""
    ranks: Mapping[str, int]
    """Its rank in each layer that it changes."""
    origin: Path


class Adapters:
    """The adapters of one model; any thread may call it.

    Args:
        config: The model.
        dtype: Of the stacks.
        make: Makes the step's program for some sizes and their stacks.
        names: Names that layers have in the model's own files, and the step's.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: np.dtype[Any],
        make: Callable[[AdapterStacks, Mapping[str, Array]], Program],
        names: Mapping[str, str],
    ) -> None:
        self._config, self._dtype, self._make, self._names = config, dtype, make, names
        self._named: dict[str, Adapter] = {}
        self._places: list[ref[Adapter]] = []
        self._stacks: dict[str, Array] = {}
        self._lock = Lock()
        self.program: Program | None = None
        """The step for rows of adapters; None while none is loaded."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that requests may ask for, in the order of their loading."""
        return tuple(self._named)

    def of_name(self, name: str) -> Adapter:
        """An adapter by its name. Raises ContractError where there is none."""
        adapter = self._named.get(name) if isinstance(name, str) else None
        if adapter is None:
            expected = f"one of {', '.join(self._named)}" if self._named else "none, as no adapter is loaded"
            raise ContractError(f"adapter: expected {expected}, got {shown(name)}")
        return adapter

    def load(self, name: str, path: Path | str) -> Adapter:
        """Reads an adapter and makes the step that adds it. Requests go on meanwhile.

        Raises:
            ContractTypeError, ContractError: `name` is no text, is empty, or another adapter has it.
            CheckpointError: as `read_adapter`.
        """
        if not isinstance(name, str):
            raise ContractTypeError(f"name: expected a text, got {shown(name)}")
        with self._lock:
            if not name or name in self._named:
                raise ContractError(f"name: expected one that no adapter has, got {shown(name)}")
            weights = read_adapter(path, self._config, self._names)
            places = [each if each() is not None else None for each in self._places]
            index = places.index(None) if None in places else len(places)
            ranks = {layer: len(a) for layer, (a, _) in weights.layers.items()}
            adapter = Adapter(name, index, weights.digest, ranks, weights.origin)
            self._places = [*self._places[:index], ref(adapter), *self._places[index + 1 :]]
            self._rebuild(adapter, weights)
            self._named[name] = adapter
            return adapter

    def unload(self, name: str) -> None:
        """Forgets a name. Requests that have the adapter go on with it; its memory is taken for the next one.

        Raises:
            ContractError: no adapter has the name.
        """
        with self._lock:
            del self._named[self.of_name(name).name]

    def _rebuild(self, new: Adapter, weights: AdapterWeights) -> None:
        """Makes the stacks, of all adapters that are alive, and the step that reads them."""
        alive = [adapter for each in self._places if (adapter := each()) is not None]
        ranks: dict[str, int] = {}
        for adapter in alive:
            for layer, rank in adapter.ranks.items():
                ranks[layer] = max(ranks.get(layer, 0), rank)
        sizes = AdapterStacks(len(self._places), tuple(sorted(ranks.items())))
        stacks = {name: np.zeros(shape, self._dtype) for name, shape in sizes.tensors(self._config).items()}
        for adapter in alive:
            for layer, rank in adapter.ranks.items():
                names = f"{layer}.lora_A", f"{layer}.lora_B"
                if adapter is new:
                    a, b = weights.layers[layer][0], weights.layers[layer][1].T
                else:
                    a, b = (self._stacks[each][adapter.index] for each in names)
                stacks[names[0]][adapter.index, :rank] = a[:rank]
                stacks[names[1]][adapter.index, :rank] = b[:rank]
        self.program = self._make(sizes, stacks)
        self._stacks = stacks
