"""Runs the Mojo tests, compares addresses with NumPy's, and compiles the tensor map's kernel for sm_90a."""

import functools
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from support.mojo_programs import ROOT, TESTS, mojo, run_program

TEST_FUNCTIONS = [
    (path.name, function)
    for path in sorted(TESTS.glob("test_*.mojo"))
    for function in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
]


@functools.cache
def outcomes(file: str) -> tuple[dict[str, str], str]:
    """PASS or FAIL of each test function of a file, and all that the file printed."""
    result = run_program(file)
    output = result.stdout + result.stderr
    found = {name: outcome for outcome, name in re.findall(r"^ +(PASS|FAIL) \[.*?\] (\w+)", output, re.MULTILINE)}
    assert (result.returncode == 0) == (set(found.values()) == {"PASS"}), output
    return found, output


@pytest.mark.parametrize(("file", "function"), TEST_FUNCTIONS)
def test_in_mojo(file, function):
    found, output = outcomes(file)
    assert found.get(function) == "PASS", output


BATCH, LAYERS, HEADS, DIM = 2, 3, 3, 8


def view_of(kv_layout: str, rank: int, half: int, layer: int, page_size: int, pages: int) -> tuple[np.ndarray, int]:
    """K or V of one layer as NumPy slices it, `[page, slot, head, dim]` of 2 bytes, and the array's address."""
    inner = (page_size, HEADS, DIM) if kv_layout == "NHD" else (HEADS, page_size, DIM)
    array = np.zeros((pages, *{4: (), 5: (2,), 6: (2, LAYERS)}[rank], *inner), np.uint16)
    view = array[{4: (), 5: (slice(None), half), 6: (slice(None), half, layer)}[rank]]
    return (view if kv_layout == "NHD" else view.swapaxes(1, 2)), array.ctypes.data


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


@pytest.fixture(scope="module")
def sm90_kernel(tmp_path_factory) -> Path:
    """The PTX of compile_tensor_map.mojo's kernel, compiled without a GPU."""
    folder = tmp_path_factory.mktemp("sm_90a")
    target = ["--target-accelerator", "sm_90a", "--emit", "asm", "-o", folder / "host.s"]
    result = mojo("build", "--Werror", "-I", ROOT, *target, TESTS / "compile_tensor_map.mojo")
    assert result.returncode == 0, result.stderr
    (kernel,) = folder.glob("*.ptx")
    return kernel


def test_tensor_map_compiles_for_sm_90a(sm90_kernel):
    ptx = sm90_kernel.read_text()
    assert ".target sm_90a" in ptx
    # One copy for each swizzle atom of a head of 128 bfloat16.
    assert ptx.count("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes") == 2
    assert "mbarrier.try_wait" in ptx


def test_ptxas_takes_the_kernel(sm90_kernel):
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    ptxas = shutil.which("ptxas", path=search)
    if ptxas is None:
        pytest.skip("no ptxas found: the PTX was not assembled")
    command = [ptxas, "-arch=sm_90a", "-v", "-o", sm90_kernel.with_suffix(".cubin"), sm90_kernel]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in result.stderr


def test_the_package_compiles_without_a_warning(tmp_path):
    result = mojo("precompile", ROOT / "mojo_ops", "-o", tmp_path / "mojo_ops.mojoc")
    assert result.returncode == 0, result.stderr
    assert "warning:" not in result.stdout + result.stderr
