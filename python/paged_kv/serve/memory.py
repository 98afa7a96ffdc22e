"""How much memory the server's cache gets, and so how long a request may be."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_kv.errors import ContractError
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.tensors import expected_tensors
from paged_kv.graphs.quantised import row_bytes

SHARE = 0.5
"""Of what is free once the weights are in memory: the part that the cache takes."""
_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CachePlan:
    """What MAX is told of the cache."""

    max_length: int
    """Tokens of the longest request, prompt and answer."""
    utilization: float
    """The share of the memory that MAX counts on; from that it takes the weights' files and leaves the cache."""


@dataclass(frozen=True)
class ServerMemory:
    """What a model takes."""

    weights: int
    """Bytes."""
    files: int
    """Bytes of the weights' files that MAX knows."""
    token: int
    """Bytes of a token in the cache."""
    longest: int
    """Tokens of the longest request that the model knows."""

    @classmethod
    def of(
        cls, config: DecoderConfig, path: Path, encoding: str, cache_format: str | None, more: Sequence[Path] = ()
    ) -> ServerMemory:
        """Of the weights in a GGUF file or in a folder of safetensors, in MAX's words for their encoding and for the
        dtype of the cache; `more` are the further parts of a GGUF model, of which MAX is not told.
        """
        quantised = encoding not in _BYTES
        files = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
        stored = files + sum(file.stat().st_size for file in more)
        encodings, each = dict(config.encodings), _BYTES.get(encoding, 0)
        held = 0
        for name, shape in expected_tensors(config).items():
            row = row_bytes(encodings[name], shape[-1]) if name in encodings else shape[-1] * each
            held += math.prod(shape[:-1]) * row
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        # MAX's activations beside quantised weights are float32, and the cache has their dtype.
        wide = _BYTES.get(cache_format or encoding, 4)
        return cls(stored if quantised else held, files, kv * wide, config.max_position_embeddings)

    def least(self, page_size: int) -> CachePlan:
        """Room for a request of one page: for a server that is made without being asked anything."""
        memory = _memory_of_max()
        share = min(memory, self.files + 4 * page_size * self.token) / memory
        return CachePlan(min(self.longest, page_size), min(0.95, share + 1e-4))  # MAX is told four digits of it

    def plan(self, page_size: int, free: int) -> CachePlan:
        """The cache gets `SHARE` of what the weights leave of `free` bytes; one request may fill it.

        Raises:
            ContractError: fewer than two pages fit; MAX keeps one empty.
        """
        cache = int(SHARE * (free - self.weights))
        pages = cache // (self.token * page_size) - 1
        if pages < 1:
            raise ContractError(
                f"the weights take {self.weights} of the {free} bytes of memory that are free: too few are left for the"
                f" cache, of which a page of {page_size} tokens takes {self.token * page_size}"
            )
        return CachePlan(min(self.longest, pages * page_size), min(0.95, (cache + self.files) / _memory_of_max()))


def _memory_of_max() -> int:
    """The free memory that MAX reports, in bytes: nearly all of the machine's, even where processes use it."""
    from max.driver import CPU

    return int(CPU().stats["free_memory"])


def free_memory() -> int:
    """Bytes that this process may still take: what the system has available, or less where a control group says so."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:  # not Linux
        return free
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # "max": no limit
        return free
    return min(free, limit - used)
