"""The prefixes that a router remembers, against the pool's own prefix cache, and which replica it chooses."""

import numpy as np
import pytest

from paged_kv import PagePool, PrefixCache
from paged_kv.errors import ContractError
from paged_kv.ray.prefixes import Prefixes, blocks_of


def here(*names, limit=1000, slack=4):
    prefixes = Prefixes(limit, slack)
    for name in names:
        prefixes.join(name)
    return prefixes


def test_a_block_is_known_with_all_tokens_before_it_and_its_namespace():
    tokens = list(range(50))
    assert len(blocks_of(tokens, 16)) == 3
    assert blocks_of(tokens, 16) == blocks_of(tokens[:48], 16) == blocks_of(np.array(tokens, np.int32), 16)
    assert blocks_of([9, *tokens[1:]], 16)[1:] != blocks_of(tokens, 16)[1:]
    assert not {*blocks_of(tokens, 16, b"a")} & {*blocks_of(tokens, 16, b"b"), *blocks_of(tokens, 16)}


def test_the_longest_prefix_of_each_replica_is_found():
    prefixes = here("a", "b", "c")
    prefixes.insert("a", [1, 2, 3, 4])
    prefixes.insert("b", [1, 2, 30])
    assert prefixes.match([1, 2, 3, 5]) == {"a": 3, "b": 2}
    assert prefixes.match([1, 2, 3, 4]) == {"a": 4, "b": 2}
    assert prefixes.match([]) == prefixes.match([77]) == {}


def test_who_leaves_takes_its_blocks_and_its_place_is_used_again():
    prefixes = here("a", "b")
    prefixes.insert("a", [1, 2])
    prefixes.insert("b", [1])
    prefixes.leave("a")
    prefixes.leave("a")
    assert len(prefixes) == 1
    prefixes.join("c")
    assert prefixes.match([1, 2]) == {"b": 1}
    assert prefixes.names == {"b", "c"}
    with pytest.raises(ContractError, match="name: duplicate replica"):
        prefixes.join("b")


def test_no_more_is_remembered_than_a_replica_has_pages_the_end_of_the_oldest_goes_first():
    prefixes = here("a", limit=4)
    prefixes.insert("a", [1, 2, 3])
    prefixes.insert("a", [10, 20])
    assert prefixes.match([1, 2, 3]) == {"a": 2}
    assert prefixes.match([10, 20]) == {"a": 2}
    prefixes.insert("a", list(range(100, 200)))
    assert prefixes.count("a") == len(prefixes) == 4
    assert prefixes.match(list(range(100, 200))) == {"a": 4}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_remembered_is_what_a_pool_has(seed):
    """One request at a time, in a pool that drops pages. It evicts in nearly the same order."""
    rng, size = np.random.default_rng(seed), 4
    pool = PagePool(24, size)
    known, prefixes = PrefixCache(pool), here("a", limit=24)
    starts = [rng.integers(0, 9, rng.integers(8, 40)).tolist() for _ in range(6)]
    wrong = 0
    for turn in range(300):
        prompt = starts[rng.integers(6)] + rng.integers(0, 9, rng.integers(1, 12)).tolist()
        blocks = blocks_of(prompt, size)
        guess = min(prefixes.match(blocks).get("a", 0), (len(prompt) - 1) // size)
        found = known.start(turn, prompt)
        wrong += guess * size != found
        known.store(turn, prompt)
        pool.free(turn)
        prefixes.insert("a", blocks)
    assert wrong < 60


def test_load_comes_before_prefixes_and_prefixes_before_small_differences_of_load():
    prefixes = here("a", "b", slack=4)
    prefixes.insert("a", [1, 2, 3])
    assert prefixes.rank([1, 2, 3], {"a": 4, "b": 0}) == ["a", "b"]
    assert prefixes.rank([1, 2, 3], {"a": 5, "b": 0}) == ["b", "a"]
    assert prefixes.rank([7], {"a": 1, "b": 0}) == ["b", "a"]
    assert prefixes.rank([7], {"a": 0, "b": 0}) == ["b", "a"]  # it has fewer blocks
    assert prefixes.rank([1], {}) == []
    assert prefixes.rank([1], {"unknown": 3, "a": 3})[0] == "a"


def test_new_prompts_leave_a_full_replica():
    prefixes = here("a", "b", limit=6)
    prefixes.insert("a", [1, 2, 3, 4, 5, 6])
    prefixes.insert("b", [1])
    assert prefixes.rank([1, 2, 30, 40], {"a": 0, "b": 0}) == ["b", "a"]  # 2 to compute and 2 to evict, against 3
    assert prefixes.rank([1, 2, 3, 40], {"a": 0, "b": 0}) == ["a", "b"]


def test_routers_that_have_not_met_agree():
    names = [f"r{number}" for number in range(16)]
    first, second = here(*names), here(*reversed(names))
    chosen = set()
    for prompt in range(200):
        ranks = {tuple(each.rank([prompt], dict.fromkeys(names, 0))) for each in (first, second)}
        assert len(ranks) == 1
        chosen.add(next(iter(ranks))[0])
    assert len(chosen) == 16
