"""The cache manager under interrupts, threads and long requests, and the ids and sizes that it refuses."""

import threading
import tracemalloc

import numpy as np
import pytest

from paged_kv.errors import ContractError, ContractTypeError, PoolExhausted
from paged_kv.page import PagedKVCacheManager
from support.interrupts import interrupted_anywhere


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, count, 2, 8), np.float32)


def held(it: PagedKVCacheManager, request_id: object) -> np.ndarray:
    """What a request's pages hold, `[2, length, Hk, D]`."""
    pages = it.kv_cache[it.get_page_table(request_id)].swapaxes(0, 1)
    return pages.reshape(2, -1, 2, 8)[:, : it.get_seq_len(request_id)]


@pytest.mark.parametrize(("request_id", "count"), [("a", 1), ("a", 6), ("new", 5)])
def test_an_append_that_is_interrupted_anywhere_wrote_all_tokens_or_none(request_id, count):
    old, new = tokens(0, 7), tokens(1, count)
    before = old if request_id == "a" else old[:, :0]
    after, seen = np.concatenate([before, new], axis=1), set()

    def make() -> PagedKVCacheManager:
        it = PagedKVCacheManager(8, 4, 2, 8, "float32", kind="numpy")
        it.append("a", *old)
        it.append("other", *old[:, :2])
        return it

    for it, place in interrupted_anywhere(make, lambda it: it.append(request_id, *new), 300, seed=count):
        it.pool.check_integrity()
        seen.add(length := it.get_seq_len(request_id))
        assert length in (before.shape[1], after.shape[1]), place
        if length < after.shape[1]:
            it.append(request_id, *new)
        np.testing.assert_array_equal(held(it, request_id), after)
        np.testing.assert_array_equal(held(it, "other"), old[:, :2])
        for request in {"a", "other", request_id}:
            it.free(request)
        assert it.pool.num_free == 8
    assert len(seen) == 2


def test_the_memory_of_an_append_does_not_grow_with_the_request():
    peaks = []
    for length in (10, 20_000):
        it = PagedKVCacheManager(20_100, 1, 1, 8, "float32", kind="numpy")
        it.append("a", *np.zeros((2, length, 1, 8), np.float32))
        token = np.ones((2, 1, 8), np.float32)
        it.append("a", *token)
        tracemalloc.start()
        for _ in range(5):
            it.append("a", *token)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert it.get_seq_len("a") == length + 6
    assert peaks[1] < peaks[0] + 8 * 20_000 // 4  # one copy of the list of pages is 8 bytes a page


def test_threads_share_a_manager():
    it = PagedKVCacheManager(60, 4, 2, 8, "float32", kind="numpy")
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for turn in range(25):
                new = tokens(100 * index + turn, 13)
                for i in range(13):
                    it.append(index, *new[:, i])
                np.testing.assert_array_equal(held(it, index), new)
                it.free(index)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    it.pool.check_integrity()
    assert it.pool.num_free == 60


def test_a_write_that_fails_takes_no_pages(monkeypatch):
    it = PagedKVCacheManager(8, 4, 2, 8, "float32", kind="numpy")
    it.append("a", *tokens(0, 3))

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("paged_kv.calls.append.write_rows", fail)
    for request_id in ("a", "new"):
        with pytest.raises(RuntimeError, match="gone"):
            it.append(request_id, *tokens(1, 9))
    assert (it.get_seq_len("a"), it.get_page_table("new"), it.pool.num_free) == (3, None, 7)


@pytest.mark.parametrize("request_id", [[], {}, np.zeros(1), ([],)])
def test_unhashable_ids_are_refused_by_every_method(request_id):
    it = PagedKVCacheManager(8, 4, 2, 8, "float32", kind="numpy")
    for call in (it.get_page_table, it.get_seq_len, it.free, lambda r: it.append(r, *tokens(0, 1))):
        with pytest.raises(ContractTypeError, match="request_id must be hashable"):
            call(request_id)
    assert it.pool.num_free == 8
    assert not it.kv_cache.any()


def test_nan_is_no_id():
    it = PagedKVCacheManager(8, 4, 2, 8, "float32", kind="numpy")
    with pytest.raises(ContractError, match="request_id must equal itself, nan does not"):
        it.append(float("nan"), *tokens(0, 1))
    assert not it.kv_cache.any()


@pytest.mark.parametrize("size", [2**31, 2**62, 2**64, 10**400, 10**5000], ids=lambda n: f"{n.bit_length()} bits")
@pytest.mark.parametrize("position", range(4))
def test_sizes_past_int32_are_refused(size, position):
    sizes = [4, 4, 2, 8]
    sizes[position] = size
    name = ("max_num_pages", "page_size", "num_kv_heads", "head_dim")[position]
    with pytest.raises(ContractError, match=f"^{name} must be at most 2147483647, not"):
        PagedKVCacheManager(*sizes)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("pages", [2**20, 2**31 - 1])
def test_a_cache_that_does_not_fit_in_memory_is_refused(kind, pages):
    with pytest.raises(ContractError, match=r"kv_cache: shape .* of float32 does not fit in memory"):
        PagedKVCacheManager(pages, 2**20, 2**10, 2**10, "float32", kind=kind)


def test_what_is_no_kind_is_refused():
    for kind in ("jax", 3, np.zeros(2), str):
        with pytest.raises(ContractError, match="kind must be 'numpy' or 'torch', not"):
            PagedKVCacheManager(4, 4, 2, 8, kind=kind)


def test_an_empty_pool_takes_no_token():
    it = PagedKVCacheManager(0, 4, 2, 8, "float32", kind="numpy")
    with pytest.raises(PoolExhausted):
        it.append("a", *tokens(0, 1))
