"""Lengths, batch indices and positions: what they are, of which kind, and what they refuse."""

import tracemalloc

import numpy as np
import pytest

from paged_kv.arrays.host import as_numpy
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.page import get_batch_indices_positions, get_seq_lens
from support.kinds import INDEX_KINDS, kind_of, make


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


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((ints(0, 2), ints(1), 2), PageTableError, "append_indptr: request 0 appends 2 tokens, seq_lens says 1"),
        ((ints(0, 2), ints(2), 1), PageTableError, "append_indptr ends at 2, past nnz = 1"),
        ((ints(0, 2), ints(2), -1), ContractError, "nnz must be at least 0, not -1"),
        ((ints(0, 2), ints(2), 2.0), ContractTypeError, "nnz must be an integer"),
        ((ints(1, 2), ints(2), 2), PageTableError, r"append_indptr\[0\] must be 0, not 1"),
        ((ints(0, 2, 1), ints(2, 2), 2), PageTableError, "append_indptr decreases at request 1"),
        ((ints(0, 2), ints(2, 2), 2), ShapeError, "append_indptr must have B . 1 = 3 entries, it has 2"),
    ],
)
def test_batch_indices_and_positions(arguments, error, said):
    with pytest.raises(error, match=said):
        get_batch_indices_positions(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((ints(0, 2), ints(0), 4), PageTableError, "kv_last_page_len: request 0 has 0"),
        ((ints(0, 2), ints(5), 4), PageTableError, "kv_last_page_len: request 0 has 5"),
        ((ints(0, 2), ints(1, 1), 4), ShapeError, "kv_last_page_len must have B = 1 entries"),
        ((ints(0, 2, 1), ints(1, 1), 4), PageTableError, "kv_indptr decreases at request 1"),
        ((ints(0, 2**31 - 1), ints(1), 4), PageTableError, "kv_indptr: request 0 has 2147483647 pages of 4"),
        ((ints(0, 2), ints(1), 0), ContractError, "page_size must be at least 1, not 0"),
    ],
)
def test_lengths(arguments, error, said):
    with pytest.raises(error, match=said):
        get_seq_lens(*arguments)


HUGE = [2**25 + 1, 2**31, 2**62, 10**5000]


@pytest.mark.parametrize("nnz", HUGE, ids=lambda n: f"{n.bit_length()} bits")
def test_positions_of_more_rows_than_fit_are_refused_before_anything_is_made(nnz):
    tracemalloc.start()
    with pytest.raises(ContractError, match="nnz must be at most 33554432, not"):
        get_batch_indices_positions(ints(0, 1), ints(1), nnz)
    with pytest.raises(PageTableError, match="page_table holds 67108863 tokens, over 33554432"):
        get_batch_indices_positions(ints(1)[None], ints(2**26 - 1), 2**26 - 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("size", HUGE[1:], ids=lambda n: f"{n.bit_length()} bits")
def test_pages_past_int32_are_refused(size):
    for call, arguments in (
        (get_seq_lens, (ints(0, 1), ints(1))),
        (get_seq_lens, (ints(1)[None], ints(1))),
        (get_batch_indices_positions, (ints(1)[None], ints(1))),
    ):
        with pytest.raises(ContractError, match="page_size must be at most 2147483647, not"):
            call(*arguments, size)
