"""The sampler: what is kept and drawn against an oracle that sorts whole rows, its streams, and what it refuses."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from paged_kv import categorical
from paged_kv.engine.sampling import Choice, History, Logprobs, Sampling, choose
from paged_kv.errors import ContractError, ContractTypeError, ShapeError

LOGITS = np.log(np.array([0.4, 0.05, 0.3, 0.2, 0.05], np.float32))
VOCAB = 151_936


class Fixed(History):
    """A sample whose random number is given."""

    def __init__(self, sampling, number, prompt=(), new=()):
        super().__init__(sampling, 0, 0, [*prompt, *new], len(prompt))
        self.number = number

    def uniform(self):
        return self.number


def history(sampling, seed=0, index=0, tokens=(), prompt_length=0):
    return History(sampling, seed, index, list(tokens), prompt_length)


def drawn(logits, sampling, numbers):
    """The token for each of some numbers from [0, 1)."""
    return [choice.token for choice in choose(logits[None], [0] * len(numbers), [Fixed(sampling, u) for u in numbers])]


def kept(logits, sampling):
    """The oracle: ids of the tokens that may be drawn, the most likely first, and their probabilities."""
    scores = logits.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    with np.errstate(over="ignore"):
        weights = np.exp((scores[order] - scores.max()) / sampling.temperature)
    sums = np.cumsum(weights)
    size = 1 + int(np.searchsorted(sums, sampling.top_p * sums[-1])) if sampling.top_p < 1 else order.size
    size = min(size, np.count_nonzero(weights), np.count_nonzero(weights >= sampling.min_p))
    order, probabilities = order[:size], weights[:size] / weights[:size].sum()
    if sampling.typical_p < 1:
        surprises = np.log(weights[:size].sum()) - np.log(weights[:size])
        distances = np.abs(surprises - (probabilities * surprises).sum())
        nearest = np.argsort(distances, kind="stable")
        last = int((np.cumsum(probabilities[nearest]) < sampling.typical_p).sum())
        is_kept = distances <= distances[nearest[min(last, size - 1)]]
        order, probabilities = order[is_kept], probabilities[is_kept] / probabilities[is_kept].sum()
    return order, probabilities


def adversarial_rows():
    """Rows of a large vocabulary, each hard in its own way."""
    random = np.random.default_rng(5)
    noise = random.standard_normal(VOCAB).astype(np.float32)
    masked = np.full(VOCAB, -np.inf, np.float32)
    few, many = masked.copy(), masked.copy()
    few[random.permutation(VOCAB)[:5]] = [1, 2, 3, 3, 3]
    many[random.permutation(VOCAB)[:50_000]] = noise[:50_000]
    outlier = 0.01 * noise
    outlier[77_777] = 30
    sampled = np.full(VOCAB, 0, np.float32)  # what a sample of every 148th weight sees is nothing like the others
    sampled[:: VOCAB // 1024] = np.linspace(5, 9, sampled[:: VOCAB // 1024].size)
    unsampled = np.where(np.arange(VOCAB) % (VOCAB // 1024) == 1, 9, noise).astype(np.float32)
    rows = {
        "flat": np.zeros(VOCAB, np.float32),
        "nearly flat": 0.1 * noise,
        "peaked": 3 * noise,
        "very peaked": 12 * noise,
        "ties": np.round(noise),
        "two values": (noise > 1).astype(np.float32),
        "five tokens": few,
        "a third of the tokens": many,
        "an outlier": outlier,
        "geometric": -np.arange(VOCAB, dtype=np.float32) / 50,
        "ascending": np.arange(VOCAB, dtype=np.float32) / 1e4,
        "a sample too high": sampled,
        "a sample too low": unsampled,
        "large": 1e37 * noise,
        "one token": np.where(np.arange(VOCAB) == 9, 0, masked).astype(np.float32),
    }
    return {name: np.ascontiguousarray(row, np.float32) for name, row in rows.items()}


ROWS = adversarial_rows()
OPTIONS = {
    "all": Sampling(temperature=1.0),
    "cool": Sampling(temperature=0.3),
    "tiny": Sampling(temperature=1e-6),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "half": Sampling(temperature=1.0, top_p=0.5),
    "top_k": Sampling(temperature=1.0, top_k=50),
    "large k": Sampling(temperature=1.0, top_k=20_000),
    "min_p": Sampling(temperature=1.0, min_p=0.02),
    "top_k and top_p": Sampling(temperature=1.2, top_k=500, top_p=0.7),
    "typical_p": Sampling(temperature=1.0, typical_p=0.2),
    "all four": Sampling(temperature=1.0, top_k=3000, top_p=0.9, min_p=0.1, typical_p=0.7),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("row", ROWS)
def test_a_large_row_is_drawn_from_as_if_it_were_sorted(row, options):
    logits, sampling = ROWS[row], OPTIONS[options]
    ids, probabilities = kept(logits, sampling)
    ends = np.cumsum(probabilities)
    # The middles of the first and the last intervals, of some between them, and of the likeliest.
    places = np.unique([0, 1, 2, *np.linspace(0, ids.size - 1, 12).astype(int), ids.size - 2, ids.size - 1])
    places = places[(places >= 0) & (places < ids.size)]
    places = places[probabilities[places] > 1e-9]
    numbers = ends[places] - probabilities[places] / 2
    assert drawn(logits, sampling, numbers) == ids[places].tolist()
    # No number leads out of what is kept, nor to a token that is impossible.
    assert set(drawn(logits, sampling, [0.0, 1 - 2**-53])) <= set(ids.tolist())


@pytest.mark.parametrize("seed", range(30))
def test_random_rows_and_options_give_the_oracles_tokens(seed):
    random = np.random.default_rng(seed)
    size = int(random.choice([1, 2, 7, 300, 4096, 4097, 20_000]))
    logits = (random.standard_normal(size) * random.choice([0, 0.01, 1, 5])).astype(np.float32)
    if seed % 3 == 0:
        logits = np.round(logits * 4) / 4
    logits[random.random(size) < random.choice([0, 0.5])] = -np.inf
    logits[int(random.integers(size))] = 1
    sampling = Sampling(
        temperature=float(random.choice([0.1, 0.7, 1, 3])),
        top_k=int(random.choice([-1, 0, 1, 5, 10_000])),
        top_p=float(random.choice([1, 0.999, 0.6, 1e-9])),
        min_p=float(random.choice([0, 0.001, 0.3, 1])),
        typical_p=float(random.choice([1, 0.9, 0.3, 1e-9])),
    )
    ids, probabilities = kept(logits, sampling)
    numbers = random.random(40)
    places = np.searchsorted(np.cumsum(probabilities), numbers, side="right")
    assert drawn(logits, sampling, numbers) == ids[np.minimum(places, ids.size - 1)].tolist()


@pytest.mark.slow
def test_what_is_kept_is_what_transformers_keeps():
    random = np.random.default_rng(8)
    for seed in range(12):
        logits = (2 * random.standard_normal(400)).astype(np.float32)
        prompt, new = random.integers(400, size=30), random.integers(400, size=20)
        penalty, temperature = float(random.uniform(0.5, 2)), float(random.uniform(0.5, 2))
        top_k, top_p, min_p = int(random.integers(2, 60)), float(random.uniform(0.3, 1)), float(random.uniform(0, 0.2))
        typical_p = float(random.uniform(0.2, 1))
        scores = torch.from_numpy(logits.copy())[None]
        before = torch.from_numpy(np.concatenate([prompt, new]))[None]
        for each in (
            logits_process.RepetitionPenaltyLogitsProcessor(penalty),
            logits_process.TemperatureLogitsWarper(temperature),
            logits_process.TopKLogitsWarper(top_k),
            logits_process.TopPLogitsWarper(top_p),
            logits_process.MinPLogitsWarper(min_p),
            logits_process.TypicalLogitsWarper(typical_p),
        ):
            scores = each(before, scores)
        probabilities = torch.softmax(scores[0].double(), 0).numpy()
        chosen = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
        sampling = Sampling(temperature=temperature, **chosen, repetition_penalty=penalty)
        # The k-th of so many numbers at equal distances comes as often as its token is likely.
        numbers = (np.arange(1000) + 0.5) / 1000
        asked = [Fixed(sampling, u, prompt, new) for u in numbers]
        tokens = [choice.token for choice in choose(logits[None], [0] * 1000, asked)]
        np.testing.assert_allclose(
            np.bincount(tokens, minlength=400) / 1000, probabilities, atol=2e-3, err_msg=str(seed)
        )


def test_a_nucleus_that_reaches_top_p_exactly_takes_no_more():
    for size in (4, VOCAB):  # equal weights, summed exactly
        sampling = Sampling(temperature=1.0, top_p=0.5)
        flat = np.zeros(size, np.float32)
        assert drawn(flat, sampling, [1 - 2**-53]) == [size // 2 - 1]


def test_a_sum_that_is_rounded_leads_to_no_token_outside(monkeypatch):
    """Sums of the same weights in another order differ in their last digit: here the search goes one weight too far."""
    reach, ranks = categorical._reach, []

    def too_far(weights, total, mass):
        rank, *_ = reach(weights, total, mass)
        ranks.append(rank if len(ranks) % 2 == 0 else rank + 1)  # every second one is that of the draw
        return ranks[-1], float(np.sort(weights)[::-1][ranks[-1]]), float(np.sort(weights)[::-1].cumsum()[ranks[-1]])

    monkeypatch.setattr(categorical, "_reach", too_far)
    assert drawn(LOGITS, Sampling(temperature=1.0, top_p=0.41), [1 - 2**-53]) == [2]
    assert ranks == [1, 2]


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    logits = np.array([[0, 3, 1, 3], [-1, -2, -1, -3], [5, 5, 5, 5]], np.float32)
    choices = choose(logits, [0, 1, 2], [history(Sampling())] * 3)
    assert choices == [Choice(1), Choice(0), Choice(0)]
    assert all(type(choice.token) is int for choice in choices)


def test_no_samples_have_no_tokens():
    assert choose(np.zeros((0, 5), np.float32), [], []) == []


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    assert drawn(np.array([1, 3, 2.999], np.float32), Sampling(temperature=temperature), [0, 0.5, 0.99]) == [1, 1, 1]


def test_large_logits_do_not_overflow():
    logits = np.array([3e38, -3e38, 3e38], np.float32)
    assert drawn(logits, Sampling(temperature=1.0), [0.25, 0.75]) == [0, 2]


def test_a_bias_and_penalties_change_the_logits_in_the_order_of_the_docs():
    logits = np.array([2, -2, 1, 0.125, 0], np.float32)
    prompt, new = [1, 0], [2, 2, 3]
    sampling = Sampling(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={0: -1, 4: 100, 2: 3}
    )
    # bias: 1, -2, 4, 0.125, 100; repetition: 0.5, -4, 2, 0.0625, 100; of the new ones: 2 twice, 3 once.
    scores = history(sampling, tokens=prompt + new, prompt_length=2).adjust(logits)
    np.testing.assert_array_equal(scores, np.array([0.5, -4, 2 - 0.25 - 1, 0.0625 - 0.25 - 0.5, 100], np.float32))
    assert logits.tolist() == [2, -2, 1, 0.125, 0]


def test_a_sample_draws_the_same_in_every_batch_and_after_every_break():
    random = np.random.default_rng(0)
    steps = random.standard_normal((12, 4, 70_000)).astype(np.float32)  # enough for threads
    samplings = [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.7, top_k=40, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.2),
        Sampling(),
        Sampling(temperature=1.0, min_p=0.05, logprobs=3),
    ]
    alone = [[] for _ in samplings]
    for at, sampling in enumerate(samplings):
        for logits in steps:
            # As after a preemption: nothing but the tokens is left.
            sample = history(sampling, seed=3, index=at, tokens=[1, *alone[at]], prompt_length=1)
            alone[at].append(choose(logits[at : at + 1], [0], [sample])[0].token)
    tokens = [[1] for _ in samplings]
    together = [History(sampling, 3, at, tokens[at], 1) for at, sampling in enumerate(samplings)]
    for logits in steps:
        order = random.permutation(4)
        again = choose(logits, order, [together[at] for at in order])  # drawn twice: no stream advances
        for at, choice, second in zip(order, choose(logits, order, [together[at] for at in order]), again, strict=True):
            assert choice == second
            tokens[at].append(choice.token)
    assert [each[1:] for each in tokens] == alone


def test_the_stream_of_a_seed_is_a_number_for_each_token_of_pcg64():
    for seed, index in ((0, 0), (7, 3), (10**400, 1)):
        stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
        sample = history(Sampling(), seed, index, [5, 5, 5], 3)
        for _ in range(20):
            assert sample.uniform() == stream.random()
            sample.tokens.append(0)


def test_log_probabilities_are_the_models_own():
    random = np.random.default_rng(4)
    for size in (5, 5000):
        logits = (4 * random.standard_normal(size)).astype(np.float32)
        logits[[1, 3]] = logits.max()  # a tie
        logits[2] = -np.inf
        exact = logits.astype(np.float64) - logits.max()
        exact -= np.log(np.exp(exact).sum())
        order = np.argsort(-exact, kind="stable")
        sampling = Sampling(temperature=0.5, top_k=2, logit_bias={4: 100}, presence_penalty=1, logprobs=3)
        (choice,) = choose(logits[None], [0], [Fixed(sampling, 0.5, new=[1])])
        assert choice.token == 4
        assert choice.logprobs.token == pytest.approx(exact[4], abs=1e-5)
        assert list(choice.logprobs.top) == order[:3].tolist()
        assert list(choice.logprobs.top.values()) == pytest.approx(exact[order[:3]].tolist(), abs=1e-5)
        (everything,) = choose(logits[None], [0], [history(Sampling(logprobs=10**9))])
        assert list(everything.logprobs.top) == order[:-1].tolist()  # without the impossible one
        assert choose(logits[None], [0], [history(Sampling(logprobs=0))])[0].logprobs == Logprobs(
            pytest.approx(exact[1], abs=1e-5), {}
        )
        assert choose(logits[None], [0], [history(Sampling())])[0].logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0, math.nan], [math.inf, 0], [-math.inf, -math.inf], [math.nan, math.inf]])
def test_a_row_that_is_no_numbers_has_an_error_and_the_others_tokens(temperature, bad):
    logits = np.array([[0, 1], bad, [1, 0]], np.float32)
    sampling = Sampling(temperature=temperature)
    error, *others = choose(logits, [1, 0, 2], [Fixed(sampling, 0.1)] * 3)
    assert isinstance(error, ContractError)
    assert "its logits hold NaN or +inf, or are all -inf" in str(error)
    assert others == [Choice(1), Choice(0)]


def test_a_penalty_that_overflows_a_logit_is_an_error():
    logits = np.array([[3e38, 0]], np.float32)
    (error,) = choose(logits, [0], [history(Sampling(repetition_penalty=1e-30), tokens=[0])])
    assert isinstance(error, ContractError)
    (choice,) = choose(-logits, [0], [history(Sampling(repetition_penalty=1e30), tokens=[0])])
    assert choice == Choice(1)


@pytest.mark.parametrize("shape", [(3,), (2, 0), (2, 1, 5)])
def test_logits_of_a_wrong_shape_are_refused(shape):
    with pytest.raises(ShapeError, match=r"logits: expected \[rows, vocabulary\]"):
        choose(np.zeros(shape, np.float32), [0], [history(Sampling())])


def test_threads_change_no_token(monkeypatch):
    rows = np.stack([ROWS["nearly flat"], ROWS["peaked"], ROWS["ties"]])
    samples = [history(Sampling(temperature=0.9, top_p=0.9), seed) for seed in range(3)]
    threaded = choose(rows, range(3), samples)
    monkeypatch.setattr(categorical, "_ROWS_A_THREAD", 1 << 60)
    assert choose(rows, range(3), samples) == threaded


BAD_VALUES = [
    *(("temperature", value, f"expected 0 or a positive number, got {value}") for value in (-0.1, math.nan, math.inf)),
    *(("top_p", value, f"expected a number above 0 and at most 1, got {value}") for value in (0.0, 1.01, math.nan)),
    ("typical_p", 0.0, "expected a number above 0 and at most 1, got 0.0"),
    *(("min_p", value, f"expected a number from 0 to 1, got {value}") for value in (-0.1, 1.1)),
    *(("repetition_penalty", value, f"expected a positive number, got {value}") for value in (0, math.inf)),
    *((f"{name}_penalty", 2.1, "expected a number from -2 to 2, got 2.1") for name in ("presence", "frequency")),
    ("frequency_penalty", math.nan, "expected a number from -2 to 2, got nan"),
    ("seed", -1, "expected at least 0"),
    ("top_k", -2, "expected at least -1"),
    ("logit_bias", {-1: 0}, ": a token: expected at least 0"),
    ("logit_bias", {1: 101}, "of token 1: expected a number from -100 to 100, got 101"),
    ("logprobs", -1, "expected at least 0"),
    ("max_tokens", 0, "expected at least 1"),
    ("stop", [""], ": an empty text"),
    ("stop_tokens", [-1], ": a token: expected at least 0"),
    *(
        (name, value, r".* got -?\(an integer of [0-9]+ bits")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        for value in (10**400, 10**5000, -(10**5000))
    ),
]
WRONG_TYPES = [
    *(
        (each.name, value, "expected an? ")
        for each in fields(Sampling)
        if each.metadata["kind"] in ("number", "integer")
        for value in ("1", True, [1.0], 1j)
    ),
    *(("stop", value, "expected a string or several") for value in (5, [1])),
    *(("stop_tokens", value, "expected a list of token ids") for value in ("ab", 3)),
    *(("ignore_end", value, "expected true or false") for value in (1, 0, "false", None, np.zeros(3), [True])),
    *(("logit_bias", value, "must map token ids to numbers") for value in (3, "ab", [(1, 2, 3)])),
    *(("logit_bias", {token: 1}, ": a token: expected an integer") for token in (1.5, "x")),
    ("logit_bias", {1: "2"}, "of token 1: expected a number"),
    ("temperature", None, "expected a number"),
    ("max_tokens", 1.5, "expected an integer"),
]


@pytest.mark.parametrize(
    ("name", "value", "message", "error"),
    [
        pytest.param(*row, error, id=f"{row[0]} {at}")
        for rows, error in ((BAD_VALUES, ContractError), (WRONG_TYPES, ContractTypeError))
        for at, row in enumerate(rows)
    ],
)
def test_bad_settings_are_refused(name, value, message, error):
    with pytest.raises(error, match=f"^{name}(: | )?{message}"):
        Sampling(**{name: value})


def test_settings_are_kept_in_one_form():
    sampling = Sampling(stop="x", stop_tokens=[np.int64(3)], logit_bias={"7": 1, 2: np.float32(0.5)}, temperature=1)
    assert (sampling.stop, sampling.stop_tokens, sampling.logit_bias) == (("x",), (3,), ((2, 0.5), (7, 1.0)))
    assert replace(sampling) == sampling
    assert hash(replace(sampling)) == hash(sampling)
    sampling.check_vocabulary(8)
    with pytest.raises(ContractError, match="logit_bias has token id 7; the vocabulary is 0 to 6"):
        sampling.check_vocabulary(7)
