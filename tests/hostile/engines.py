"""Hostile use of an engine: requests that fork, stop, have a structure, are aborted, preempted, interrupted; a model, a
draft, a tokenizer and files that fail; pages on a disk. What each request got is compared with its lone run; no
compiler is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hostile.objects import objects
from hostile.pools import check
from paged_kv.engine import DiskTier, Grammar, Regex
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import least_window_pages
from paged_kv.engine.outputs import OutputStream
from paged_kv.engine.requests import Sampling
from paged_kv.errors import PagedKVError
from support.engine_runs import Asked, Ledger, Letters, guess_often
from support.fake_model import VOCAB, FakeDraft, logits_after
from support.interrupts import interrupted

STRUCTURES = (Regex("[a-e]{2,9}"), Regex("(ab|cd)*[x-z]?w"), Grammar('start: "f" start "g" | "h"\n'), Regex("[a-w]*"))


class Failing(FakeDraft):
    """A model, or a draft, whose calls, and whose samples' decoders, fail now and then."""

    def __init__(self, rng: np.random.Generator, rate: float, *sizes: int, drafts: bool = False) -> None:
        super().__init__(*sizes)
        self._rng, self.rate, self._drafts = rng, rate, drafts

    def logits(self, past: Any) -> np.ndarray:
        return super().logits(past) if self._drafts else logits_after(past)

    def fail(self) -> None:
        if self._rng.random() < self.rate:
            raise [MemoryError, ValueError, KeyError][self._rng.integers(3)]("on purpose")

    def step(self, *arguments: Any, **states: Any) -> np.ndarray:
        self.fail()
        logits = super().step(*arguments, **states)
        self.fail()
        return logits

    def copy_page(self, *arguments: Any, **windows: bool) -> None:
        self.fail()
        super().copy_page(*arguments, **windows)

    def write_pages(self, *arguments: Any, **windows: bool) -> None:
        self.fail()
        super().write_pages(*arguments, **windows)

    def read_pages(self, *arguments: Any, **windows: bool) -> np.ndarray:
        self.fail()
        return super().read_pages(*arguments, **windows)

    def write_states(self, *arguments: Any) -> None:
        self.fail()
        super().write_states(*arguments)

    def read_states(self, *arguments: Any) -> np.ndarray:
        self.fail()
        return super().read_states(*arguments)


class EngineRun:
    """One engine, some dozens of operations."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        self.rng, self.folder = rng, folder
        size, self.window = int(rng.choice([1, 2, 3, 5])), int(rng.choice([-1, -1, -1, 0, 4]))
        rate = float(rng.choice([0, 0, 0.02, 0.2]))
        states = int(rng.choice([0, rng.integers(2, 20)])) if self.window < 0 else 0
        reach, apart = self.window, 0
        if reach >= 0 and rng.random() < 0.6:  # beside layers without a window, in pages of their own
            self.window, apart = -1, least_window_pages(reach, size) + int(rng.integers(0, 30))
        pages = -(-int(rng.integers(40, 120)) // size)
        self.model = Failing(rng, rate, pages, size, 64, reach, states, apart)
        self.draft = Failing(rng, rate, int(rng.integers(10, 60)), size, 64, drafts=True)
        self.fails_decoding = rng.random() < 0.2
        coder = Letters(self.model.fail if self.fails_decoding else lambda: None)
        self.max_running = int(rng.integers(1, 9))
        shares = bool(rng.random() < 0.8)
        on_disk = DiskTier(folder / "pages", int(rng.choice([20_000, 1 << 20])))
        self.engine = Engine(
            self.model,
            coder,
            max_step_tokens=int(rng.integers(1, 40)),
            max_running=self.max_running,
            share_prefixes=shares,
            disk=on_disk if shares and rng.random() < 0.5 else None,
            speculate=[None, "lookup", self.draft][rng.integers(3)],
        )
        guess_often(self.engine)
        self.ledger = Ledger(self.engine)
        self.streams: dict[int, OutputStream] = {}
        self.prefixes = [rng.integers(0, VOCAB, 20).tolist() for _ in range(2)]

    def run(self) -> None:
        rows: list[int] = []
        step = self.model.step
        self.model.step = lambda tokens, *rest, **states: (  # type: ignore
            rows.append(len(tokens)) or step(tokens, *rest, **states)
        )
        acts = [self.ask] * 3 + [self.step] * 6 + [self.interrupt]
        acts += [self.stream, self.read, self.abort, self.bad]
        for _ in range(int(self.rng.integers(5, 30))):
            acts[self.rng.integers(len(acts))]()
            self.engine.pool.check_integrity()
            if self.engine.window_pool is not None:
                self.engine.window_pool.check_integrity()
        self.model.rate = self.draft.rate = 0
        while self.streams:
            self.read()
        self.ledger.finish()
        self.ledger.check(self.window, 10**9 if self.fails_decoding else 0)
        if self.engine._speculation._draft is not None:
            self.engine._speculation._draft._pool.check_integrity()
        assert max(rows, default=0) <= self.max_running, "more rows than max_running"

    def attempt(self, call: Any) -> Any:
        """Return what a call returns; None where the model failed or it was refused."""
        try:
            return call()
        except PagedKVError as error:
            check(str(error) and "\n" not in str(error) and len(str(error)) < 1000, "a message of one line")
        except (MemoryError, ValueError, KeyError) as error:
            if "on purpose" not in str(error):
                raise
        return None

    def request(self) -> Asked:
        rng = self.rng
        prompt = (
            self.prefixes[rng.integers(2)][: rng.integers(1, 21)] + rng.integers(0, VOCAB, rng.integers(0, 6)).tolist()
        )
        structure = STRUCTURES[rng.integers(len(STRUCTURES))] if rng.random() < 0.4 else None
        # A stop token would break a structure.
        stops = () if structure else tuple(rng.integers(0, VOCAB, rng.integers(0, 3)).tolist())
        sampling = Sampling(
            int(rng.integers(1, 14)),
            float(rng.choice([0, 1])),
            seed=int(rng.integers(9)),
            stop_tokens=stops,
            structured_output=structure,
        )
        return Asked(prompt, sampling, int(rng.integers(1, min(self.max_running, 5) + 1)))

    def ask(self) -> None:
        asked = self.request()
        space = [None, "tenant", 3][self.rng.integers(3)]
        self.attempt(lambda: self.ledger.add(asked.prompt, asked.sampling, asked.n, space))

    def stream(self) -> None:
        asked = self.request()
        stream = self.attempt(lambda: self.engine.stream(asked.prompt, asked.sampling, asked.n))
        if stream is not None:
            number = stream._request.number
            self.ledger.asked[number] = asked
            self.streams[number] = stream
            if self.rng.random() < 0.3:
                self.leave(number)

    def leave(self, number: int) -> None:
        self.ledger.aborted.add(number)
        stream = self.streams.pop(number)
        if self.rng.random() < 0.5:
            stream.close()

    def read(self) -> None:
        if not self.streams:
            return
        number = int(self.rng.choice(list(self.streams)))
        if self.rng.random() < 0.1:
            self.leave(number)
            return
        output = self.attempt(lambda: next(self.streams[number], "end"))
        if output == "end":
            del self.streams[number]
        elif output is not None:
            self.ledger.outputs.append(output)

    def step(self) -> None:
        self.ledger.outputs += self.attempt(self.engine.step) or []

    def interrupt(self) -> None:
        def act() -> None:
            for _ in range(3):
                self.ledger.outputs += self.engine.step()

        self.attempt(lambda: interrupted(act, int(self.rng.integers(1, 6000))))

    def abort(self) -> None:
        if self.ledger.asked:
            number = int(self.rng.choice(list(self.ledger.asked)))
            if number not in self.streams:
                known = not self.engine.has_ended(number)
                self.attempt(lambda: self.engine.abort(number))
                if known:
                    self.ledger.aborted.add(number)

    def bad(self) -> None:
        """One argument that is none; what is accepted all the same is aborted."""
        things = objects()
        thing = things[self.rng.integers(len(things))]()
        options = ("max_tokens", "temperature", "top_p", "seed", "stop", "stop_tokens", "ignore_end")
        name = options[self.rng.integers(len(options))]
        calls = [
            lambda: Sampling(**{name: thing}),
            lambda: self.engine.add_request(thing, Sampling(1)),
            lambda: self.engine.add_request([1], Sampling(1), thing),
            lambda: self.engine.add_request([1], thing),
            lambda: self.engine.add_request([1], Sampling(1), namespace=thing),
            lambda: self.engine.abort(thing),
            lambda: Engine(self.model, max_running=thing, max_step_tokens=thing),
        ]
        at = int(self.rng.integers(len(calls)))
        before = set(self.engine._unfinished)
        self.attempt(calls[at])
        after = set(self.engine._unfinished)
        self.ledger.aborted |= before - after  # a number of NumPy is one
        for number in after - before:
            self.engine.abort(number)
