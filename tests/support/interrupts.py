"""An exception from outside at chosen bytecodes, or at a sample of them: what Ctrl-C does.

CPython delivers signals and `PyThreadState_SetAsyncExc` between some bytecodes, not between all: after calls and
backward jumps, and not on the way into a `with` block. A trace function that raises ignores that rule, and leaves locks
held that no signal could leave held. Here it only schedules the exception, from C, and the interpreter raises it as
usual.
"""

import ctypes
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import paged_kv

_API = ctypes.pythonapi
_API.PyInterpreterState_Get.restype = _API._PyInterpreterState_GetEvalFrameFunc.restype = ctypes.c_void_p
PACKAGE = str(Path(paged_kv.__file__).parent)
Made = TypeVar("Made")


class _Request:
    """Reading `delivery` schedules a KeyboardInterrupt in a thread, at no bytecode where it could be raised at once."""

    _as_parameter_ = 0  # what ctypes makes of `self`, which a property passes to its getter

    def __init__(self, thread: int) -> None:
        ask = partial(
            ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
        )
        type(self).delivery = property(ask)  # type: ignore[attr-defined]


@contextmanager
def pythons_own_frames() -> Iterator[None]:
    """Frames are evaluated by CPython itself, as in a process without torch.compile.

    torch.compile's own evaluation, which stays in a process that has compiled something, lets an exception come right
    after every call, also between a result and the assignment of it.
    """
    interpreter = ctypes.c_void_p(_API.PyInterpreterState_Get())
    before = ctypes.c_void_p(_API._PyInterpreterState_GetEvalFrameFunc(interpreter))
    _API._PyInterpreterState_SetEvalFrameFunc(interpreter, _API._PyEval_EvalFrameDefault)
    try:
        yield
    finally:
        _API._PyInterpreterState_SetEvalFrameFunc(interpreter, before)


def interrupted_anywhere(
    make: Callable[[], Made], operation: Callable[[Made], Any], most: int, seed: int = 0
) -> Iterator[tuple[Made, int]]:
    """`most` times what `make` gives, after an operation on it that an interrupt ended, and the bytecode of that.

    The places are a sample: of the lines of this package that the operation runs, all as likely, and of each time that
    a line is run. So a line that runs once is tried as often as one in a loop.
    """
    rng, by_line = random.Random(seed), defaultdict(list)
    for place, line in enumerate(_run(partial(operation, make()), None), 1):
        by_line[line].append(place)
    lines = rng.sample(list(by_line), len(by_line))
    for place in sorted(rng.choice(by_line[lines[turn % len(lines)]]) for turn in range(most)):
        made = make()
        interrupted(partial(operation, made), place)
        yield made, place


def interrupted(operation: Callable[[], Any], count: int) -> None:
    """Runs an operation that is interrupted after the `count`-th bytecode of this package, where it has so many.

    The exception may come a few bytecodes later, or after the operation, and is caught here.
    """
    with suppress(KeyboardInterrupt):
        _run(operation, count)


def _run(operation: Callable[[], Any], last: int | None) -> list[Any]:
    """Runs an operation, schedules an interrupt after its bytecode `last`; the lines of all until then."""
    request, lines = _Request(threading.get_ident()), []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == last:
                sys.settrace(None)  # or the exception would come in the next call of this function
                request.delivery  # noqa: B018
        return trace

    with pythons_own_frames():
        sys.settrace(trace)
        try:
            operation()
        finally:
            sys.settrace(None)
    return lines
