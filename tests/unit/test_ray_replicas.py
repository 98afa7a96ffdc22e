"""Replicas without Ray: streams whose replicas die, the backend that they are, and one of them."""

import asyncio
import threading
import time
from dataclasses import dataclass, replace

import pytest

from paged_kv.engine import Engine, Sampling
from paged_kv.errors import ContractError
from paged_kv.ray.backend import Replicas, Ways
from paged_kv.ray.replica import Model, Replica
from paged_kv.ray.streams import BEGAN, FAILED, REFUSED, Clock, Diverged, Lost, Stalled, Suspects, resumed
from paged_kv.serve.backend import Busy, Gone, Job, Piece
from support.fake_model import FakeModel, alone


class Died(Exception):
    pass


class Full(Exception):
    pass


class Down(Exception):
    pass


JOB = Job((1, 2, 3), Sampling(6, seed=1), 2)


def pieces_of(job: Job) -> list[Piece]:
    """Yield tokens of all samples in turns, each token another letter."""
    count = job.sampling.max_tokens
    letter = lambda sample, at: chr(97 + (sum(job.tokens) + 7 * sample + at) % 26)  # noqa: E731
    return [
        Piece(sample, (at,), letter(sample, at), "length" if at == count - 1 else None, None)
        for at in range(count)
        for sample in range(job.n)
    ]


class Fleet:
    """Replicas by what happens to them: each start takes the next one, an exception after so many pieces."""

    def __init__(self, *ends: tuple[int, BaseException] | None) -> None:
        self.ends, self.started, self.closed = list(ends), 0, 0

    async def start(self, job: Job):
        end = self.ends[self.started] if self.started < len(self.ends) else None
        self.started += 1
        try:
            pieces = pieces_of(job)
            for at, piece in enumerate(pieces if self.started % 2 else pieces[:1]):
                if end is not None and at == end[0]:
                    raise end[1]
                yield [piece]
            if self.started % 2 == 0:  # another rhythm: several at once
                if end is not None:
                    yield pieces[1 : end[0]]
                    raise end[1]
                yield pieces[1:]
        finally:
            self.closed += 1


async def one(fleet: Fleet, retries=2, clock=None, job=JOB, suspects=None) -> list[Piece]:
    stream = resumed(
        lambda avoid: fleet.start(replace(job, avoid=avoid)),
        job.n,
        lost=(Died,),
        full=(Full,),
        retries=retries,
        clock=clock or Clock(5.0),
        suspects=suspects or Suspects(),
    )
    return [piece async for batch in stream for piece in batch]


class Instant(asyncio.SelectorEventLoop):
    """Waits take no time: its clock is set to what comes next."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()
        select = self._selector.select
        self._selector.select = lambda timeout=None: self.pass_by(timeout or 0) or select(0)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


def instantly(work):
    with asyncio.Runner(loop_factory=Instant) as runner:
        return runner.run(work)


def collected(fleet: Fleet, **options) -> list[Piece]:
    return instantly(one(fleet, **options))


@pytest.mark.parametrize("first", range(12))
@pytest.mark.parametrize("second", [1, 5, 11])
def test_a_stream_whose_replicas_die_gives_each_piece_once(first, second):
    fleet = Fleet((first, Died()), (second, Died()))
    assert collected(fleet) == pieces_of(JOB)
    assert (fleet.started, fleet.closed) == (3, 3)


def test_a_request_ends_no_more_replicas_than_it_may():
    fleet = Fleet(*[(0, Died())] * 9)
    with pytest.raises(Lost, match="3 replicas were lost"):
        collected(fleet)
    assert fleet.started == 3
    with pytest.raises(Lost, match="1 replicas"):
        collected(Fleet((4, Died())), retries=0)


def test_a_stream_that_ends_too_early_is_a_replica_lost():
    class Short(Fleet):
        async def start(self, job):
            self.started += 1
            for piece in pieces_of(job)[: 5 if self.started == 1 else None]:
                yield [piece]

    assert collected(Short()) == pieces_of(JOB)


def test_another_text_is_never_sent():
    class Liar(Fleet):
        async def start(self, job):
            self.started += 1
            for at, piece in enumerate(pieces_of(job)):
                if self.started == 1 and at == 5:
                    raise Died
                changed = piece._replace(tokens=(99,)) if at == 3 else piece._replace(cached_tokens=9, logprobs=())
                yield [changed if self.started == 2 else piece]

    with pytest.raises(Diverged, match="token 1 of sample 1"):
        collected(Liar())

    class Refusing(Fleet):
        async def start(self, job):
            self.started += 1
            yield [pieces_of(job)[0] if self.started == 1 else Piece(REFUSED, (), "", "error", "needs 9 pages")]

    with pytest.raises(Diverged, match="a request that had run was refused later: needs 9 pages"):
        collected(Refusing())


class Running(Fleet):
    """Replicas that run all their requests at once, and die of token 666 with all of them; another one comes then."""

    def __init__(self, replicas: int, dies_at: int) -> None:
        super().__init__()
        self.running, self.made, self.dies_at = {f"r{number}": 0 for number in range(replicas)}, replicas, dies_at

    async def start(self, job):
        name = min(self.running, key=lambda name: (name in job.avoid, self.running[name]))
        self.running[name] += 1
        try:
            yield [Piece(BEGAN, (), name, None, None)]
            for at, piece in enumerate(pieces_of(job)):
                await asyncio.sleep(0.01)
                if job.tokens == (666,) and at == self.dies_at and self.running.pop(name, None) is not None:
                    self.running[f"r{self.made}"] = 0
                    self.made += 1
                if name not in self.running:
                    raise Died
                yield [piece]
        finally:
            if name in self.running:
                self.running[name] -= 1


@pytest.mark.parametrize(("dies_at", "tokens", "poisons"), [(0, 6, 1), (5, 6, 1), (0, 200, 2), (5, 200, 2)])
def test_a_poisoned_request_takes_no_others_with_it_and_ends_no_more_replicas_than_it_may(dies_at, tokens, poisons):
    """Nor those that had their turn and still run on when it comes to its own."""
    fleet, suspects = Running(2, dies_at), Suspects()
    jobs = [
        replace(JOB, tokens=(number,), sampling=Sampling(tokens, seed=1))
        for number in (*range(20), *[666] * poisons, *range(20, 40))
    ]

    async def run():
        clock = Clock(1000)
        tasks = (one(fleet, job=job, suspects=suspects, clock=clock) for job in jobs)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for job, found in zip(jobs, instantly(run()), strict=True):
        if job.tokens == (666,):
            assert "3 replicas were lost" in str(found)
        else:
            assert found == pieces_of(job)
    assert fleet.made - 2 == 3 * poisons


def test_a_request_that_gets_further_each_time_ends_one_replica_more_and_no_others():
    class Later(Fleet):
        async def start(self, job):
            self.started += 1
            for piece in pieces_of(job)[: 100 * self.started]:
                yield [piece]
            raise Died

    fleet = Later()
    with pytest.raises(Lost, match="4 replicas were lost"):
        collected(fleet, job=replace(JOB, sampling=Sampling(1000, seed=1)))
    assert fleet.started == 4


def test_a_step_that_raises_is_tried_on_another_replica():
    class Failing(Fleet):
        async def start(self, job):
            self.ends.append(job.avoid)
            yield [Piece(BEGAN, (), f"r{len(self.ends)}", None, None)]
            failed = Piece(FAILED, (), "", "error", "a step raised ValueError")
            yield [*pieces_of(job)[: 2 * len(self.ends)], *([failed] if len(self.ends) < 3 else [])]
            yield pieces_of(job)[6:]

    fleet = Failing()
    assert collected(fleet) == pieces_of(JOB)
    assert fleet.ends == [set(), {"r1"}, {"r1", "r2"}]
    with pytest.raises(Lost, match=r"1 replicas were lost .* a step raised ValueError"):
        collected(Failing(), retries=0)


def test_a_request_that_was_taken_waits_where_the_queue_is_full():
    fleet = Fleet((3, Died()), (0, Full()), (0, Full()), None)
    assert collected(fleet) == pieces_of(JOB)
    with pytest.raises(Full):
        collected(Fleet((0, Full())))
    with pytest.raises(Stalled, match="the queue was full"):
        collected(Fleet((3, Died()), *[(0, Full())] * 99))


def test_a_queue_is_told_from_a_replica_that_hangs():
    """A request that waits in Ray's queue or in an engine's waits as long as these go on."""

    class Queue(Fleet):
        async def start(self, job):
            if job.tokens == (2,):  # no replica has room for it
                await asyncio.sleep(60)
            yield [Piece(BEGAN, (), "r", None, None)]
            if job.tokens == (3,):  # the step of this one hangs
                await asyncio.sleep(3600)
            for _ in range(12):
                await asyncio.sleep(5)
                yield []
            yield pieces_of(job)

    jobs = [replace(JOB, tokens=(number,)) for number in (1, 2, 3)]

    async def run():
        clock = Clock(10)
        first, second, third = (asyncio.create_task(one(Queue(), job=job, clock=clock)) for job in jobs)
        with pytest.raises(Stalled, match="nothing came for 10 s"):
            await third
        assert asyncio.get_running_loop().time() == pytest.approx(10)
        return [await first, await second]

    assert instantly(run()) == [pieces_of(job) for job in jobs[:2]]
    with pytest.raises(Stalled, match="nothing came"):
        instantly(one(Queue(), job=jobs[1], clock=Clock(10)))


def test_other_errors_go_through():
    with pytest.raises(ZeroDivisionError):
        collected(Fleet((3, ZeroDivisionError())))


# The server's backend on them.


def started(fleet, job=JOB) -> list[Piece]:
    async def run():
        backend = Replicas(Ways(fleet.start, None, None, (Died,), (Full,), (Down,)))
        try:
            async for batch in backend.start(job):
                assert (backend.status().running, backend.status().waiting) == (job.n, 0)
                pieces.extend(batch)
        finally:
            assert (backend.status().running, backend.status().waiting) == (0, 0)
            assert backend.status().prompt_tokens == (len(job.tokens) if pieces else 0)

    pieces: list[Piece] = []
    instantly(run())
    return pieces


def test_a_job_runs_on_replicas_that_die():
    assert started(Fleet((7, Died()))) == pieces_of(JOB)


@pytest.mark.parametrize(
    ("ends", "raised"),
    [
        ([(0, Full())], Busy),
        ([(0, Down())], Gone),
        ([(0, Died())] * 3, Lost),
        ([(3, Died())] * 3, Lost),
        ([(0, ZeroDivisionError())], ZeroDivisionError),
    ],
)
def test_ends_are_the_errors_of_a_backend(ends, raised):
    with pytest.raises(raised):
        started(Fleet(*ends))


def test_what_an_engine_refuses_is_wrong_with_the_job():
    class Refusing(Fleet):
        async def start(self, _):
            yield [Piece(REFUSED, (), "", "error", "needs 9 pages")]

    with pytest.raises(ContractError, match="needs 9 pages"):
        started(Refusing())


def test_replicas_are_well_where_one_is_and_their_pools_are_one():
    async def asked(running=(), pools=None):
        async def count():
            return len(running)

        async def told():
            if isinstance(pools, Exception):
                raise pools
            return pools

        backend = Replicas(Ways(Fleet().start, count, told, (Died,), (Full,), (Down,)))
        return await backend.check() if pools is None else await backend.pool()

    asyncio.run(asked(running=("a",)))
    for nothing in ({}, {"pools": {}}, {"pools": Down()}):
        with pytest.raises(Gone, match="No engine runs"):
            asyncio.run(asked(**nothing))
    with pytest.raises(Gone, match="does not say"):
        asyncio.run(asked(pools=TimeoutError()))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asked(pools=ZeroDivisionError()))
    said = {"pages": 2}
    assert asyncio.run(asked(pools={"a": said})) is said


# A replica, whose model needs no compiler.


class Held(FakeModel):
    """Its steps wait until they may go on; where token 22 is in one, it raises."""

    def __init__(self) -> None:
        super().__init__(40, 4)
        self.may_go = threading.Event()
        self.may_go.set()

    def step(self, tokens, *rest):
        assert self.may_go.wait(60)
        if any(22 in new for new in tokens):
            raise ValueError("22")
        return super().step(tokens, *rest)


@dataclass(frozen=True)
class Faked(Model):
    inner: FakeModel | None = None

    def engine(self):
        return Engine(self.inner, max_running=1)


def test_a_replica_says_what_became_of_a_request_and_whether_it_is_well():
    model = Held()
    replica = Replica(Faked("fake", inner=model), "here", 0.8)
    quick = Sampling(3, logit_bias={22: -100})

    async def ask(*tokens: int) -> list:
        return [piece async for batch in replica.generate(Job(tokens, quick)) for piece in batch or [None]]

    async def main() -> None:
        began, *pieces = await ask(1)
        assert began == Piece(BEGAN, (), "here", None, None)
        assert [piece.tokens for piece in pieces if piece] == [(token,) for token in alone([1], quick)]
        _, *_, failed = await ask(22)
        assert (failed.sample, failed.error) == (FAILED, "a step raised ValueError")
        assert (await ask())[-1].sample == REFUSED
        await replica.check_health()
        for _ in range(2):
            await ask(22)
        with pytest.raises(Gone, match="3 steps in a row raised"):
            await replica.check_health()
        await ask(1)
        await replica.check_health()
        model.may_go.clear()
        stuck = asyncio.create_task(ask(1))
        await replica.check_health()
        await asyncio.sleep(0.5)
        with pytest.raises(Gone, match="a step has not ended"):
            await replica.check_health()
        *going_on, last = await stuck
        assert last.error.startswith("a step has not ended")
        assert going_on.count(None) < 3  # nothing says that it goes on, but for its first moments
        model.may_go.set()

    asyncio.run(main())


def test_a_replica_that_is_busy_with_others_says_so():
    class Slow(FakeModel):
        def step(self, *rest):
            time.sleep(0.002)
            return super().step(*rest)

    replica = Replica(Faked("fake", inner=Slow(40, 4)), "here", 0.08)

    async def ask(first: int) -> list:
        return [batch async for batch in replica.generate(Job((first,), Sampling(100)))]

    async def main() -> list:
        return await asyncio.gather(*(ask(first) for first in range(2)))

    _, waiting = asyncio.run(main())
    assert waiting[:2] == [[Piece(BEGAN, (), "here", None, None)], []]
