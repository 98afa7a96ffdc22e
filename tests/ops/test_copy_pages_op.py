"""The copy of pages against the oracle, bit for bit, in every storage layout, and what it refuses."""

from functools import partial

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, TensorType

from paged_kv import reference
from paged_kv.arrays.pages import Pages
from paged_kv.graphs import ops
from support import op_graphs
from support.cases import UNUSED_PAGE
from support.compare import assert_bits_equal
from support.harness import flat, refused

CPU = DeviceRef.CPU()
U16, I32 = DType.uint16, DType.int32
SHAPES = {
    (4, "HND"): ["P", "Hk", "S", "D"],
    (6, "NHD"): ["P", 2, "layers", "S", "Hk", "D"],
}
SIZES = {"P": 40, "S": 5, "Hk": 3, "D": 7, "layers": 4}
TABLE = np.full((1, 1), UNUSED_PAGE, np.uint32)  # whose pages they are does not matter


def copy_in(sources, targets, table, *blocks, layout, kv_format=None):
    cache = op_graphs.paged_cache(table, blocks, layout, kv_format)
    ops.copy_pages(cache, sources, targets)


PAIRS = [TensorType(I32, ["N"], CPU), TensorType(I32, ["M"], CPU), TensorType(DType.uint32, ["B", "columns"], CPU)]
for (rank, layout), shape in SHAPES.items():
    blocks = [BufferType(U16, shape, CPU)] * (2 if rank == 4 else 1)
    op_graphs.add(f"copy_{layout}{rank}", partial(copy_in, layout=layout), *PAIRS, *blocks, by_max=True)
codes = BufferType(DType.uint8, SHAPES[6, "NHD"], CPU)
op_graphs.add("copy_codes", partial(copy_in, layout="NHD", kv_format="int4"), *PAIRS, codes, by_max=True)
views = [BufferType(U16, ["k"], CPU), BufferType(U16, ["v"], CPU), TensorType(DType.int64, [12], CPU)]
op_graphs.add("copy_STRIDED", partial(copy_in, layout="STRIDED"), *PAIRS, *views, by_max=True)


def pool(storage, **sizes):
    """Arrays of random bits: K and V apart at rank 4, else one."""
    rng = np.random.default_rng(0)
    shape = [(SIZES | sizes).get(dim, dim) for dim in SHAPES[storage]]
    return [rng.integers(0, 2**16, shape, np.uint16) for _ in range(2 if storage[0] == 4 else 1)]


def copy(storage, arrays, sources, targets):
    numbers = [np.array(pages, np.int32) for pages in (sources, targets)]
    rank, layout = storage
    op_graphs.run(f"copy_{layout}{rank}", *numbers, TABLE, *arrays)


@pytest.mark.slow
def test_codes_and_scales_are_copied():
    """As the bytes of a page of all layers, 12 of them a head of 16 elements."""
    before = np.random.default_rng(0).integers(0, 256, (40, 2, 4, 5, 3, 12), np.uint8)
    after = before.copy()
    sources, targets = pairs_of(9, 40, 0)
    numbers = [pages.astype(np.int32) for pages in (sources, targets)]
    op_graphs.run("copy_codes", *numbers, TABLE, after)
    before[targets] = before[sources]
    assert_bits_equal(after, before, what="pages")


def pairs_of(count, pages, seed):
    order = np.random.default_rng(seed).permutation(pages)
    return order[:count], order[count : 2 * count]


@pytest.mark.slow
@pytest.mark.parametrize("storage", SHAPES)
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_every_layout(storage, count):
    arrays = pool(storage)
    expected = [array.copy() for array in arrays]
    sources, targets = pairs_of(count, SIZES["P"], count)
    reference.copy_pages(expected[0], expected[-1], sources, targets)
    copy(storage, arrays, sources, targets)
    for array, e in zip(arrays, expected, strict=True):
        assert_bits_equal(array, e, what=f"{count} pages of {storage}")


@pytest.mark.slow
def test_large_pages_go_in_parts():
    """A page of more elements than a task copies, and not a multiple of them."""
    storage = (6, "NHD")
    arrays = pool(storage, P=5, S=61, Hk=11, D=131, layers=3)  # 5 parts, one element left over
    expected = [array.copy() for array in arrays]
    reference.copy_pages(expected[0], expected[0], np.array([4, 4]), np.array([1, 2]))
    copy(storage, arrays, [4, 4], [1, 2])
    assert_bits_equal(arrays[0], expected[0], what="large pages")


@pytest.mark.slow
def test_a_view_leaves_what_lies_between():
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 2**16, (10, 2, 6, 4, 9), np.uint16)
    expected = whole.copy()
    views = [array[1:9, half, 1:5, :3, 2:8] for array in (whole, expected) for half in (0, 1)]
    sources, targets = np.array([7, 0, 0]), np.array([2, 1, 6])
    reference.copy_pages(views[2], views[3], sources, targets)
    k, v, view = Pages(views[0], views[1]).operands()
    numbers = [pages.astype(np.int32) for pages in (sources, targets)]
    op_graphs.run("copy_STRIDED", *numbers, TABLE, flat(k), flat(v), view)
    assert_bits_equal(whole, expected, what="the array behind the view")


@pytest.mark.slow
@pytest.mark.parametrize("storage", SHAPES)
@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([0, 40], [1, 2], ["sources", "pair 1", 40]),
        ([0, -1], [1, 2], ["sources", "pair 1", -1]),
        ([0, 1], [2, 40], ["targets", "pair 1", 40]),
        ([0, 1], [2, -3], ["targets", "pair 1", -3]),
        ([0, 1, 2], [5, 6, 5], ["targets", "pair 2", 5, "already"]),
        ([0, 1], [1, 2], ["targets", "pair 0", 1, "sources"]),
        ([3], [3], ["targets", "pair 0", 3, "sources"]),
        ([0, 1], [2], ["targets", 1, 2]),
    ],
)
def test_refused(storage, sources, targets, words):
    arrays = pool(storage)
    with refused(*words, unchanged=tuple(arrays)):
        copy(storage, arrays, sources, targets)
