"""Measures cases with servers in turns: all of a group are alive, and all but one are stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve_cases import MODELS, SIZES, ServeCase, fresh_turns
from benchmarks.serve_checkpoint import Checkpoint
from benchmarks.serve_client import WrongAnswer, decode_rate, first_token_seconds
from benchmarks.servers import make_system
from benchmarks.servers.base import NotMeasured, System

Prompts = list[list[int]]
Figures = dict[str, dict[str, Any]]
"""By system: name, and turns of rate (tokens/s) and first (s, None where the prompts were not new), or a note."""
WARM_UP = 192
"""Tokens of the prompts that a server is warmed up with, one alone and then as many at once as it takes."""


class Group:
    """Systems that are alive together. Use it as a context: leaving it ends them all.

    Args:
        keys: The systems, by their names in `servers.SYSTEMS`.
        checkpoint: The model, as each of them reads it.
        logs: A folder for what they say.
        size: The requests at once and the longest one that they are started for.
    """

    def __init__(
        self, keys: Sequence[str], checkpoint: Checkpoint, logs: Path, size: tuple[int, int] = SIZES[0]
    ) -> None:
        self._keys, self._checkpoint, self._logs, self._size = keys, checkpoint, logs, size
        self._alive: dict[str, System] = {}
        self._notes: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        """The versions of the systems that run, by label."""
        self._rng = np.random.default_rng(int(time.time()))  # another run's prompts may be in a cache on disk

    def __enter__(self) -> Group:
        try:
            for key in self._keys:
                self._start(key)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for system in self._alive.values():
            system.stop()
        self._alive.clear()

    def measure(self, case: ServeCase, turns: int) -> Figures:
        """One case: in each turn every system once."""
        found: Figures = {
            key: {"name": self._names[key], "turns": []} | ({"note": note} if (note := self._notes.get(key)) else {})
            for key in self._keys
        }
        prompts: Prompts = []
        for turn in range(turns):
            fresh = turn < fresh_turns(case, turns)
            if fresh:
                prompts = self._prompts(case.model, case.batch, case.context)
            for key in list(self._alive):
                if "note" not in found[key]:
                    try:
                        with self._awake(key) as system:
                            found[key]["turns"].append(_turn(system, prompts, case.new_tokens, fresh))
                    except (NotMeasured, WrongAnswer, OSError) as error:
                        found[key]["note"] = str(error)[:200]
        return found

    def _start(self, key: str) -> None:
        system = make_system(key)
        self._names[key] = system.name
        try:
            system.start(self._checkpoint, *self._size, self._logs / f"{key}.log")
            self._alive[key] = system
            self.versions[system.label] = system.version()
            for batch in (1, self._size[0]):
                system.streams(self._prompts(self._checkpoint.model, batch, WARM_UP), 8)
            system.pause()
        except (NotMeasured, WrongAnswer, OSError) as error:
            self._notes[key] = str(error)[:200]
            system.stop()
            self._alive.pop(key, None)

    @contextmanager
    def _awake(self, key: str) -> Iterator[System]:
        system = self._alive[key]
        system.resume()
        try:
            yield system
        finally:
            system.pause()

    def _prompts(self, model: str, batch: int, context: int) -> Prompts:
        """Draw prompts of ordinary tokens, no two prompts with a common beginning."""
        ids = self._rng.integers(300, MODELS[model].vocab, (batch, context))
        return [[int(token) for token in row] for row in ids]


def _turn(system: System, prompts: Prompts, new_tokens: int, fresh: bool) -> dict[str, float | None]:
    """The first token of new prompts in a request of its own; then the same prompts, cached by now, are continued."""
    first = first_token_seconds(system.streams(prompts, 1)) if fresh else None
    return {"rate": decode_rate(system.streams(prompts, new_tokens)), "first": first}
