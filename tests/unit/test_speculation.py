"""Drafts of tokens to come: they change no token, no page and no prefix, and they are made where they pay."""

from collections import Counter

import numpy as np
import pytest

from paged_kv.engine import Sampling
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import _last_rows
from paged_kv.engine.requests import Luck
from paged_kv.engine.speculation import PANEL, DraftModel, Speculation, look_up
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.pool import PagePool, PrefixCache, pages_needed
from support.engine_runs import KINDS, Letters, guess_often, run
from support.fake_model import VOCAB, FakeDraft, FakeModel, Nonsense, alone, logits_after


def drafting(draft="draft", pages=200, page_size=4, model=FakeModel, **options):
    """An engine that drafts wherever it can."""
    speculate = FakeDraft(400, page_size) if draft == "draft" else draft
    engine = Engine(model(pages, page_size), speculate=speculate, **options)
    guess_often(engine)
    return engine


@pytest.mark.parametrize(
    ("text", "most", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, [4, 5, 1]),
        ([1, 2, 3, 4, 1, 2, 9, 1, 2], 2, [9, 1]),  # of two places the last one
        ([7, 1, 2, 3, 8, 1, 2, 9, 7, 1, 2], 2, [3, 8]),  # unless an earlier one matches longer
        ([5, 1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # what is repeated goes on
        ([4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3, 2], 3, []),  # one token is too little
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
        ([1, *range(10, 40), 77, 2, *range(10, 40), 88, 2, *range(10, 40)], 1, [88]),  # all longer ones are alike
    ],
)
def test_what_followed_the_last_tokens_is_drafted(text, most, drafts):
    assert look_up(np.array(text), most) == drafts


@pytest.mark.parametrize("draft", ["draft", "lookup"])
def test_outputs_are_those_without_guesses(draft):
    """Tokens, texts, log-probabilities and ends; a text that repeats itself for drafts by look-up."""
    rng = np.random.default_rng(1)
    kinds = [*KINDS, Sampling(30, stop=("ab", "q"))]
    asked = [(rng.integers(VOCAB, size=int(rng.integers(1, 20))).tolist(), kinds[at % 6]) for at in range(24)]
    found = []
    for engine in (
        Engine(FakeModel(400, 4, window=1 if draft == "lookup" else -1), Letters()),
        drafting(draft, model=lambda *_: FakeModel(400, 4, window=1 if draft == "lookup" else -1), tokenizer=Letters()),
    ):
        outputs = [list(engine.stream(prompt, sampling)) for prompt, sampling in asked]
        found.append([[(each.tokens, each.text, each.finish, each.logprobs) for each in one] for one in outputs])
        assert engine.pool.num_used == 0
    assert found[0] == found[1]
    assert engine.statistics.accepted_tokens > 60
    assert engine.statistics.steps < sum(len(one) for one in found[0]) - 60
    assert engine.statistics.decode_tokens == sum(len(one) - 1 for one in found[0])


@pytest.mark.slow
def test_drawn_tokens_have_the_models_distribution():
    """Chi-square of the second token after a prompt, which is judged as a draft that is right or wrong."""
    count, prompt = 2000, [1, 2, 3]
    engine, seconds = drafting(), Counter()
    for seed in range(count):
        _, second, _ = engine.stream(prompt, Sampling(3, temperature=1.0, seed=seed))
        seconds[second.tokens[0]] += 1
    assert engine.statistics.accepted_tokens > 300
    assert engine.statistics.draft_tokens - engine.statistics.accepted_tokens > 300

    def probabilities(past):
        weights = np.exp(logits_after(past).astype(np.float64))
        return weights / weights.sum()

    firsts = probabilities(prompt)
    expected = count * sum(firsts[token] * probabilities([*prompt, token]) for token in range(VOCAB))
    chi_square = sum((seconds[token] - expected[token]) ** 2 / expected[token] for token in range(VOCAB))
    assert expected.min() > 5
    assert chi_square < 54  # 22 degrees of freedom: one in 5,000


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_only_what_was_chosen_becomes_a_known_prefix(page_size):
    engine = drafting(pages=400, page_size=page_size)
    prompts = [[at, 2, 3] for at in range(6)]
    for prompt in prompts:
        engine.add_request(prompt, Sampling(40, 1.0, seed=prompt[0]))
    for (number, _), tokens in run(engine).items():
        whole = [*prompts[number], *tokens]
        assert engine._pages.prefixes.match(whole) == (len(whole) - 1) // page_size * page_size
        again = [token for output in engine.stream([*whole, 5], Sampling(9)) for token in output.tokens]
        assert again == alone([*whole, 5], Sampling(9))
    assert engine.statistics.draft_tokens > engine.statistics.accepted_tokens > 50


@pytest.mark.parametrize("page_size", [1, 4])
def test_guesses_take_no_page_that_a_request_may_not_have(page_size):
    """A pool that has just the pages of one request, and of two, of which the other is never preempted for a draft."""
    needed = pages_needed(3 + 50 - 1, page_size)
    engine = drafting(pages=needed, page_size=page_size)
    engine.add_request([1, 2, 3], Sampling(50, 1.0, seed=1))
    assert run(engine) == {(0, 0): alone([1, 2, 3], Sampling(50, 1.0, seed=1))}
    assert engine.statistics.peak_pages == needed
    assert engine.statistics.accepted_tokens > 10
    engine = drafting(model=lambda *sizes: FakeModel(*sizes, max_positions=40), page_size=page_size)
    engine.add_request([1, 2, 3], Sampling(100))  # the model refuses a place past its last
    assert len(run(engine)[0, 0]) == 38
    engine = drafting(pages=2 * needed, page_size=page_size)
    for first in (1, 2):
        engine.add_request([first, 2, 3], Sampling(50))
    run(engine)
    assert engine.preemptions == 0


def test_rows_are_within_the_limits_of_a_step():
    model = FakeModel(400, 4)
    rows, step = [], model.step
    model.step = lambda *given: rows.append(len(step(*given))) or step(*given)
    engine = Engine(model, max_running=6, max_step_tokens=7, speculate=FakeDraft(400, 4))
    guess_often(engine)
    for first in range(5):
        engine.add_request([first, 2], Sampling(20))
    run(engine)
    assert max(rows) == 6
    assert model.largest <= 7
    assert engine.statistics.accepted_tokens > 10


class Clock:
    """Steps of a model whose drafts are right with some probability, on a clock of its own."""

    def __init__(self, right, *, row=0.06, drafting=0.0, samples=1):
        self.rng, self.right, self.row, self.drafting = np.random.default_rng(0), right, row, drafting
        self.samples = [type("Sample", (), {"luck": Luck()})() for _ in range(samples)]
        draft = None
        if drafting:
            draft = DraftModel(FakeModel(1, 1), VOCAB, 1, True)
            draft.seconds = drafting
        self.speculation = Speculation(draft)
        self.counts = []

    def speed(self, steps):
        """Tokens a second, over those of steps without drafts."""
        seconds = tokens = 0.0
        plain = 1 + self.row * len(self.samples)
        for _ in range(steps):
            counts = self.speculation._counts(self.samples, [PANEL - 1] * len(self.samples), len(self.samples))
            self.counts.append(counts)
            took = 1 + self.row * (sum(counts) + len(counts))
            self.speculation.timed(sum(counts) + len(counts), took * (1 + 0.05 * self.rng.standard_normal()))
            for sample, count in zip(self.samples, counts, strict=True):
                right = int((np.cumprod(self.rng.random(count) < self.right)).sum())
                tokens += 1 + right
                if count:
                    self.speculation.learn(sample, right, count)
            seconds += took + self.drafting * max(counts)
        return tokens / seconds * plain / len(self.samples)


@pytest.mark.parametrize("samples", [1, 4, 7])
@pytest.mark.parametrize("drafting", [0.0, 0.1])
def test_where_guesses_are_wrong_they_cost_little(samples, drafting):
    clock = Clock(0.0, samples=samples, drafting=drafting)
    assert clock.speed(200) > (0.97 if drafting else 0.98)
    assert clock.speed(2000) > (0.99 if drafting else 0.995)


@pytest.mark.parametrize(
    ("right", "drafting", "samples", "least"),
    [
        (0.97, 0, 1, 4.5),
        (0.7, 0, 1, 1.9),
        (0.3, 0, 1, 1.15),
        (0.7, 0.1, 1, 1.55),
        # A turn of the draft takes its time whether one sample drafts or all do: the best plan gives 1.45 and 1.11.
        (0.97, 0.2, 4, 1.44),
        (0.5, 0.2, 4, 1.09),
    ],
)
def test_where_guesses_are_right_there_are_more(right, drafting, samples, least):
    assert Clock(right, drafting=drafting, samples=samples).speed(1000) > least


def test_rows_that_cost_as_much_as_steps_are_not_guessed_for():
    """A step that is bound by arithmetic: what that costs is learnt."""
    clock = Clock(0.5, row=10.0)
    clock.speed(300)
    assert np.mean(clock.counts[100:]) < 0.1


def test_guesses_go_to_the_samples_whose_guesses_are_right():
    clock = Clock(0.9, samples=4)
    for sample in clock.samples[2:]:
        sample.luck.tried = 40.0
    counts = clock.speculation._counts(clock.samples, [7] * 4, 4)
    assert counts == [2, 2, 0, 0]


@pytest.mark.parametrize("rows", [8, 9, 16])
def test_no_guess_begins_another_panel_of_rows(rows):
    clock = Clock(0.99, samples=rows)
    assert sum(clock.speculation._counts(clock.samples, [7] * rows, rows)) == -rows % PANEL


def test_a_text_that_begins_to_repeat_itself_is_noticed():
    clock = Clock(0.0)
    clock.speed(500)
    clock.right = 0.95
    clock.speed(300)
    assert np.mean(clock.counts[-100:]) > 4


def test_a_draft_that_is_too_short_or_knows_too_few_tokens_guesses_what_it_can(caplog):
    for draft in (FakeDraft(400, 4, max_positions=20), FakeDraft(6, 4)):
        engine = drafting(draft)
        numbers = [engine.add_request([first, 2, 3], Sampling(40)) for first in range(3)]
        found = run(engine)
        assert all(found[number, 0] == alone([number, 2, 3], Sampling(40)) for number in numbers)
        assert engine.statistics.accepted_tokens > 0
    draft = FakeDraft(400, 4)
    object.__setattr__(draft.config, "vocab_size", 12)
    draft.logits = lambda past: FakeDraft.logits(draft, past)[:12]
    engine, seen, step = drafting(draft), [], draft.step
    draft.step = lambda tokens, *rest: seen.extend(token for new in tokens for token in new) or step(tokens, *rest)
    for number, sampling in enumerate((Sampling(20), Sampling(20, logit_bias={3: 1.0, 15: 0.5}))):
        engine.add_request([1, 2, 3], sampling)
        assert run(engine) == {(number, 0): alone([1, 2, 3], sampling)}
    assert max(seen) < 12
    assert not caplog.text, "the draft model failed"


def test_a_draft_that_always_fails_ends_no_request(caplog):
    """Whatever it raises: it is tried less and less, and the log says so."""
    draft, steps = FakeDraft(400, 4), 0

    def step(*_):
        nonlocal steps
        steps += 1
        raise IndexError("on purpose")

    draft.step = step
    engine = drafting(draft)
    engine.add_request([1, 2, 3], Sampling(200))
    assert run(engine) == {(0, 0): alone([1, 2, 3], Sampling(200))}
    assert 0 < steps < 60
    assert "nothing is drafted: IndexError: on purpose" in caplog.text


def test_a_drafts_prompt_goes_on_from_step_to_step():
    """A long prompt holds no other request up: a step computes no more of it than of the engine's own prompts."""
    draft = FakeDraft(400, 4)
    engine, computed = drafting(draft, max_step_tokens=20, pages=400), []
    for first in (1, 2):
        engine.add_request([first, *range(20)] * 14, Sampling(60))
    while not engine.is_idle:
        before = draft.computed
        engine.step()
        computed.append(draft.computed - before)
    assert sum(computed) > 600
    assert max(computed) <= 20 + PANEL
    assert engine.statistics.accepted_tokens > 30


def test_a_token_that_only_the_draft_knows_is_not_guessed():
    engine, seen = drafting(Nonsense(100, 4)), []
    step = engine.model.step
    engine.model.step = lambda tokens, *rest: (
        seen.extend(token for new in tokens for token in new) or step(tokens, *rest)
    )
    engine.add_request([1, 2, 3], Sampling(20))
    assert run(engine) == {(0, 0): alone([1, 2, 3], Sampling(20))}
    assert max(seen) < VOCAB


def test_a_draft_shares_prefixes_within_a_namespace_and_gives_pages_back():
    draft = FakeDraft(60, 4)
    engine = drafting(draft)
    prompt = list(np.random.default_rng(0).integers(0, VOCAB, 40))
    computed = []
    for namespace in ("a", "a", "b"):
        before = draft.computed
        list(engine.stream(prompt, Sampling(6), namespace=namespace))
        list(engine.stream(prompt, Sampling(6), namespace=namespace))
        computed.append(draft.computed - before)
    assert computed[1] < computed[0] - 30 < computed[2]
    for first in range(30):  # more than its pages hold at once
        list(engine.stream([first % VOCAB] * 20, Sampling(8)))
    pool = engine._speculation._draft._pool
    pool.check_integrity()
    assert pool.num_used <= 8


def test_what_cannot_draft_is_refused():
    model = FakeModel(9, 4)
    for speculate in ("look-up", 5):
        with pytest.raises(ContractTypeError, match="speculate: expected 'lookup', 'mtp', 'eagle3' or a model, got"):
            Engine(model, speculate=speculate)
    with pytest.raises(ContractError, match="its own pages"):
        Engine(model, speculate=model)


def test_the_rows_whose_logits_are_wanted():
    offsets = np.array([0, 3, 4, 9], np.uint32)
    assert _last_rows(offsets, [2, 1, 5]).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for counts in ([0, 1, 1], [1, 2, 1]):
        with pytest.raises(ContractError, match=r"counts: request \d has \d, expected 1 to \d"):
            _last_rows(offsets, counts)


def test_a_request_that_shrinks_keeps_what_is_known_of_it():
    pool = PagePool(20, 4)
    known = PrefixCache(pool)
    tokens = list(range(30))
    known.start("a", tokens)
    known.store("a", tokens)
    events = []
    pool.reserve("a", 9)
    pool.shrink("a", 9)
    pool.listen(lambda event: events.append(event.kind))
    known.store("a", tokens)
    assert events == []  # nothing anew
    pool.shrink("a", 10)  # into page 5, which is known
    pool.reserve("a", 10)
    assert known.store("a", [*tokens[:20], *range(50, 60)]) == 28
    assert known.match([*tokens[:20], *range(50, 60)]) == 28
    pool.check_integrity()
