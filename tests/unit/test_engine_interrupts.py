"""An exception from outside, of the model or of a decoder, at any place of a step: what requests get, what is left."""

import gc
import threading
from itertools import count
from typing import Any

import pytest

from paged_kv.engine import DiskTier, Regex
from paged_kv.engine.engine import Engine
from paged_kv.engine.outputs import OutputStream
from paged_kv.engine.requests import Outbox, Place, Sampling
from support.engine_runs import Asked, Ledger, Letters, guess_often
from support.fake_model import FakeDraft, FakeModel, alone
from support.interrupts import interrupted_anywhere

DRAWN = Sampling(5, 1.0, seed=3)


def crowded(**options: Any) -> Ledger:
    """Samples that fork, share a prefix, are preempted and are aborted, in few steps."""
    ledger = Ledger(Engine(FakeModel(9, 3), Letters(), max_step_tokens=9, max_running=6, **options))
    if options.get("speculate"):
        guess_often(ledger.engine)
    ledger.add([1, 2, 3, 4], DRAWN, 3)
    ledger.add([1, 2, 3, 5, 6], DRAWN, 2)
    ledger.aborted.add(ledger.add([7] * 6, Sampling(20)))
    return ledger


def play(ledger: Ledger) -> None:
    """All of it; may be called again where it was interrupted."""
    engine = ledger.engine
    while engine.statistics.steps < 4 and not engine.is_idle:
        ledger.outputs += engine.step()
    if 2 in engine._unfinished:
        engine.abort(2)
    ledger.finish()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "structures", "drafts", "disk"])
def test_an_interrupt_anywhere_loses_nothing_and_changes_nothing(kind, tmp_path):
    if kind == "structures":
        pytest.importorskip("llguidance")

    def make() -> Ledger:
        ledger = crowded(
            speculate=FakeDraft(80, 3) if kind == "drafts" else None,
            disk=DiskTier(tmp_path, 1 << 20) if kind == "disk" else None,
        )
        if kind == "structures":
            ledger.add([1, 2, 3], Sampling(9, 1.0, seed=4, structured_output=Regex("(ab|c[d-k])*[x-z]?w")), 2)
        return ledger

    whole, restored = make(), 0
    play(whole)
    assert whole.check() == 0
    assert whole.engine.preemptions > 0
    for ledger, _ in interrupted_anywhere(make, play, 100, seed=len(kind)):
        play(ledger)
        assert ledger.check() == 0
        ledger.engine.flush()
        restored += ledger.engine.tokens_restored
        if kind == "drafts":
            ledger.engine._speculation._draft._pool.check_integrity()
        assert kind != "disk" or not ledger.engine._disk.off
    assert (restored > 20) == (kind == "disk")


@pytest.mark.slow
def test_a_stream_that_was_interrupted_goes_on():
    def make() -> tuple[Ledger, OutputStream]:
        ledger = Ledger(Engine(FakeModel(20, 3), Letters()), {0: Asked([1, 2], DRAWN, 2)})
        return ledger, ledger.engine.stream([1, 2], DRAWN, 2)

    def read(made: tuple[Ledger, OutputStream]) -> None:
        ledger, stream = made
        for output in stream:
            ledger.outputs += [output]

    for made, _ in interrupted_anywhere(make, read, 100):
        read(made)
        made[0].finish()
        assert made[0].check() == 0


@pytest.mark.parametrize("name", ["step", "copy_page"])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_the_model_raises_is_raised_and_nothing_is_lost(monkeypatch, name, failing):
    work, calls = getattr(FakeModel, name), count()

    def fails(*arguments):
        if next(calls) == failing:
            raise MemoryError("no memory")
        return work(*arguments)

    monkeypatch.setattr(FakeModel, name, fails)
    ledger = crowded()
    with pytest.raises(MemoryError, match="no memory"):
        play(ledger)
    play(ledger)
    assert ledger.check() == 0


def test_a_decoder_that_raises_ends_its_sample_alone():
    calls = [0]

    def fails():
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise ZeroDivisionError("by a decoder")

    ledger = crowded()
    ledger.engine._tokenizer = Letters(fails)
    play(ledger)
    assert ledger.check(most_errors=5) > 1
    errors = {output.error for output in ledger.outputs if output.finish == "error"}
    assert errors == {"ZeroDivisionError('by a decoder')"}


def test_a_decoder_may_not_call_the_engine():
    ledger = crowded()
    ledger.engine._tokenizer = Letters(lambda: ledger.engine.step())
    play(ledger)
    assert ledger.check(most_errors=6) == 6
    assert "inside a step" in str(ledger.outputs[0].error)


def test_a_namespace_that_turns_hostile_later_harms_nobody():
    class Hostile:
        calm = True

        def __hash__(self):
            return 1 if self.calm else 1 // 0

    hostile = Hostile()
    ledger = Ledger(Engine(FakeModel(20, 3)))
    ledger.add([1, 2, 3, 4], DRAWN, namespace=hostile)
    ledger.add([1, 2, 3, 4], DRAWN)
    Hostile.calm = False
    ledger.finish()
    assert ledger.check() == 0
    Hostile.calm = True  # for the weak reference to it


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["close", "drop", "drop in a thread"])
@pytest.mark.parametrize("taken", [0, 1])
def test_a_stream_that_nobody_reads_is_aborted(leave, taken):
    engine = Engine(FakeModel(40, 4))
    stream = engine.stream([1, 2, 3], Sampling(50), 3)
    for _ in range(taken):
        next(stream)
    if leave == "close":
        stream.close()
        assert list(stream) == []
    elif leave == "drop":
        del stream
    else:
        thread = threading.Thread(target=lambda held: held.clear(), args=([stream],))
        del stream
        thread.start()
        thread.join(60)
        del thread
    gc.collect()
    engine.step()
    assert engine.is_idle
    assert engine.pool.num_used == 0
    assert engine.statistics.decode_tokens == 0


def test_outputs_go_to_the_stream_of_their_request_or_to_step():
    engine = Engine(FakeModel(40, 4))
    number = engine.add_request([4, 5], Sampling(6))
    streamed = [output.tokens[0] for output in engine.stream([1, 2], Sampling(9))]
    assert streamed == alone([1, 2], Sampling(9))
    outputs = engine.step()
    assert [output.tokens[0] for output in outputs] == alone([4, 5], Sampling(6))
    assert {output.request for output in outputs} == {number}
    assert engine.is_idle


def test_a_long_queue_that_is_dropped_unread_does_not_recurse():
    outbox = Outbox()
    for _ in range(200_000):
        outbox.last.next = outbox.last = Place()
    assert outbox.last is not outbox.read
