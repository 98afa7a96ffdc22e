"""Folders of a disk tier whose writers are killed; as a program, with `FOLDER KILLS`, it kills them two at a time."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Sampling
from support.fake_model import FakeModel, alone

ROOM = 30_000
"""The limit: some 50 pages, of 17 a prompt."""
PROMPTS = [[first, *(at * at % 23 for at in range(65))] for first in range(12)]
FIVE = Sampling(5)
EXPECTED = [alone(prompt, FIVE) for prompt in PROMPTS]


def bytes_in(folder: Path, *, pages_only: bool = False) -> int:
    """The bytes of all files, or of those of pages."""
    total = 0
    for file in folder.iterdir():
        try:
            total += file.stat().st_size if file.is_file() and (file.suffix == ".page" or not pages_only) else 0
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


def ask(folder: Path, rng: random.Random, turns: int) -> int:
    """Answers prompts, each rightly, in an engine that begins with what is on disk; the tokens that came from there."""
    engine = Engine(FakeModel(60, 4), disk=DiskTier(folder, ROOM))
    for _ in range(turns):
        number = rng.randrange(len(PROMPTS))
        got = [token for output in engine.stream(PROMPTS[number], FIVE) for token in output.tokens]
        assert got == EXPECTED[number], (number, got)
    engine.flush()
    return engine.tokens_restored


def writer(folder: Path, seed: int) -> int:
    """A child that writes until it is killed; its id."""
    child = os.fork()
    if child == 0:
        try:
            rng = random.Random(seed)
            while True:
                ask(folder, rng, 4)
        finally:
            os._exit(3)
    return child


def main(folder: Path, kills: int) -> None:
    restored = evictions = unfinished = 0
    rng = random.Random(kills)
    for kill in range(kills):
        before = set(folder.iterdir())
        children = [writer(folder, 2 * kill), writer(folder, 2 * kill + 1)]
        time.sleep(rng.uniform(0, 0.12))
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, "a writer ended by itself"
        # No writer is left, so these are the bytes of one moment.
        assert bytes_in(folder) <= ROOM, bytes_in(folder)
        evictions += bool(before - set(folder.iterdir()))
        unfinished += (folder / "unfinished").exists()
        restored += ask(folder, rng, 2)
        assert bytes_in(folder) <= ROOM, bytes_in(folder)
        assert not (folder / "unfinished").exists()
    print(restored, evictions, unfinished)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
