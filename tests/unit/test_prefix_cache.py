"""Pages that requests share: what is found, evicted and copied, and in which order.

test_sharing_machine.py tries any order of calls: that no request reads another's tokens, whatever namespace or
prefix they have in common, is held there.
"""

import numpy as np
import pytest

from paged_kv.errors import ContractError, ContractTypeError, IntegrityError, PoolExhausted, RequestError
from paged_kv.options import NO_PAGE
from paged_kv.pool import PageEvent, PagePool
from support.shared_pages import SharedPages


def told(pool: PagePool) -> list[PageEvent]:
    events: list[PageEvent] = []
    pool.listen(events.append)
    return events


def test_a_prompt_that_begins_alike_shares_full_pages():
    shared = SharedPages(num_pages=10, page_size=4)
    events = told(shared.pool)
    assert shared.start("a", list(range(11))) == 0
    assert shared.start("b", [*range(8), 50, 51]) == 8
    assert shared.pool.pages("b")[:2] == shared.pool.pages("a")[:2]
    assert shared.pool.count() == (10 - 4, 0, 4)
    assert [event for event in events if event.request_id == "b"] == [
        PageEvent("hit", "b", (0, 1)),
        PageEvent("allocated", "b", (3,)),
    ]
    shared.check_all()


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 8)])
def test_the_last_token_is_left_to_compute(length, found):
    shared = SharedPages(num_pages=20, page_size=4)
    tokens = list(range(30))
    shared.start("a", tokens[:8])
    assert shared.prefixes.match(tokens[:length]) == found
    assert shared.start("b", tokens[:length]) == found


def test_pages_of_ended_requests_are_found_until_they_are_needed():
    shared = SharedPages(num_pages=4, page_size=2)
    events = told(shared.pool)
    shared.start("a", [1, 2, 3, 4, 5])
    shared.free("a")
    assert shared.pool.count() == (2, 2, 0)
    assert shared.start("b", [1, 2, 3, 4, 9]) == 4
    shared.free("b")
    shared.start("c", [7, 7, 7, 7, 7])  # takes the two free pages and evicts the last of the chain
    assert [event.pages for event in events if event.kind == "evicted"] == [(1,)]
    assert shared.prefixes.match([1, 2, 3, 4, 5]) == 2
    shared.check_all()


def test_the_prefix_used_least_recently_is_evicted_first():
    shared = SharedPages(num_pages=4, page_size=2)
    for name in (1, 2, 3):
        shared.start(name, [name, name, 0])
        shared.free(name)  # one page cached, one free
    shared.start(4, [1, 1, 0])
    shared.free(4)
    shared.start(5, [9, 9, 9])  # the free page, then the page of prefix 2
    assert [shared.prefixes.match([name, name, 0]) for name in (1, 2, 3)] == [2, 0, 2]


def test_a_page_that_was_just_found_is_not_evicted_for_the_same_request():
    shared = SharedPages(num_pages=4, page_size=2)
    shared.start("a", [1, 2, 3, 4, 5, 6, 7])
    shared.free("a")
    before = shared.pool.count()
    with pytest.raises(PoolExhausted, match=r"needs 2 more pages, 1 of 4 are free and 0 cached"):
        shared.prefixes.start("b", [1, 2, 3, 4, 5, 6, 9, 9, 9, 9])
    assert shared.pool.count() == before
    assert shared.start("c", [1, 2, 3, 4, 5, 6, 9, 9]) == 6
    shared.check_all()


def test_a_found_page_is_not_evicted_though_it_was_used_least_recently():
    shared = SharedPages(num_pages=4, page_size=2)
    for request, tokens in (("a", [1, 1, 0]), ("b", [2, 2, 2, 2, 0])):
        shared.start(request, tokens)
        shared.free(request)
    assert shared.pool.count() == (1, 3, 0)
    assert shared.start("c", [1, 1, 9, 9, 9]) == 2  # needs two more pages: the free one, and one of b's
    shared.check_all()


def test_a_fork_copies_the_partial_page_when_one_of_them_writes():
    shared = SharedPages(num_pages=10, page_size=4)
    events = told(shared.pool)
    shared.start("a", list(range(6)))
    shared.fork("a", "b")
    shared.fork("a", "c")
    assert shared.pool.num_used == 2
    with pytest.raises(
        ContractError, match=r"request 'a': page 1 is shared by other requests: pass copy= to duplicate"
    ):
        shared.pool.reserve("a", 1)
    with pytest.raises(ContractError, match="pass copy="):
        shared.pool.extend("b", 1, lambda *_: pytest.fail("nothing is written"))
    shared.append("a", [60])
    shared.append("b", [61, 62, 63])
    shared.append("c", [64])  # the last owner writes to the page itself
    assert [event.pages for event in events if event.kind == "copied"] == [(1, 2), (1, 3)]
    assert shared.pool.pages("c") == (0, 1)
    shared.check_all()
    for name in "abc":
        shared.free(name)
    assert shared.pool.num_used == 0


def test_a_copy_that_fails_changes_nothing_but_what_is_cached():
    shared = SharedPages(num_pages=3, page_size=2)
    shared.start("old", [1, 2, 3])
    shared.free("old")
    shared.start("a", [5])
    shared.fork("a", "b")
    shared.start("c", [9])
    with pytest.raises(ZeroDivisionError):
        shared.pool.reserve("b", 1, lambda *_: 1 // 0)
    assert shared.pool.pages("a") == shared.pool.pages("b")
    assert shared.prefixes.match([1, 2, 3]) == 0  # its page was to be written
    shared.check_all()


def test_pages_outside_every_window_return_and_leave_holes():
    shared = SharedPages(num_pages=4, page_size=2)
    shared.start("a", [1, 2, 3, 4, 5, 6, 7])
    assert shared.pool.drop("a", 3) == 1
    shared.dropped["a"] = 2
    assert shared.pool.pages("a")[0] == NO_PAGE
    assert shared.pool.drop("a", 3) == 0
    assert shared.pool.drop("a", 6) == 2
    shared.dropped["a"] = 6
    shared.append("a", [8, 9])
    shared.check_all()
    with pytest.raises(ContractError, match="num_tokens: expected at most 9"):
        shared.pool.drop("a", 10)
    with pytest.raises(ContractError, match="num_tokens: expected at most 3"):
        shared.pool.shrink("a", 4)
    assert shared.prefixes.match([1, 2, 3, 4, 5]) == 0  # its dropped pages were needed for the new tokens
    shared.free("a")
    shared.check_all()


def test_a_full_page_that_is_written_again_is_not_found_by_its_old_tokens():
    shared = SharedPages(num_pages=6, page_size=4)
    shared.start("a", [1, 2, 3, 4])
    shared.shrink("a", 1)
    shared.append("a", [9], store=False)
    assert shared.prefixes.match([1, 2, 3, 4, 5]) == 0
    shared.start("b", [1, 2, 3, 4, 5])
    shared.check_all()


def test_store_says_what_does_not_fit():
    shared = SharedPages(num_pages=6, page_size=2)
    shared.start("a", [1, 2, 3])
    with pytest.raises(ContractError, match=r"request 'a': 4 tokens to store, it has 3"):
        shared.prefixes.store("a", [1, 2, 3, 4])
    with pytest.raises(ContractError, match=r"request 'a': tokens 0 on are not those stored before"):
        shared.prefixes.store("a", [1, 9, 3])
    with pytest.raises(RequestError, match="unknown"):
        shared.prefixes.store("b", [1])
    for tokens in ([1.5], [[1, 2]], "ab", None, np.zeros(3), [2**63], np.zeros(2, np.uint64), [True]):
        with pytest.raises(ContractTypeError, match="tokens: expected a list of integers"):
            shared.prefixes.start("b", tokens)
    with pytest.raises(ContractTypeError, match="namespace: expected a hashable value"):
        shared.prefixes.match([1], [])
    shared.check_all()


def test_clear_forgets_prefixes_and_frees_cached_pages():
    shared = SharedPages(num_pages=6, page_size=2)
    shared.start("a", [1, 2, 3, 4, 5])
    shared.start("b", [6, 7, 8])
    shared.free("a")
    assert shared.prefixes.clear() == 3
    assert shared.pool.count() == (4, 0, 2)
    assert shared.prefixes.match([6, 7, 8]) == 0
    shared.append("b", [9])  # stores it anew
    assert shared.prefixes.match([6, 7, 8, 9, 0]) == 4
    shared.check_all()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda s: s.pages.contents.pop(0), "page 0 is cached and has no content"),
        (lambda s: s.pages.returned.append(s.pages.cached.forget([0]) and 0), "page 0 has a content, and it is free"),
        (lambda s: s.pages.shared.update({2: 3}), "page 2 counts 3 owners and has 2"),
        (lambda s: s.pages.shared.pop(2), "page 2 is held twice: by request 'b' and by request 'c'"),
    ],
)
def test_check_integrity_names_what_is_wrong_with_known_and_shared_pages(corrupt, message):
    shared = SharedPages(num_pages=6, page_size=2)
    shared.start("a", [1, 2, 3])
    shared.free("a")  # page 0 is cached, page 1 free
    shared.pool.start("b", 4)
    shared.pool.fork("b", "c")
    assert shared.pool.pages("b") == (1, 2)
    shared.pool.check_integrity()
    corrupt(shared.pool._state)
    with pytest.raises(IntegrityError, match=message):
        shared.pool.check_integrity()


def test_records_of_evicted_pages_do_not_pile_up():
    shared = SharedPages(num_pages=8, page_size=1)
    for turn in range(500):
        shared.start(turn, [turn, turn + 1, 0])
        shared.free(turn)
    assert len(shared.prefixes._records) <= 2 * 8 + 64 + 3


def test_a_listener_that_raises_changes_nothing(capsys):
    pool = PagePool(4, 2)
    pool.listen(lambda _: 1 // 0)
    assert pool.start("a", 3) == (0, 1)
    assert "ZeroDivisionError" in capsys.readouterr().err
