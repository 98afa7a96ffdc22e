"""FlashInfer's `sampling` calls against an oracle that sorts rows in float64, by counting, and against the engine."""

from typing import Any

import numpy as np
import pytest
import torch

from paged_kv import sampling
from paged_kv.arrays.host import as_numpy
from paged_kv.engine.sampling import History, Sampling, choose
from paged_kv.errors import ContractError, ContractTypeError
from support.calls import i32
from support.compare import assert_bits_equal
from support.kinds import KINDS, kind_of, make

LOGITS = np.round(2 * np.random.default_rng(0).standard_normal((4, 12)), 1).astype(np.float32)  # with equal ones
LOGITS[1, [2, 5]] = -np.inf
EXACT = np.exp(LOGITS.astype(np.float64) - LOGITS.max(1, keepdims=True))
PROBS = (EXACT / EXACT.sum(1, keepdims=True)).astype(np.float32)
DRAWS = 1200


def keep(row: np.ndarray, top_k: int = 99, top_p: float = 1.0, min_p: float = 0.0, joint: bool = False) -> np.ndarray:
    """The probabilities of a row after the filters, 0 where a token is left out."""
    row = row.astype(np.float64) / row.astype(np.float64).sum()
    order = np.argsort(-row, kind="stable")
    first = order[:top_k]
    ranked = row[order if joint else first] / row[order if joint else first].sum()
    size = 1 + int((np.cumsum(ranked) < top_p - 1e-12).sum())
    ids = first[:size][row[first[:size]] >= min_p * row.max()]
    result = np.zeros_like(row)
    result[ids] = row[ids] / row[ids].sum()
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_probabilities_are_the_formulas(kind: str, dtype: str) -> None:
    logits, probs = (array.astype(dtype) for array in (LOGITS, PROBS))
    x, p, heat = make(kind, logits), make(kind, probs), np.array([0.5, 1, 2, 0.1], np.float32)
    counts, shares = i32(1, 3, 99, 5), np.array([0.3, 1.0, 0.9, 1e-6], np.float32)
    wide = logits.astype(np.float64)
    tempered = np.exp((wide - wide.max(1, keepdims=True)) / heat[:, None])
    top = np.array([keep(row, k) for row, k in zip(probs, counts, strict=True)])
    table = [
        (sampling.softmax(x, heat), tempered / tempered.sum(1, keepdims=True), "float32"),
        (sampling.top_k_renorm_probs(p, counts), top, dtype),
        (
            sampling.top_p_renorm_probs(p, shares),
            [keep(r, 99, s) for r, s in zip(probs, shares, strict=True)],
            dtype,
        ),
    ]
    for result, expected, of in table:
        numbers = as_numpy(result, "result")
        assert (kind_of(result), numbers.dtype) == (kind, of)
        np.testing.assert_array_equal(numbers == 0, np.array(expected) == 0)
        step = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[of]
        np.testing.assert_allclose(numbers.astype("f8"), expected, rtol=step, atol=1e-7)
    masked = as_numpy(sampling.top_k_mask_logits(x, counts), "masked")
    order = np.argsort(np.argsort(-wide, 1, kind="stable"), 1)
    assert_bits_equal(masked, np.where(order < counts[:, None], logits, np.array(-np.inf, dtype)), what="masked")


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampling_from_probs": (sampling.sampling_from_probs, {}),
    "sampling_from_logits": (sampling.sampling_from_logits, {}),
    "top_k": (sampling.top_k_sampling_from_probs, {"top_k": 3}),
    "top_p": (sampling.top_p_sampling_from_probs, {"top_p": 0.6}),
    "min_p": (sampling.min_p_sampling_from_probs, {"min_p": 0.3}),
    "top_k first": (sampling.top_k_top_p_sampling_from_probs, {"top_k": 4, "top_p": 0.8}),
    "joint": (sampling.top_k_top_p_sampling_from_probs, {"top_k": 4, "top_p": 0.8, "joint": True}),
    "logits, top_k first": (sampling.top_k_top_p_sampling_from_logits, {"top_k": 4, "top_p": 0.8}),
    "logits, joint": (sampling.top_k_top_p_sampling_from_logits, {"top_k": 4, "top_p": 0.8, "joint": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_tokens_come_as_often_as_they_are_likely(name: str) -> None:
    call, filters = CALLS[name]
    rows = LOGITS if "logits" in call.__name__ else PROBS
    options = {key: value for key, value in filters.items() if key != "joint"}
    options |= {"filter_apply_order": "joint"} if "joint" in filters else {}
    indices = np.arange(4).repeat(DRAWS)
    tokens = call(rows, **options, indices=indices, seed=7)
    assert tokens.dtype == np.int64
    for row, probabilities in enumerate(PROBS):
        expected = keep(probabilities, **filters)
        shares = np.bincount(tokens[indices == row], minlength=12) / DRAWS
        assert (shares[expected == 0] == 0).all()
        assert (np.abs(shares - expected) < 4.5 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-9).all()
        assert (shares[expected > 1e-2] > 0).all()


def test_a_filter_of_each_row() -> None:
    """Filters are those of the rows, seeds and offsets those of the samples."""
    top_k, indices = i32(1, 2, 3, 4), i32(3, 0, 0, 2)
    seeds, offsets = np.array([5, 6, 7, 8]), np.array([0, 1, 2, 3], np.uint64)
    tokens = sampling.top_k_sampling_from_probs(PROBS, top_k, indices, seed=seeds, offset=offsets)
    for i, row in enumerate(indices):
        repeated = sampling.top_k_sampling_from_probs(
            PROBS, int(top_k[row]), np.full(i + 1, row), seed=int(seeds[i]), offset=int(offsets[i])
        )
        assert tokens[i] == repeated[i]


def test_the_engine_draws_the_same_tokens() -> None:
    logits = (3 * np.random.default_rng(3).standard_normal((5, 5000))).astype(np.float32)
    options = Sampling(temperature=0.7, top_k=300, top_p=0.9)
    histories = [History(options, 11, i, [0] * 9, 2) for i in range(5)]
    theirs = [choice.token for choice in choose(logits, range(5), histories)]
    scaled = (logits.astype(np.float64) / 0.7).astype(np.float32)
    assert sampling.top_k_top_p_sampling_from_logits(scaled, 300, 0.9, seed=11, offset=7).tolist() == theirs


def test_seeds_of_generators() -> None:
    probs = torch.from_numpy(PROBS).repeat(8, 1)

    def drawn(generator: Any, array: Any = probs) -> list[int]:
        return sampling.sampling_from_probs(array, generator=generator).tolist()

    torch.manual_seed(3)
    first, second = drawn(None), drawn(None)
    torch.manual_seed(3)
    assert (drawn(None), drawn(None)) == (first, second)
    assert first != second
    for make_generator in (lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)):
        generator = make_generator()
        a, b = drawn(generator), drawn(generator, probs.numpy())
        assert a != b
        assert drawn(make_generator()) == a
    assert drawn(None, probs.numpy()) != drawn(None, probs.numpy())


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf, 0.0])
def test_a_row_that_is_no_distribution(bad: float) -> None:
    probs = PROBS.copy()
    probs[2, slice(None) if bad == 0 else 4] = bad
    tokens, valid = sampling.top_p_sampling_from_probs(torch.from_numpy(probs), 0.9, seed=1, return_valid=True)
    assert valid.tolist() == [True, True, False, True]
    assert tokens[2] == 0
    with pytest.raises(ContractError, match="probs: row 2: expected probabilities, got NaN, negative or infinite ones"):
        sampling.top_p_sampling_from_probs(probs, 0.9, seed=1)
    if np.isnan(bad):
        with pytest.raises(ContractError, match="probs: row 2"):
            sampling.top_p_sampling_from_probs(probs, 0.9, check_nan=True, return_valid=True)
    with pytest.raises(ContractTypeError, match="generator: expected one of torch or NumPy, got 3"):
        sampling.sampling_from_probs(PROBS, generator=3)


def test_accepted_drafts_have_the_targets_distribution() -> None:
    rng, requests = np.random.default_rng(1), 1500
    draft, target = rng.dirichlet(np.ones(5), 2), rng.dirichlet(np.ones(5), 3)
    ids = np.stack([rng.choice(5, requests, p=row) for row in draft], 1)
    batch = [np.broadcast_to(rows.astype(np.float32), (requests, *rows.shape)) for rows in (draft, target)]
    before = i32(*[10] * requests)
    tokens, accepted, emitted = sampling.chain_speculative_sampling(batch[0], ids, batch[1], before, seed=9)
    assert accepted is before
    for place in range(3):  # given that the drafts before it were accepted
        drawn = tokens[emitted >= place][:, place]
        shares, expected = np.bincount(drawn, minlength=5) / len(drawn), target[place]
        assert (np.abs(shares - expected) < 4.5 * np.sqrt(expected * (1 - expected) / len(drawn))).all()
    at = np.arange(3)
    np.testing.assert_array_equal(tokens == -1, at > emitted[:, None])
    assert (np.where(at[:2] < emitted[:, None], tokens[:, :2] == ids, True)).all()
    shares = np.minimum(draft, target[:2]).sum(1)  # a draft is accepted so often
    assert abs((accepted - 10).mean() - shares.sum()) < 0.06
    assert (accepted - 10 >= emitted).all()
    same = sampling.chain_speculative_sampling(batch[0], ids, np.concatenate([batch[0], batch[1][:, 2:]], 1), seed=9)
    assert (same[2] == 2).all()
