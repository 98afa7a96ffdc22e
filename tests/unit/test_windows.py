"""Layers with windows that have their own pages, without a compiler: how many a text has, and where prompts begin."""

import pytest

from paged_kv.engine.disk_tier import DiskTier
from paged_kv.engine.engine import Engine
from paged_kv.engine.model import least_window_pages
from paged_kv.engine.requests import Sampling
from paged_kv.errors import ContractError
from paged_kv.options import NO_PAGE
from paged_kv.pool import PagePool, PrefixCache, WindowPages
from support.engine_runs import Chat, run, tokens
from support.fake_model import FakeDraft, FakeModel, alone

WINDOW = 6  # tokens before its own; pages of 4


def begun(num_pages=64, num_window_pages=32, **options):
    """A chat with a model that has pages of windows."""
    return Chat(FakeModel(num_pages, 4, window=WINDOW, num_window_pages=num_window_pages), **options)


def test_a_long_text_has_the_pages_of_its_window_alone():
    chat = begun(num_window_pages=least_window_pages(WINDOW, 4))
    assert chat.computed(tokens(90), new=100) == 90
    assert chat.computed(chat.text, new=3, n=2) < 190


def test_a_prompt_goes_on_where_the_pages_of_its_window_are_known():
    chat = begun()
    chat.computed(tokens(41), new=10)
    assert chat.computed([*chat.text, *tokens(5, 1)]) == 56 - 48
    assert chat.computed(tokens(41)) == 1
    few = begun(num_window_pages=4)
    few.computed(tokens(41))
    few.computed(tokens(41, 1))  # takes those pages
    assert few.computed(tokens(41)) == 41
    assert few.engine.tokens_found == 0


def test_pages_of_windows_that_were_computed_again_are_known_again():
    chat = begun(num_window_pages=6)
    prompt = tokens(41)
    for other in (2, 3):
        chat.computed(prompt)
        chat.computed(tokens(41, other))
    chat.computed(prompt)
    assert chat.computed(prompt) == 1


def test_a_restart_finds_pages_of_windows_on_the_disk(tmp_path):
    disk = DiskTier(tmp_path / "pages", 1 << 20)
    first = begun(disk=disk)
    first.computed(tokens(41), new=10)
    first.engine.flush()
    again = begun(disk=disk)
    assert again.computed([*first.text, *tokens(5, 1)]) == 56 - 48
    assert again.engine.tokens_restored == 48
    again.engine.flush()
    files = sorted((tmp_path / "pages").glob("*.window"))
    assert len(files) == 14
    for file in files:
        file.unlink()
    assert begun(disk=disk).computed(first.text) == 51


def test_a_page_of_windows_that_is_missing_shortens_what_is_restored(tmp_path):
    """A token after page 9 sees pages 8 and 9, one after page 7 none of them."""
    disk = DiskTier(tmp_path / "pages", 1 << 20)
    first = begun(disk=disk)
    first.computed(tokens(41))
    first.engine.flush()
    pages = first.engine._disk
    chain = [pages.root(None)]
    pages.grow(chain, tokens(41), 10)
    (tmp_path / "pages" / f"{chain[9].hex()}.window").unlink()
    assert begun(disk=disk).computed(tokens(41)) == 41 - 32


def test_what_is_restored_goes_on_from_pages_of_windows_in_memory(tmp_path):
    chat = begun(num_pages=12, disk=DiskTier(tmp_path / "pages", 1 << 20))
    assert chat.computed(tokens(41)) == 41
    chat.engine.flush()
    chat.computed(tokens(9, 1))  # takes the last page of those
    assert chat.computed(tokens(41)) == 1
    assert chat.engine.tokens_restored == 4


def test_a_model_that_drafts_has_windows_in_all_of_its_pages():
    draft = FakeDraft(64, 4, window=WINDOW, num_window_pages=64)
    engine = Engine(FakeModel(64, 4, window=WINDOW, num_window_pages=8), speculate=draft)
    engine.add_request(tokens(30), Sampling(40))
    assert run(engine)[0, 0] == alone(tokens(30), Sampling(40))
    with pytest.raises(
        ContractError, match="speculate: num_window_pages of a draft model: expected 0 or num_pages=8, got 5"
    ):
        Engine(FakeModel(8, 4), speculate=FakeDraft(8, 4, window=WINDOW, num_window_pages=5))


def test_what_a_token_after_some_pages_sees():
    for window_left in range(12):
        seen = WindowPages(PagePool(8, 4), window_left).seen
        for count in range(6):
            reached = {at // 4 for at in range(max(0, 4 * count - window_left), 4 * count)}
            assert set(seen(count)) == reached


def test_a_request_begins_with_holes_where_no_window_reaches():
    windows = WindowPages(PagePool(8, 4), WINDOW)
    known = PrefixCache(PagePool(8, 4), windows=windows)
    known.start("a", tokens(17))
    windows.pool.reserve("a", 17)
    known.store("a", tokens(17))
    windows.pool.drop("a", 17 - WINDOW)
    assert known.start("b", tokens(17)) == 16
    assert windows.pool.pages("b") == (NO_PAGE, NO_PAGE, *windows.pool.pages("a")[2:4])
    assert windows.pool.length("b") == 16
    windows.pool.check_integrity()
    known.clear()
    assert known.match(tokens(17)) == 0
