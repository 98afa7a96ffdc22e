"""Written memory overlaps nothing: the search by strides against every byte of small views, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from max.driver import CPU
from numpy.lib.stride_tricks import as_strided

from paged_kv.arrays.gpu import TorchArrays
from paged_kv.arrays.host import HOST
from paged_kv.arrays.overlap import check_written, overlaps_itself
from paged_kv.arrays.pages import Pages
from paged_kv.errors import ContractError

HUGE = 1 << 40  # no step of a test reaches as far


def shares_a_byte(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """By listing all of them."""
    elements = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(shape)]
    taken = [element + byte for element in elements for byte in range(itemsize)]
    return len(set(taken)) < len(taken)


def test_strides_tell_what_every_byte_tells():
    found = set()
    for itemsize, shape in itertools.product((1, 2, 4), ((3,), (1, 4), (2, 3), (3, 2, 2), (2, 1, 3), (2, 0), ())):
        for strides in itertools.product((-6, -2, 0, 1, 2, 3, 4, 8, 12), repeat=len(shape)):
            expected = shares_a_byte(shape, strides, itemsize)
            assert overlaps_itself(shape, strides, itemsize) == expected, (shape, strides, itemsize)
            found.add(expected)
    assert found == {True, False}


def test_large_views():
    """Slices and transposes of dense arrays are told by strides alone; what would be searched too long is refused."""
    dense = np.broadcast_to(np.float16(0), (1000, 2, 3, 16, 8, 128))  # strides of 0: only the numbers below count
    shape = dense.shape
    strides = tuple(2 * int(np.prod(shape[axis + 1 :])) for axis in range(6))
    assert not overlaps_itself(shape, strides, 2)
    assert not overlaps_itself(tuple(shape[i] for i in (5, 1, 0, 3)), tuple(strides[i] for i in (5, 1, 0, 3)), 2)
    assert overlaps_itself((1000, 1000), (2, 998), 2)
    assert overlaps_itself((1 << 20, 1 << 20), (4, 6), 2)  # more elements than are searched
    assert overlaps_itself((10**9, 10**9, 10**9), (0, 0, 0), 4)


def interleaved() -> tuple[np.ndarray, np.ndarray]:
    memory = np.zeros(64, np.float32)
    return memory[::2], memory[1::2]


@pytest.mark.parametrize("device", [HOST, TorchArrays(CPU())], ids=["numpy", "torch"])
def test_the_rule(device):
    """The same for NumPy's views and for torch's, which are compared by their addresses."""

    def view(array: np.ndarray):
        return array if device is HOST else torch.from_numpy(array)

    even, odd = (view(part) for part in interleaved())
    whole = np.zeros((4, 8), np.float32)
    check_written(device, [("out", even), ("lse", odd)], [("q", view(whole))])
    check_written(device, [("out", view(whole[:, :4]))], [("q", view(whole[:, 4:])), ("k", view(whole[:, 4:]))])
    check_written(device, [("out", view(whole[:0]))], [("q", view(whole[:0]))])
    for written, read, said in [
        ([("out", even)], [("q", even)], "out shares memory with q"),
        ([("out", even), ("lse", even)], [], "out shares memory with lse"),
        ([("out", view(whole[:, :5]))], [("q", view(whole[:, 4:]))], "out shares memory with q"),
        ([("lse", odd), ("out", view(whole))], [("v", view(whole[3:]))], "out shares memory with v"),
    ]:
        with pytest.raises(ContractError, match=said):
            check_written(device, written, read)
    expanded = np.broadcast_to(whole[:1], whole.shape)
    twice = torch.zeros(1, 8).expand(4, 8) if device is not HOST else expanded
    with pytest.raises(ContractError, match=r"out is to be written, .* shape \[4, 8\], strides \[0, 4\] bytes"):
        check_written(device, [("out", twice)])


def test_a_search_that_takes_too_long_counts_as_an_overlap():
    """Seven coprime steps: whether two such views meet cannot be told in the steps that are granted."""
    shape, primes = (9,) * 7, (1009, 1013, 1019, 1021, 1031, 1033, 1039)
    memory = np.zeros(200_000, np.int8)
    a, b = (as_strided(memory[at:], shape, primes) for at in (0, 1))
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(a, b, max_work=10_000)
    assert HOST.overlap(a, b)
    far = as_strided(memory, (2, 2), (HUGE, 1))
    assert HOST.overlap(far, far)


def slots_in_one_place(stride: int) -> np.ndarray:
    """Pages of 4 slots, each of which begins `stride` elements after the one before."""
    memory = np.zeros(4096, np.float16)
    return as_strided(memory, (6, 2, 4, 2, 8), (256, 128, 2 * stride, 16, 2))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_two_slots_of_a_cache_are_one_memory(layout):
    cache = slots_in_one_place(8)
    cache = cache if layout == "NHD" else cache.swapaxes(2, 3)
    with pytest.raises(ContractError, match="kv_data is to be written, but some of its elements share memory"):
        Pages.of(cache, layout, "kv_data", writable=True)
    Pages.of(cache, layout, "kv_data")  # what is only read may be
    Pages.of(slots_in_one_place(16), "NHD", "kv_data", writable=True)
    k = np.zeros((6, 4, 2, 8), np.float16)
    with pytest.raises(ContractError, match=r"kv_data\[1\] is to be written, but"):
        Pages.of((k, slots_in_one_place(8)[:, 0]), "NHD", "kv_data", writable=True)
