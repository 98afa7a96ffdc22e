"""Runs the Mojo tests, and compares addresses with NumPy's."""

import functools
import random

import numpy as np
import pytest

from support.mojo_programs import mojo_tests, outcomes, run_program, words_of_the_compiler


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function"), mojo_tests())
def test_in_mojo(file, function):
    found, output = outcomes()
    assert found.get((file, function)) == "PASS", output


BATCH, LAYERS, HEADS, DIM = 2, 3, 3, 8


def view_of(kv_layout: str, rank: int, half: int, layer: int, page_size: int, pages: int) -> tuple[np.ndarray, int]:
    """K or V of one layer as NumPy slices it, `[page, slot, head, dim]` of 2 bytes, and the array's address."""
    inner = (page_size, HEADS, DIM) if kv_layout == "NHD" else (HEADS, page_size, DIM)
    array = np.zeros((pages, *{4: (), 5: (2,), 6: (2, LAYERS)}[rank], *inner), np.uint16)
    view = array[{4: (), 5: (slice(None), half), 6: (slice(None), half, layer)}[rank]]
    return (view if kv_layout == "NHD" else view.swapaxes(1, 2)), array.ctypes.data


@pytest.mark.slow
def test_addresses_are_numpys():
    pages_of_a_request = 3
    pages = BATCH * pages_of_a_request + 1
    table = np.array(random.Random(0).sample(range(pages), pages - 1)).reshape(BATCH, pages_of_a_request)
    result = run_program("print_addresses.mojo", *map(str, table.flat))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    tokens = (1 + 5 + 16) * pages_of_a_request
    assert len(lines) == 2 * (1 + 2 + 2 * LAYERS) * BATCH * tokens * HEADS
    view_of_line = functools.cache(view_of)
    for line in lines:
        kv_layout, *numbers = line.split()
        rank, half, layer, page_size, request, token, head, row, column, pitch, byte = map(int, numbers)
        view, base = view_of_line(kv_layout, rank, half, layer, page_size, pages)
        element = view[table[request, token // page_size], token % page_size, head]
        assert byte == element.ctypes.data - base, line
        assert (row * pitch + column) * view.itemsize == element.ctypes.data - view.ctypes.data, line


def test_the_package_compiles_without_a_warning():
    assert "warning:" not in words_of_the_compiler()


@pytest.mark.slow
def test_the_loops_of_the_bound_run():
    result = run_program("../../benchmarks/loops.mojo", "1")
    assert result.returncode == 0, result.stderr
    header, *lines = result.stdout[result.stdout.index("loop |") :].splitlines()
    assert header.count("|") == 3
    assert all(line.count("|") == 3 and float(line.split("|")[1].split()[0]) > 0 for line in lines)
    assert len(lines) >= 3 * 5 + 2
