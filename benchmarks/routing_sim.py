"""Simulates replicas behind a router, without Ray: time to first token, hit rate and balance of three ways to route.

`python -m benchmarks.routing_sim` prints the table of docs/scaling.md. Replicas have the pool's real prefix cache and
routers the package's own `Prefixes`; the time of a step is a formula. All else is drawn from a seed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from paged_kv.errors import PoolExhausted
from paged_kv.pool import PagePool, PrefixCache
from paged_kv.ray.prefixes import Prefixes, blocks_of

PAGE_SIZE = 16
ROUTERS = ("round_robin", "least_loaded", "prefix")


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: of itself, of each prompt token, of each row that decodes.

    Those of a model of 1.1 G parameters in bfloat16 on 2 cores of a Zen 5 (docs/performance.md): 58 ms for a row, 66 ms
    for 8, 336 tokens a second of a prompt.
    """

    step: float = 0.057
    prompt_token: float = 0.0028
    row: float = 0.0012
    max_step_tokens: int = 512
    max_running: int = 64


@dataclass(eq=False)
class Request:
    """A prompt and how many tokens come after it."""

    prompt: list[int]
    output: int
    on_end: Callable[[float], None] = lambda _: None
    arrived: float = 0.0
    to_compute: int = 0
    left: int = 0


@dataclass
class Result:
    """The result of a simulation."""

    first_token: list[float] = field(default_factory=list)
    """Seconds until each request's first token."""
    found: int = 0
    prompt_tokens: int = 0
    busy: list[float] = field(default_factory=list)
    """Seconds that each replica computed."""

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was in the cache."""
        return self.found / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """The busiest replica's time over the mean."""
        return max(self.busy) / (sum(self.busy) / len(self.busy))

    def quantile(self, share: float) -> float:
        """Return a quantile of the times to the first token."""
        return float(np.quantile(self.first_token, share))


class Replica:
    """An engine that batches continuously, with a pool of pages and its prefix cache."""

    def __init__(self, pages: int, costs: Costs) -> None:
        self.pool = PagePool(pages, PAGE_SIZE)
        self.known = PrefixCache(self.pool)
        self.costs = costs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.chunks: list[tuple[Request, int]] = []
        self.busy = 0.0

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.running)

    def step(self, result: Result) -> float | None:
        """Begins a step; the seconds that it takes, None where there is nothing to do."""
        costs = self.costs
        while self.waiting and len(self.running) < costs.max_running:
            request = self.waiting[0]
            try:
                found = self.known.start(id(request), request.prompt)
            except PoolExhausted:
                if not self.running:
                    raise
                break
            self.waiting.popleft()
            self.running.append(request)
            request.to_compute = len(request.prompt) - found
            result.found += found
            result.prompt_tokens += len(request.prompt)
        rows = sum(not request.to_compute for request in self.running)
        budget = costs.max_step_tokens - rows
        self.chunks = []
        for request in self.running:
            if request.to_compute and budget > 0:
                self.chunks.append((request, min(budget, request.to_compute)))
                budget -= self.chunks[-1][1]
        if not self.running:
            return None
        taken = costs.step + costs.row * rows + costs.prompt_token * sum(tokens for _, tokens in self.chunks)
        self.busy += taken
        return taken

    def end_step(self, now: float, result: Result) -> None:
        """Record what a step gave."""
        decoding = [request for request in self.running if not request.to_compute]
        for request, tokens in self.chunks:
            request.to_compute -= tokens
            if not request.to_compute:
                self.known.store(id(request), request.prompt)
                result.first_token.append(now - request.arrived)
                request.left = request.output
                decoding.append(request)
        for request in decoding:
            request.left -= 1
            if request.left <= 0:
                self.pool.free(id(request))
                self.running.remove(request)
                request.on_end(now)


class Fleet:
    """Replicas and their router, in simulated time."""

    def __init__(self, router: str, replicas: int, pages: int, costs: Costs, slack: int = 4) -> None:
        self._router, self._turn = router, count()
        self.replicas = [Replica(pages, costs) for _ in range(replicas)]
        self._names = {str(number): number for number in range(replicas)}
        self._prefixes = Prefixes(pages, slack)
        for name in self._names:
            self._prefixes.join(name)
        self._events: list[tuple[float, int, int, Request | None]] = []
        self._order = count()
        self._stepping = [False] * replicas
        self.result = Result()

    def arrive(self, time: float, request: Request) -> None:
        """A request comes at a time."""
        heapq.heappush(self._events, (time, next(self._order), -1, request))

    def run(self) -> Result:
        """Until all has ended."""
        while self._events:
            now, _, number, request = heapq.heappop(self._events)
            if request is not None:
                request.arrived = now
                number = self._route(request)
                self.replicas[number].waiting.append(request)
                if self._stepping[number]:
                    continue
            else:
                self.replicas[number].end_step(now, self.result)
            taken = self.replicas[number].step(self.result)
            self._stepping[number] = taken is not None
            if taken is not None:
                heapq.heappush(self._events, (now + taken, next(self._order), number, None))
        self.result.busy = [replica.busy for replica in self.replicas]
        return self.result

    def _route(self, request: Request) -> int:
        if self._router == "round_robin":
            return next(self._turn) % len(self.replicas)
        loads = {name: self.replicas[number].load for name, number in self._names.items()}
        if self._router == "least_loaded":
            turn = next(self._turn)
            size = len(self.replicas)
            return min(self._names.values(), key=lambda number: (loads[str(number)], (number - turn) % size))
        blocks = blocks_of(request.prompt, PAGE_SIZE)
        name = self._prefixes.rank(blocks, loads)[0]
        self._prefixes.insert(name, blocks)
        return self._names[name]


@dataclass(frozen=True)
class Conversations:
    """Conversations that take turns in rounds: each prompt is a shared beginning and all that was said."""

    conversations: int
    turns: int
    seed: int
    vocabulary: int = 200

    def rounds(self) -> list[list[list[int]]]:
        """The prompts of each round, in the order in which they are asked."""
        rng = np.random.default_rng(self.seed)
        starts = [self._words(rng, 120) for _ in range(3)]
        said = [list(starts[int(rng.choice(3, p=[0.6, 0.3, 0.1]))]) for _ in range(self.conversations)]
        rounds = []
        for _ in range(self.turns):
            for words in said:
                words += self._words(rng, int(rng.integers(30, 80)))
            rounds.append([list(said[number]) for number in rng.permutation(self.conversations)])
        return rounds

    def _words(self, rng: np.random.Generator, length: int) -> list[int]:
        return [int(word) for word in rng.integers(10, self.vocabulary, length)]


def simulate(load: Conversations, router: str, *, replicas: int, pages: int, at_once: int, slack: int = 4) -> Result:
    """Rounds of conversations, so many requests at once, one token each."""
    fleet = Fleet(router, replicas, pages, Costs(), slack)
    for prompts in load.rounds():
        left = iter(prompts)

        def next_one(now: float, left: Iterator[list[int]] = left) -> None:
            prompt = next(left, None)
            if prompt is not None:
                fleet.arrive(now, Request(prompt, 1, next_one))

        for _ in range(at_once):
            next_one(0.0)
        fleet.run()
    return fleet.result


def sessions(fleet: Fleet, number: int, per_second: float, seed: int) -> None:
    """Conversations as a public service has them, into a fleet.

    They come at random; each begins with one of 64 system prompts (200 to 1,500 tokens, the k-th with weight 1 / k),
    has 1 to 8 turns with 20 to 300 new tokens, gets 20 to 150, and thinks 5 s between turns on the average.
    """
    rng = np.random.default_rng(seed)

    def words(low: int, high: int) -> list[int]:
        return [int(word) for word in rng.integers(0, 30000, int(rng.integers(low, high)))]

    starts = [words(200, 1500) for _ in range(64)]
    weights = 1 / np.arange(1, 65)
    now = 0.0
    for _ in range(number):
        now += rng.exponential(1 / per_second)
        said = list(starts[int(rng.choice(64, p=weights / weights.sum()))])
        turns = [(words(20, 300), words(20, 150), float(rng.exponential(5))) for _ in range(int(rng.integers(1, 9)))]
        _begin(fleet, now, said, deque(turns))


def _begin(fleet: Fleet, now: float, said: list[int], turns: deque[tuple[list[int], list[int], float]]) -> None:
    asked, answer, pause = turns.popleft()
    said += asked

    def on_end(end: float) -> None:
        said.extend(answer)
        if turns:
            _begin(fleet, end + pause, said, turns)

    fleet.arrive(now, Request(list(said), len(answer), on_end))


def table(sizes: Sequence[int] = (1, 16, 256), seed: int = 0) -> Iterator[str]:
    """Lines of a Markdown table: the same load a replica for every size."""
    yield "| replicas | router | hit rate | first token, median | 99 % | busiest over mean |"
    yield "|---|---|---|---|---|---|"
    for size in sizes:
        for router in ROUTERS:
            fleet = Fleet(router, size, pages=1500, costs=Costs())
            sessions(fleet, 24 * size, 0.06 * size, seed)
            found = fleet.run()
            yield (
                f"| {size} | {router.replace('_', '-')} | {found.hit_rate:.0%} | {found.quantile(0.5):.2f} s"
                f" | {found.quantile(0.99):.1f} s | {found.imbalance:.2f} |"
            )


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
