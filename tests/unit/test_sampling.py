"""The sampler: greedy ties, the distribution it draws from, and streams that do not see each other."""

import math

import numpy as np
import pytest

from paged_kv.engine.sampling import Sampler
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

LOGITS = np.log(np.array([0.4, 0.05, 0.3, 0.2, 0.05], np.float32))


def draws(sampler, logits=LOGITS, count=20_000, request=0):
    """How often each token is drawn."""
    tokens = [token for _ in range(count) for token in sampler(logits[None], [request])]
    return np.bincount(tokens, minlength=logits.size) / count


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    logits = np.array([[0, 3, 1, 3], [-1, -2, -1, -3], [5, 5, 5, 5]], np.float32)
    tokens = Sampler()(logits, [0, 1, 2])
    assert tokens == [1, 0, 0]
    assert all(type(token) is int for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_batch_gives_no_tokens(temperature):
    assert Sampler(temperature)(np.zeros((0, 5), np.float32), []) == []


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_the_temperature_says(temperature):
    expected = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    # Three standard deviations of a frequency in 20000 draws are 0.0106 at most.
    np.testing.assert_allclose(draws(Sampler(temperature, seed=1)), expected, atol=0.011)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.39, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.71, [0, 2, 3]), (0.91, [0, 2, 3, 1]), (0.96, [0, 1, 2, 3, 4])],
)
def test_the_nucleus_is_the_smallest_that_reaches_top_p(top_p, kept):
    expected = np.zeros(5)
    expected[kept] = np.exp(LOGITS[kept])
    np.testing.assert_allclose(draws(Sampler(1.0, top_p, seed=2)), expected / expected.sum(), atol=0.011)


def test_a_nucleus_that_reaches_top_p_exactly_takes_no_more():
    logits = np.array([0, 0, 0, 0], np.float32)  # a quarter each, exactly
    assert np.count_nonzero(draws(Sampler(1.0, 0.5), logits, 500)) == 2


def test_masked_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    frequencies = draws(Sampler(1.0), logits, 2000)
    assert np.flatnonzero(frequencies).tolist() == [1, 3]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = np.array([[1, 3, 2]], np.float32)
    assert Sampler(temperature)(logits, [0]) == [1]


def test_large_logits_do_not_overflow():
    logits = np.array([[3e38, -3e38, 3e38]], np.float32)
    assert {Sampler(1.0, seed=seed)(logits, [0])[0] for seed in range(20)} == {0, 2}


def test_a_request_draws_the_same_in_every_batch():
    random = np.random.default_rng(0)
    steps = random.standard_normal((30, 4, 50)).astype(np.float32)
    alone = {r: [] for r in range(4)}
    for request, tokens in alone.items():
        sampler = Sampler(1.0, 0.9, seed=3)
        for logits in steps:
            tokens += sampler(logits[request : request + 1], [request])
    together = Sampler(1.0, 0.9, seed=3)
    shuffled = {r: [] for r in range(4)}
    for logits in steps:
        order = random.permutation(4)
        for request, token in zip(order, together(logits[order], order), strict=True):
            shuffled[int(request)].append(token)
    assert shuffled == alone


def test_seeds_and_requests_have_streams_of_their_own():
    flat = np.zeros((1, 1000), np.float32)

    def sequence(seed, request):
        sampler = Sampler(1.0, seed=seed)
        return tuple(token for _ in range(8) for token in sampler(flat, [request]))

    assert len({sequence(seed, request) for seed in range(5) for request in range(5)}) == 25
    assert sequence(4, 2) == sequence(4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or a positive number, not -0.1"),
        ({"temperature": math.nan}, "temperature .* not nan"),
        ({"temperature": math.inf}, "temperature .* not inf"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p .* not 1.01"),
        ({"top_p": math.nan}, "top_p .* not nan"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ContractError, match=message):
        Sampler(**arguments)


@pytest.mark.parametrize("value", [None, "1", True, [1.0], 1j])
@pytest.mark.parametrize("name", ["temperature", "top_p", "seed"])
def test_settings_that_are_no_numbers_are_refused(name, value):
    with pytest.raises(ContractTypeError, match=f"{name} must be a"):
        Sampler(**{name: value})


@pytest.mark.parametrize("value", [10**400, 10**5000, -(10**5000)], ids=["400", "5000", "-5000"])
def test_settings_that_no_float_holds_are_refused(value):
    for name in ("temperature", "top_p"):
        with pytest.raises(ContractError, match=f"{name} .* not -?\\(an integer of [0-9]+ bits"):
            Sampler(**{name: value})


def test_any_seed_gives_a_stream():
    logits = np.zeros((1, 50), np.float32)
    assert Sampler(1.0, seed=10**400)(logits, [0]) == Sampler(1.0, seed=10**400)(logits, [0])


def test_a_temperature_near_zero_takes_the_largest():
    logits = np.array([[0, 3, 2.999]], np.float32)
    assert {Sampler(5e-324)(logits, [0])[0] for _ in range(5)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0, math.nan], [math.inf, 0], [-math.inf, -math.inf]])
def test_logits_that_are_no_numbers_name_their_request(temperature, bad):
    sampler = Sampler(temperature, seed=5)
    logits = np.array([[0, 1], bad], np.float32)
    with pytest.raises(ContractError, match="request 7: its logits"):
        sampler(logits, [3, 7])
    # Nothing was drawn for the request before it.
    fresh = Sampler(temperature, seed=5)
    assert [sampler(logits[:1], [3]) for _ in range(20)] == [fresh(logits[:1], [3]) for _ in range(20)]


@pytest.mark.parametrize("shape", [(3,), (3, 5), (2, 0), (2, 1, 5)])
def test_logits_of_a_wrong_shape_are_refused(shape):
    with pytest.raises(ShapeError, match=r"logits must be \[2, vocabulary\]"):
        Sampler()(np.zeros(shape, np.float32), [0, 1])
