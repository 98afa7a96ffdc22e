"""A step as a program of the CPU's libraries: MAX's logits to the bit, refusals, threads, and an arena of NaN."""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.call_layouts import CALLS, WORKERS, Layout
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.model import DecoderModel
from paged_kv.engine.step import StepGraph
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime import libraries
from paged_kv.runtime import program as programs
from paged_kv.runtime.graph_reading import UnknownGraph
from paged_kv.runtime.libraries import Kernel, text_at
from paged_kv.runtime.libraries import load as load_libraries
from support.llama_family import poison

STEPS = (
    ([[1, 2, 3, 4, 5, 6, 7], [8], [9, 10]], [0, 0, 0]),
    ([[11], [12], [13, 14, 15]], [7, 1, 2]),
    ([[16], [17, 18], [19]], [8, 2, 5]),
)
"""Tokens and lengths before them of three requests."""
PAGES = [[3, 5, 1], [2, 7, 0], [6, 4, 8]]


def load(**options):
    return DecoderModel.from_folder(FOLDER, dtype=DType.float32, num_pages=9, page_size=5, **options)


@pytest.fixture(scope="module")
def model():
    made = load()
    assert made._program is not None
    return made


def logits(model):
    """The logits of all steps, the cache poisoned before."""
    poison(model)
    return [model.step(tokens, lengths, PAGES).copy() for tokens, lengths in STEPS]


def poison_arena(monkeypatch, program):
    """Before each run every byte of the arena is 0xff: all floats in it are NaN."""
    lay = program._slots_in_arena

    def poisoned(sizes):
        slots = lay(sizes)
        program._arena[:] = 0xFF
        return slots

    monkeypatch.setattr(program, "_slots_in_arena", poisoned)


@pytest.fixture(scope="module")
def expected(model):
    return logits(model)


def test_nothing_is_read_before_it_is_written(model, expected, monkeypatch):
    poison_arena(monkeypatch, model._program)
    got = logits(model)
    assert all(np.isfinite(each).all() for each in got)
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(expected))


def test_a_slot_that_is_freed_too_early_is_seen(expected, monkeypatch):
    class Early(programs.Slot):
        """Free to the call that still reads it, where it holds more than a number of each row: those lead to memory."""

        def __setattr__(self, name, value):
            early = name == "free_after" and self.size.coefficient > 4
            super().__setattr__(name, value - 1 if early else value)

    monkeypatch.setattr(programs, "Slot", Early)
    got = logits(load())
    assert not np.array_equal(np.concatenate(got), np.concatenate(expected))


def test_a_refusal_names_its_operation_and_the_next_step_works(model, expected):
    with pytest.raises(ContractError, match=r"^paged_kv_append: .*99"):
        model.step([[1] * 12, [8], [9]], [0, 0, 0], [[3, 5, 99], *PAGES[1:]])
    np.testing.assert_array_equal(np.concatenate(logits(model)), np.concatenate(expected))


@pytest.mark.parametrize("kind", ["unary", "binary", "gate_units", "convert"])
def test_a_number_that_is_no_function_is_refused(kind):
    kernel = Kernel(kind, ("float32",))
    load_libraries([kernel])
    call = getattr(ctypes.CDLL(None), kernel.name)
    call.argtypes, call.restype = [ctypes.c_void_p], ctypes.c_void_p
    numbers = np.full(16, 77, np.int64)  # none of them is read as an address
    assert re.match(r"function: 77|activation: 77|a conversion of 77", text_at(call(numbers.ctypes.data)))


def test_a_kernel_of_other_operands_than_python_has_is_refused(monkeypatch):
    monkeypatch.setattr(libraries, "_FUNCTIONS", {})
    monkeypatch.setitem(CALLS, "unary", Layout("y x function count workers", workers=WORKERS))
    with pytest.raises(ToolchainError, match=r"unary: .* takes \(y x function .*, got \(y x count function workers\("):
        load_libraries([Kernel("unary", ("float32",))])


def test_two_models_in_two_threads(model, expected):
    """One of them is loaded in such a thread: MAX has what it builds graphs in for the main one alone."""
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(load).result(timeout=300)
        for got in pool.map(lambda each: [logits(each) for _ in range(20)], (model, other)):
            for each in got:
                np.testing.assert_array_equal(np.concatenate(each), np.concatenate(expected))


def test_one_model_in_two_threads(model):
    """They take turns: a step that only reads its own request's pages gets its own logits."""
    requests = [([[1, 2, 3]], [0], [[0]]), ([[4, 5, 6, 7]], [0], [[1]])]
    alone = [model.step(*request).copy() for request in requests]
    with ThreadPoolExecutor(2) as pool:
        for request, got in enumerate(pool.map(lambda each: [model.step(*each) for _ in range(50)], requests)):
            assert all(np.array_equal(each, alone[request]) for each in got)


@pytest.mark.slow
def test_the_logits_are_those_of_max(model, monkeypatch):
    """MAX compiles a step that no program knows. The caches are the same too."""

    def unknown(*_):
        raise UnknownGraph("the operation MatmulOp")

    monkeypatch.setattr(StepGraph, "program", unknown)
    of_max = load()
    assert of_max._program is None
    np.testing.assert_array_equal(np.concatenate(logits(of_max)), np.concatenate(logits(model)))
    np.testing.assert_array_equal(of_max.blocks, model.blocks)
