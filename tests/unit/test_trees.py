"""Masks, positions and accepted rows of trees, against their definition; and what is refused."""

import numpy as np
import pytest
import torch

from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.trees import accepted_rows, tree_mask, tree_positions
from support.trees import path_to, random_parents, seen_tokens


def batch_of(seed):
    """Parents, offsets and cached tokens of a random batch, requests without rows or tokens among them."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 12, rng.integers(0, 5))
    parents = [random_parents(rng, count) for count in counts]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return parents, offsets, rng.integers(0, 9, len(counts)).astype(np.int32)


@pytest.mark.parametrize("window_left", [-1, 0, 1, 4, 100])
@pytest.mark.parametrize("seed", range(8))
def test_a_row_sees_the_cached_tokens_its_ancestors_and_itself(seed, window_left):
    parents, offsets, cached = batch_of(seed)
    rows = np.concatenate([np.zeros(0, np.int32), *parents])
    mask = tree_mask(rows, offsets, cached, window_left=window_left)
    expected = []
    for of_request, length in zip(parents, cached, strict=True):
        for i in range(len(of_request)):
            row = np.zeros(length + len(of_request), bool)
            row[seen_tokens(of_request, i, length, window_left)] = True
            expected.append(row)
    np.testing.assert_array_equal(mask, np.concatenate([np.zeros(0, bool), *expected]))


@pytest.mark.parametrize("seed", range(8))
def test_the_position_of_a_row_counts_its_ancestors(seed):
    parents, offsets, cached = batch_of(seed)
    positions = tree_positions(np.concatenate([np.zeros(0, np.int32), *parents]), offsets, cached)
    expected = [
        length + len(path_to(of_request, i)) - 1
        for of_request, length in zip(parents, cached, strict=True)
        for i in range(len(of_request))
    ]
    assert positions.dtype == np.int32
    assert positions.tolist() == expected


def test_results_are_of_the_kind_of_parents():
    parents = torch.tensor([-1, 0, 0], dtype=torch.int64)
    assert tree_mask(parents, np.array([0, 3]), np.array([2])).dtype == torch.bool
    assert tree_positions(parents, torch.tensor([0, 3]), torch.tensor([2])).tolist() == [2, 3, 3]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"parents": [-1, 0, 2, 0]}, PageTableError, "parents: row 2 of request 0 has parent 2"),
        ({"parents": [-1, 0, 0, 0]}, PageTableError, "parents: row 0 of request 1 has parent 0"),
        ({"parents": [-1, -2, 0, -1]}, PageTableError, "parents: row 1 of request 0 has parent -2"),
        ({"parents": [-1, 0, 0]}, ShapeError, "qo_indptr ends at 4, parents has 3"),
        ({"parents": [[-1, 0, 0, -1]]}, ShapeError, "parents must have 1 dimensions"),
        ({"parents": np.zeros(4)}, ContractTypeError, "parents: dtype must be an integer"),
        ({"qo_indptr": [1, 3, 4]}, PageTableError, "qo_indptr[0] must be 0"),
        ({"qo_indptr": [0, 5, 4]}, PageTableError, "qo_indptr decreases at request 1"),
        ({"qo_indptr": [0, 4]}, ShapeError, "qo_indptr must have"),
        ({"cache_lengths": [3, -1]}, PageTableError, "cache_lengths: request 1 has -1"),
        ({"cache_lengths": [2**31 - 1, 2**31 - 1]}, ContractError, "over 2^31 - 1"),
        ({"window_left": -2}, ContractError, "window_left must be at least -1"),
        ({"window_left": 1.0}, ContractTypeError, "window_left must be an integer"),
    ],
)
def test_refused(change, error, words):
    good = {"parents": [-1, 0, 0, -1], "qo_indptr": [0, 3, 4], "cache_lengths": [3, 0]}
    arguments = {name: np.asarray(value) if name != "window_left" else value for name, value in (good | change).items()}
    with pytest.raises(error) as caught:
        tree_mask(**arguments)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("parents", "tokens", "sampled", "rows"),
    [
        ([-1], [5], [7], [0]),
        ([-1, 0, 0], [5, 6, 7], [7, 1, 2], [0, 2]),
        ([-1, 0, 0], [5, 6, 7], [8, 1, 2], [0]),
        ([-1, 0, 0, 1, 2, 4], [5, 6, 7, 2, 2, 3], [7, 2, 2, 0, 3, 9], [0, 2, 4, 5]),
        ([-1, 0, 0, 1, 2], [5, 6, 6, 2, 2], [6, 2, 2, 0, 3], [0, 1, 3]),  # of two equal children the first
        ([-1, 0, 1, 0], [5, 6, 6, 7], [6, 7, 0, 0], [0, 1]),  # a row that fits is no child of the path
    ],
)
def test_accepted_rows(parents, tokens, sampled, rows):
    assert accepted_rows(parents, tokens, sampled) == rows


@pytest.mark.parametrize(
    ("parents", "tokens", "sampled", "error", "words"),
    [
        ([], [], [], ShapeError, "not 0, 0 and 0"),
        ([-1, 0], [1], [1, 2], ShapeError, "not 2, 1 and 2"),
        ([0], [1], [1], PageTableError, "row 0 has parent 0, expected -1"),
        ([-1, -1], [1, 2], [1, 2], PageTableError, "row 1 has parent -1, expected an earlier row"),
        ([-1, 1], [1, 2], [1, 2], PageTableError, "row 1 has parent 1"),
    ],
)
def test_accepted_rows_refuses(parents, tokens, sampled, error, words):
    with pytest.raises(error) as caught:
        accepted_rows(parents, tokens, sampled)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
