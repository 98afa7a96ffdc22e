"""Page tables, their lengths and positions: what they say, and that whatever is wrong with one is named."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.arrays.host import as_numpy
from paged_kv.calls.table import DENSE_NAMES, KV_NAMES, Table
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.options import NO_PAGE
from paged_kv.page import get_batch_indices_positions, get_seq_lens
from support.kinds import INDEX_KINDS, kind_of, make
from support.properties import examples


def table(indptr, indices, last_page_len, page_size=4, names=KV_NAMES) -> Table:
    return Table.csr(*(np.array(x, np.int32) for x in (indptr, indices, last_page_len)), page_size, names)


def test_the_dense_table_is_a_copy():
    indices = np.arange(4, dtype=np.int32)
    dense = Table.csr(np.array([0, 2, 4], np.int32), indices, np.ones(2, np.int32), 4).lookup_table
    indices[:] = 9
    assert dense.tolist() == [[0, 1], [2, 3]]


LARGE = 2**31 - 1


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "size", "error", "said"),
    [
        ([], [], [], 4, ShapeError, "kv_indptr: expected B . 1 entries, got 0"),
        ([1, 2], [5, 6], [1], 4, PageTableError, r"kv_indptr\[0\]: expected 0, got 1"),
        ([0, 2, 1], [5, 6], [1, 1], 4, PageTableError, "kv_indptr decreases at request 1: from 2 to 1"),
        ([0, LARGE, -LARGE - 1], [], [1, 1], 4, PageTableError, "kv_indptr decreases at request 1"),
        ([0, 1, 3, 4], [5, 6], [1] * 3, 4, PageTableError, "kv_indptr: request 1 ends at 3, kv_indices has 2"),
        ([0, 1, 2], [5, 6], [1], 4, ShapeError, "kv_last_page_len: expected B = 2 entries.* got 1"),
        ([0, 1, 2], [5, 6], [1, 0], 4, PageTableError, r"kv_last_page_len: request 1: expected 1 to .*4, got 0"),
        ([0, 1, 2], [5, 6], [5, 1], 4, PageTableError, r"kv_last_page_len: request 0: expected 1 to .*4, got 5"),
        ([0, 1, 1], [5], [1, 5], 4, PageTableError, r"kv_last_page_len: request 1: expected 0 to .*4, got 5"),
        ([0, 0], [], [-1], 4, PageTableError, r"kv_last_page_len: request 0: expected 0 to .*4, got -1"),
        ([0, 2], [5, 6], [1], 2**30, PageTableError, "kv_indptr: request 0 has 2 pages of 1073741824"),
        ([0], [], [], 0, ContractError, "page_size: expected at least 1, got 0"),
        ([0], [], [], 2**31, ContractError, "page_size: expected at most 2147483647, got 2147483648"),
        ([0], [], [], 4.0, ContractTypeError, "page_size: expected an integer, got 4.0"),
    ],
)
def test_inconsistent_tables_are_refused(indptr, indices, last, size, error, said):
    with pytest.raises(error, match=said):
        table(indptr, indices, last, size)


@pytest.mark.parametrize(("page", "said"), [(10, "10"), (-1, "-1"), (LARGE, str(LARGE))])
def test_a_page_outside_the_pool_is_named(page, said):
    it = table([0, 2, 2, 4], [0, 1, 9, page], [1, 0, 4])
    with pytest.raises(PageTableError, match=rf"kv_indices: request 2, slot 1 holds page id {said}, .*\[0, 10\)"):
        it.check(10)


def test_dense_tables_end_at_the_first_minus_one():
    entries = np.array([[4, 2, 7], [-1, -1, -1], [1, -1, -1]], np.int32)
    for page_table in (entries, entries.view(np.uint32), entries.astype(np.int64)):
        it = Table.dense(page_table, np.array([0, 3, 4]), 4)
        assert it.lengths.tolist() == [8, 0, 4]
        assert it.names == DENSE_NAMES
        it.check(8)
        with pytest.raises(PageTableError, match="page_table: request 0, slot 2 holds page id 7"):
            it.check(7)


@pytest.mark.parametrize(
    ("page_table", "last", "error", "said"),
    [
        (np.array([[1, -1, 2]]), [1], PageTableError, "page_table: request 0 has page 2 in slot 2, after a -1"),
        (np.array([1, 2]), [1], ShapeError, "page_table: expected 2 dimensions"),
        (np.array([[1], [2]]), [1], ShapeError, "last_page_len: expected B = 2 entries"),
        (np.array([[1], [2]]), [1, 5], PageTableError, "last_page_len: request 1: expected .*, got 5"),
        (np.array([[1], [2]]), [-1, 4], PageTableError, "last_page_len: request 0: expected .*, got -1"),
    ],
)
def test_inconsistent_dense_tables_are_refused(page_table, last, error, said):
    with pytest.raises(error, match=said):
        Table.dense(page_table, np.array(last), 4)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[list[int]]]:
    """A table, and the pages of each request as a list."""
    # Wide rows are copied in another way than narrow ones.
    counts = draw(st.lists(st.integers(0, draw(st.sampled_from([3, 150]))), max_size=6))
    if counts and draw(st.booleans()):
        counts = [counts[0]] * len(counts)
    page_size = draw(st.integers(1, 130))
    ids = draw(st.randoms(use_true_random=False)).sample(range(1000), sum(counts))
    unused = draw(st.lists(st.integers(-5, 2000), max_size=3))
    last = [draw(st.integers(1, page_size)) if count else draw(st.integers(0, page_size)) for count in counts]
    indptr = np.concatenate([[0], np.cumsum(counts)])
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    it = Table.csr(indptr.astype(dtype), np.array(ids + unused, dtype), np.array(last, dtype), page_size)
    return it, [ids[begin:end] for begin, end in pairwise(indptr)]


@settings(max_examples=examples(250), derandomize=True, deadline=None)
@given(tables())
def test_round_trip_between_the_two_tables(drawn):
    it, pages = drawn
    it.check(1000)
    dense = it.lookup_table
    assert [[page for page in row if page != NO_PAGE] for row in dense.tolist()] == pages
    back = Table.dense(dense, it.arrays[2], it.page_size)
    assert back.num_pages.tolist() == it.num_pages.tolist()
    assert back.used.tolist() == it.used.tolist()
    assert back.lengths.tolist() == it.lengths.tolist()
    assert it.lengths.dtype == np.int32
    for length, owned, last in zip(it.lengths.tolist(), pages, it.arrays[2].tolist(), strict=True):
        assert length == ((len(owned) - 1) * it.page_size + last if owned else 0)


@settings(max_examples=examples(100), derandomize=True, deadline=None)
@given(tables(), st.data())
def test_every_used_slot_is_found_and_no_other(drawn, data):
    it, pages = drawn
    tokens = [(b, j) for b, owned in enumerate(pages) for j in range(len(owned) * it.page_size)]
    some = data.draw(st.lists(st.sampled_from([*tokens, (-1, 12345)]), max_size=8))
    some = [token for i, token in enumerate(some) if token[0] == -1 or token not in some[:i]]
    batch, positions = np.array(some, np.int32).reshape(-1, 2).T
    page, slot = it.slots(batch, positions)
    for (b, j), p, s in zip(some, page.tolist(), slot.tolist(), strict=True):
        assert (p, s) == ((-1, 0) if b == -1 else (pages[b][j // it.page_size], j % it.page_size))
    if pages:
        b = data.draw(st.integers(0, len(pages) - 1))
        for outside in (len(pages[b]) * it.page_size, -1, LARGE):
            with pytest.raises(PageTableError, match=rf"positions: row 0 \(request {b}\) has position {outside}"):
                it.slots(np.array([b], np.int32), np.array([outside], np.int32))


def test_rows_of_no_request_are_refused():
    it = table([0, 1], [3], [4])
    for b in (1, -2):
        with pytest.raises(PageTableError, match=f"batch_indices: row 1: expected -1 to 0, got {b}"):
            it.slots(np.array([0, b], np.int32), np.array([0, 0], np.int32))


def test_two_rows_for_one_slot_are_refused():
    it = table([0, 1, 2, 3], [3, 5, 3], [4, 4, 4])  # requests 0 and 2 share page 3
    with pytest.raises(PageTableError, match=r"rows 1 and 3 \(requests 0 and 2\) both write slot 2 of page 3"):
        it.slots(np.array([-1, 0, 1, 2], np.int32), np.array([0, 2, 2, 2], np.int32))
    it.slots(np.array([0, 2], np.int32), np.array([1, 2], np.int32))


# Lengths, batch indices and positions of a table


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("kind", "dtype"), INDEX_KINDS)
def test_lengths_and_positions_have_the_kind_of_their_arguments(kind, dtype):
    wide = "int64" if dtype == "int64" else "int32"

    def index(*values):
        return make(kind, np.array(values, dtype))

    lengths = get_seq_lens(index(0, 3, 3, 4), index(2, 0, 16), 16)
    batch, positions = get_batch_indices_positions(index(0, 2, 2, 3), lengths, 4)
    for array, values in ((lengths, [34, 0, 16]), (batch, [0, 0, 2, -1]), (positions, [32, 33, 15, 0])):
        assert kind_of(array) == kind
        assert as_numpy(array, "x").dtype == wide
        assert as_numpy(array, "x").tolist() == values
    page_table, fill = make(kind, np.array([[3, 1], [2, 0]], dtype)), index(1, 2)
    assert as_numpy(get_seq_lens(page_table, fill, 2), "x").tolist() == [3, 4]
    batch, positions = get_batch_indices_positions(page_table=page_table, last_page_len=fill, page_size=2)
    assert as_numpy(batch, "x").tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert as_numpy(positions, "x").tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert as_numpy(batch, "x").dtype == wide


POSITIONS, LENGTHS = get_batch_indices_positions, get_seq_lens
HUGE = (2**31, 2**62, 10**5000)
LARGE_NNZ, ONE = (2**25 + 1, *HUGE), ints(1)
TOO_LARGE = "page_size: expected at most 2147483647, got"


@pytest.mark.parametrize(
    ("call", "arguments", "error", "said"),
    [
        (POSITIONS, (ints(0, 2), ONE, 2), PageTableError, "append_indptr: request 0 appends 2 tokens, seq_lens says 1"),
        (
            POSITIONS,
            (ints(0, 2), ints(2), 1),
            PageTableError,
            "append_indptr: expected an end of at most nnz = 1, got 2",
        ),
        (POSITIONS, (ints(0, 2), ints(2), -1), ContractError, "nnz: expected at least 0, got -1"),
        (POSITIONS, (ints(0, 2), ints(2), 2.0), ContractTypeError, "nnz: expected an integer"),
        *(
            (POSITIONS, (ints(0, 1), ONE, n), ContractError, "nnz: expected at most 33554432, got")
            for n in (2**25 + 1, *HUGE)
        ),
        (POSITIONS, (ints(1, 2), ints(2), 2), PageTableError, r"append_indptr\[0\]: expected 0, got 1"),
        (POSITIONS, (ints(0, 2, 1), ints(2, 2), 2), PageTableError, "append_indptr decreases at request 1"),
        (POSITIONS, (ints(0, 2), ints(2, 2), 2), ShapeError, "append_indptr: expected B . 1 = 3 entries, .*got 2"),
        (
            POSITIONS,
            (ONE[None], ints(2**26 - 1), 2**26 - 1),
            PageTableError,
            "page_table: expected at most 33554432 tokens, got 67108863",
        ),
        *((POSITIONS, (ONE[None], ONE, size), ContractError, TOO_LARGE) for size in HUGE),
        *((LENGTHS, (ONE[None], ONE, size), ContractError, TOO_LARGE) for size in HUGE),
        *((LENGTHS, (ints(0, 1), ONE, size), ContractError, TOO_LARGE) for size in HUGE),
        (LENGTHS, (ints(0, 2), ints(0), 4), PageTableError, "kv_last_page_len: request 0: expected .*, got 0"),
        (LENGTHS, (ints(0, 2), ints(5), 4), PageTableError, "kv_last_page_len: request 0: expected .*, got 5"),
        (LENGTHS, (ints(0, 2), ints(1, 1), 4), ShapeError, "kv_last_page_len: expected B = 1 entries"),
        (LENGTHS, (ints(0, 2, 1), ints(1, 1), 4), PageTableError, "kv_indptr decreases at request 1"),
        (LENGTHS, (ints(0, 2**31 - 1), ONE, 4), PageTableError, "kv_indptr: request 0 has 2147483647 pages of 4"),
        (LENGTHS, (ints(0, 2), ONE, 0), ContractError, "page_size: expected at least 1, got 0"),
    ],
    ids=range(27),
)
def test_what_has_no_lengths_or_positions_is_refused_before_anything_is_made(call, arguments, error, said):
    tracemalloc.start()
    with pytest.raises(error, match=said):
        call(*arguments)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
