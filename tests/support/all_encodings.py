"""One library for all quantised weights of a test run, where a user's machine builds one for those of each file."""

from functools import cache

import pytest

from paged_kv.runtime import libraries, program_ops
from support.op_graphs import one_process_at_a_time


def install() -> None:
    """Makes programs call the library of all encodings, which is built before the first of them."""
    patch = pytest.MonkeyPatch()  # for as long as the process lives
    patch.setattr(program_ops, "built_encodings", _all_of_them)


def _all_of_them(dtype: str, _: int) -> int:
    _build(dtype)
    return libraries.ALL_ENCODINGS


@cache  # a second call may come from code that holds this file lock, and would wait for itself
def _build(dtype: str) -> None:
    everything = libraries.Kernel("quantised_linear", (dtype,), libraries.ALL_ENCODINGS)
    with one_process_at_a_time(everything.library.file):
        libraries.load([everything])
