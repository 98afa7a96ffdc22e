"""Hybrid models without a compiler: where their states are kept, and how much of a prompt is computed again."""

from contextlib import suppress

import pytest

from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.errors import ContractError, IntegrityError, PoolExhausted
from paged_kv.pool import PagePool, PrefixCache
from support.engine_runs import Chat, tokens
from support.fake_model import FakeDraft, FakeModel


def begun(num_pages=64, num_states=32, **options):
    """A chat with a hybrid model, pages of 4."""
    return Chat(FakeModel(num_pages, 4, num_states=num_states), **options)


def test_a_prompt_goes_on_from_the_last_full_page_of_the_turn_before():
    chat = begun()
    assert chat.computed(tokens(21), new=10) == 21
    assert chat.computed([*chat.text, *tokens(5, 1)]) == 36 - 28  # of 31 tokens the last has no K and V


def test_the_same_prompt_again_is_its_last_page():
    for count, last in ((21, 1), (20, 4)):
        chat = begun()
        assert [chat.computed(tokens(count)) for _ in range(2)] == [count, last]


def test_where_two_prompts_part_the_third_begins():
    chat = begun()
    prompts = [[*tokens(13), *tokens(17, seed)] for seed in (1, 2, 3)]
    assert [chat.computed(prompt) for prompt in prompts] == [30, 30, 18]


def test_a_long_prompt_has_checkpoints_in_between():
    chat = begun(num_states=8)  # one in 64 tokens
    assert chat.computed(tokens(200)) == 200
    assert chat.computed([*tokens(200)[:150], *tokens(10, 1)]) == 160 - 128


def test_a_text_that_is_written_replaces_its_checkpoint():
    chat = begun(num_states=8)
    chat.computed(tokens(5), new=50)
    assert chat.engine.pool.count_states().cached == 2  # of the prompt, and of the last full page
    assert chat.computed(chat.text[:10]) == 10 - 4


def test_two_slots_are_enough_for_one_request_after_the_other():
    chat = begun(num_states=2)
    assert [chat.computed(tokens(21), new=30) for _ in range(2)] == [21, 21]
    assert chat.computed(tokens(9), n=3) >= 9


def test_samples_of_a_prompt_go_on_from_its_state():
    chat = begun()
    assert chat.computed(tokens(21), new=12, n=4) == 21


def test_a_restart_finds_pages_and_state_on_the_disk(tmp_path):
    disk = DiskTier(tmp_path / "pages", 1 << 20)
    first = begun(disk=disk)
    assert first.computed(tokens(21), new=10) == 21
    first.engine.flush()
    again = begun(disk=disk)
    assert again.computed([*first.text, *tokens(5, 1)]) == 36 - 28
    assert again.engine.tokens_restored == 28
    for file in (tmp_path / "pages").glob("*.state"):  # without them no page is of use
        file.unlink()
    assert begun(disk=disk).computed(first.text) == 31


def test_a_hybrid_model_does_not_draft():
    with pytest.raises(ContractError, match="speculate: a model with recurrent layers does not draft"):
        Engine(FakeModel(8, 4), speculate=FakeDraft(8, 4, num_states=4))


@pytest.fixture
def known():
    """A prefix cache in which the first 8 of 12 tokens have a checkpoint; pages of 4, slots 0 to 4."""
    known = PrefixCache(PagePool(8, 4, num_states=5))
    known.start("a", tokens(12))
    slots = known.pool.take_states("a", 2)
    known.store("a", tokens(12), states={8: slots[0]})
    known.pool.keep_state("a", slots[1])
    return known


def test_a_hit_ends_at_a_checkpoint(known):
    longer = tokens(20)
    assert (known.match(longer), known.reach(longer)) == (8, 12)
    assert known.start("b", longer) == 8
    assert known.pool.state("b") == known.checkpoint("a", 8)
    assert known.checkpoint("a", 12) is None
    known.pool.check_integrity()


def test_slots_are_free_cached_or_used(known):
    pool = known.pool
    assert pool.count_states() == (3, 1, 1)
    known.start("b", tokens(20))
    assert pool.count_states() == (3, 0, 2)
    slots = pool.take_states("b", 9)  # its own is a checkpoint, which others may find
    assert len(slots) == 3
    with pytest.raises(PoolExhausted, match="request 'c': 1 slots of state are needed, 0 of 5 are free, cached or its"):
        pool.start("c", 3) and pool.take_states("c", 1)
    pool.keep_state("b", slots[1])
    assert pool.count_states() == (2, 1, 2)
    assert pool.take_states("b", 9)[-1] == slots[1]  # in place
    pool.free("b")
    pool.free("a")
    assert pool.count_states() == (5, 0, 0)
    pool.check_integrity()


def test_a_slot_that_is_evicted_leaves_its_page_and_a_page_takes_its_slot_along(known):
    pool = known.pool
    pool.free("a")
    pool.start("b", 1)
    assert len(pool.take_states("b", 5)) == 5
    assert (known.match(tokens(20)), known.reach(tokens(20))) == (0, 12)
    pool.free("b")
    known.start("a", tokens(12))
    (slot,) = pool.take_states("a", 1)
    known.store("a", tokens(12), states={8: slot})
    pool.free("a")
    pool.start("c", 32)
    assert pool.count_states() == (5, 0, 0)
    pool.check_integrity()


def test_a_fork_shares_the_state_until_one_of_them_goes_on(known):
    pool, slot = known.pool, known.pool.state("a")
    pool.fork("a", "b")
    assert pool.state("b") == slot
    (new,) = pool.take_states("a", 1)
    assert new != slot
    pool.keep_state("a", new)
    assert pool.take_states("b", 1) == (slot,)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda known: known.pool.keep_state("a", 4), r"request 'a': slot: expected one of its states \{1\}, got 4"),
        (
            lambda known: known.store("a", tokens(12), states={6: 1}),
            "states must be at ends of pages of 4 of 12 tokens",
        ),
        (lambda known: known.store("a", tokens(12), states={16: 1}), "of 12 tokens, not at 16"),
        (lambda known: known.store("a", tokens(12), states={12: 0}), "states has slots .* that are not its own"),
        (lambda known: known.pool.take_states("a", 1, 2), "most: expected at least 2, got 1"),
    ],
)
def test_what_is_not_its_own_is_refused(known, call, message):
    with pytest.raises(ContractError, match=message):
        call(known)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: s.states.returned.append(1), "slot 1 is held twice"),
        (lambda s: s.checkpoints.clear(), "the checkpoints of pages are not the slots with contents"),
        (lambda s: s.pages.contents.clear() or s.pages.cached.forget([*s.pages.cached]), "has the checkpoint 0"),
        (lambda s: setattr(s.requests["a"], "state", None), "slot 1 is leaked"),
    ],
)
def test_check_integrity_names_what_is_wrong_with_slots(known, corrupt, message):
    corrupt(known.pool._state)
    with pytest.raises(IntegrityError, match=message):
        known.pool.check_integrity()


def test_slots_follow_from_the_table_after_an_exception(known):
    state = known.pool._state
    before = known.pool.count_states()
    with suppress(KeyboardInterrupt), state:
        state.states.returned, state.states.shared = [], {1: 7}
        state.states.contents[3] = 7  # a page without contents
        raise KeyboardInterrupt
    assert known.pool.count_states() == before
    known.pool.check_integrity()
