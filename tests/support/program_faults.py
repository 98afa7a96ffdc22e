"""Faults in the middle of a program's step: a kernel that refuses, and what C does between two."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from paged_kv.runtime.program import Program
from paged_kv.runtime.program_ops import ACTIVATIONS


def _middle(program: Program, operation: str) -> int:
    """The number of a call of an operation, in the middle of the step."""
    calls = [call for call, op in enumerate(program.of_call) if program.operations[op].name == operation]
    return calls[len(calls) // 2]


@contextmanager
def between_kernels(program: Program, name: str, operand: int) -> Iterator[None]:
    """A function of C, of one number, runs in the middle of each step."""
    call = _middle(program, "paged_kv_add_scaled")
    function = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    calls = np.insert(program._functions, call, function), np.insert(program._operands, call, operand)
    packed = program._call
    program._call = np.array([*(each.ctypes.data for each in calls), len(calls[0]), *packed[3:]])
    try:
        yield
    finally:
        program._call = packed


@contextmanager
def refusing(program: Program) -> Iterator[None]:
    """A gate in the middle of each step is asked for a function that it has not."""
    call = _middle(program, "paged_kv_gate_units")
    start = (int(program._operands[call]) - program._words.ctypes.data) // 8
    activation = start + len(program.calls[call].words) - 1
    assert program._words[activation] in range(len(ACTIVATIONS))
    number, program._words[activation] = int(program._words[activation]), 77
    try:
        yield
    finally:
        program._words[activation] = number
