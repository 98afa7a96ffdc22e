"""The gather op against the oracle and against the tokens themselves, bit for bit."""

import numpy as np
import pytest

from paged_kv import reference
from support import harness
from support.cases import DTYPES, PAGE_SIZES, STORAGES, UNUSED_PAGE, CacheCase, build, permuted
from support.compare import assert_bits_equal
from support.grids import LENGTHS, all_pairs, case_of, setting_id

GRID = all_pairs(
    {
        "dtype": DTYPES,
        "storage": STORAGES,
        "page_size": PAGE_SIZES,
        "num_kv_heads": (1, 2, 3, 8),
        "head_dim": (7, 8, 64, 80, 128),  # gather takes any
        "lengths": LENGTHS,
    }
)


def compare(cache, lengths=None):
    """Gathers with both, compares, and returns the op's K and V; the cache must stay as it was."""
    lengths = cache.lengths if lengths is None else lengths
    before = [array.copy() for array in cache.pages]
    results = harness.gather(*cache.pages, lengths, **cache.storage)
    expected = reference.gather(*cache.pages, lengths, **cache.storage)
    for name, actual, e in zip(("k", "v", "indptr"), results, expected, strict=True):
        assert_bits_equal(actual, e, what=f"{name} of {cache.case}")
    for array, copy in zip(cache.pages, before, strict=True):
        assert_bits_equal(array, copy, what="cache after a gather")
    return results[:2]


@pytest.mark.parametrize("setting", GRID, ids=setting_id)
def test_grid(setting):
    cache = build(case_of(setting))
    k, v = compare(cache)
    assert_bits_equal(k, np.concatenate(cache.keys), what="k against the tokens")
    assert_bits_equal(v, np.concatenate(cache.values), what="v against the tokens")
    compare(permuted(cache, np.random.default_rng(1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(("rank", "layout"), STORAGES)
def test_nothing_to_gather(dtype, lengths, rank, layout):
    k, v = compare(build(CacheCase(lengths=lengths, dtype=dtype, rank=rank, layout=layout)))
    assert k.shape == v.shape == (0, 2, 32)


def test_a_part_of_each_request():
    """Fewer tokens than the pages hold: table entries past the needed pages are not looked at."""
    cache = build(CacheCase(lengths=(23, 9, 0, 40), page_size=5))
    cache.lookup_table[0, 2:] = UNUSED_PAGE
    compare(cache, np.array([10, 9, 0, 1], np.int32))
