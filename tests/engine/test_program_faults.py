"""Faults around a step that is a program: refusals, signals, threads, forks, models whose last reference is dropped."""

import gc
import os
import random
import shutil
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paged_kv.cli import _run
from paged_kv.engine import Sampling, load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.errors import ContractError
from paged_kv.runtime.program import Program
from support.program_faults import between_kernels, refusing

ASKED = (
    ("In the beginning God", Sampling(24), 1),
    ("In the beginning was the Word", Sampling(16, 0.8, seed=1), 2),
    ("And it came to pass", Sampling(20, 1.0, seed=2, logprobs=1), 1),
)
"""Prompts that share a page, their sampling and their samples."""
STEP_US = 200_000
"""The microseconds of a step that another thread is to meet."""


def new_engine():
    return load(FOLDER, num_pages=40, page_size=5, dtype="float32", max_step_tokens=16)


@pytest.fixture(scope="module")
def engine():
    return new_engine()


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    yield
    assert engine.is_idle
    engine.pool.check_integrity()
    assert engine.pool.num_used == 0


def add(engine, asked=ASKED):
    """By each request's number its place in `ASKED`."""
    return {engine.add_request(*each): ASKED.index(each) for each in asked}


def finished(engine, numbers, outputs=()):
    """The texts of all samples, by their request's place in `ASKED`; from outputs that came before too."""
    texts, outputs = {}, list(outputs)
    while not engine.is_idle:
        outputs += engine.step()
    for output in outputs:
        assert output.error is None
        at = numbers[output.request], output.sample
        texts[at] = texts.get(at, "") + output.text
    return texts


def wait_until_inside(program, stepping):
    """Waits until another thread is inside a step of a program."""
    while not program._lock.locked() and not stepping.done():
        time.sleep(0.001)


@pytest.fixture(scope="module")
def alone(engine):
    """The texts of requests that run one after the other."""
    texts = {}
    for each in ASKED:
        texts |= finished(engine, add(engine, [each]))
    return texts


def test_after_a_kernel_that_refuses_all_go_on(engine, alone):
    numbers, outputs = add(engine), []
    for steps in (0, 1, 4):
        for _ in range(steps):
            outputs += engine.step()
        with refusing(engine.model._program):
            for _ in range(2):
                with pytest.raises(ContractError, match=r"^paged_kv_gate_units: activation: 77"):
                    engine.step()
    assert finished(engine, numbers, outputs) == alone


def test_an_interrupt_between_kernels_comes_when_the_step_has_ended(engine, alone):
    numbers = add(engine)
    outputs = engine.step() + engine.step()
    with between_kernels(engine.model._program, "raise", signal.SIGINT), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert finished(engine, numbers, outputs) == alone


def test_interrupts_at_any_time_change_no_text(engine, alone):
    """By the system's timer, which meets kernels, waits for other threads, and Python between."""
    dice, numbers, outputs, met = random.Random(1), add(engine), [], 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-4, 4e-3))
                while not engine.is_idle:
                    outputs += engine.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                met += 1
            numbers |= add(engine) if engine.is_idle else {}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert met > 20
    outputs = [output for output in outputs if output.request in sorted(numbers)[-len(ASKED) :]]
    assert finished(engine, numbers, outputs) == alone


def test_the_command_ends_when_it_is_interrupted_inside_a_step(monkeypatch, capsys):
    run = Program.run

    def interrupted(program, *arguments):
        with between_kernels(program, "raise", signal.SIGINT):
            return run(program, *arguments)

    monkeypatch.setattr(Program, "run", interrupted)
    assert _run(["generate", "--model", str(FOLDER), "--prompt", "In the", "--max-new-tokens", "5"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_two_engines_in_two_threads(engine, alone):
    with ThreadPoolExecutor(2) as pool:

        def texts(each):
            return [finished(each, add(each)) for _ in range(6)]

        for got in pool.map(texts, (engine, new_engine())):
            assert got == [alone] * 6


def test_a_child_that_is_forked_inside_a_step_computes(engine, alone):
    """All of its requests, from the tokens that they have; its parent goes on."""
    numbers, program = add(engine), engine.model._program
    outputs = engine.step()
    with ThreadPoolExecutor(1) as pool:
        with between_kernels(program, "usleep", STEP_US):
            stepping = pool.submit(engine.step)
            wait_until_inside(program, stepping)
            child = os.fork()
            if child:
                outputs += stepping.result(60)
        if not child:
            signal.alarm(60)  # a lock that stays locked would wait for ever
            os._exit(finished(engine, numbers, outputs) != alone)
    assert os.waitpid(child, 0)[1] == 0
    finished(engine, numbers)


@pytest.mark.slow
def test_a_model_whose_last_reference_is_dropped_ends_its_step(engine, tmp_path):
    """Its files are gone too."""
    made = load(shutil.copytree(FOLDER, tmp_path / "model"), num_pages=8, page_size=5, dtype="float32").model
    program, gone = weakref.proxy(made._program), weakref.ref(made)
    step = [[1, 2, 3], [4]], [0, 0], [[0], [1]]
    with ThreadPoolExecutor(1) as pool, between_kernels(made._program, "usleep", STEP_US):
        stepping = pool.submit(made.step, *step)
        wait_until_inside(program, stepping)
        del made
        shutil.rmtree(tmp_path / "model")
        gc.collect()
        logits = stepping.result(60)
    np.testing.assert_array_equal(logits, engine.model.step(*step))
    gc.collect()
    assert gone() is None
