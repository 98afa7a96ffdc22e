"""The cache manager: pages that never collide, come back when they are freed, and hold what was appended, under
interrupts, threads and long requests too. tests/hostile draws its operations.
"""

import threading
import tracemalloc

import numpy as np
import pytest
import torch

from paged_kv.arrays.host import as_numpy
from paged_kv.calls import kv_copy
from paged_kv.errors import (
    ContractError,
    ContractTypeError,
    PoolExhausted,
    RequestError,
    ShapeError,
    ToolchainError,
)
from paged_kv.page import PagedKVCacheManager, append_paged_kv_cache
from support.interrupts import interrupted_anywhere
from support.kinds import WRITABLE, bytes_of, kind_of, make


def manager(kind="numpy", dtype="float32", pages=6, size=4) -> PagedKVCacheManager:
    return PagedKVCacheManager(pages, size, 2, 8, dtype, kind=kind)


def tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*shape, 2, 8), np.float32)


def held(of: PagedKVCacheManager, request_id) -> np.ndarray:
    """Return what a request's pages hold, `[2, length, Hk, D]`."""
    pages = as_numpy(of.get_page_table(request_id), "pages")
    both = as_numpy(of.kv_cache, "kv_cache")[pages].swapaxes(0, 1)
    return both.reshape(2, -1, 2, 8)[:, : of.get_seq_len(request_id)]


def test_one_token_after_another_fills_pages_of_its_own():
    it = manager()
    a, b = tokens(0, 2, 9), tokens(1, 2, 6)
    for i in range(9):
        it.append("a", a[0, i], a[1, i])
        if i < 6:
            it.append("b", b[0, i], b[1, i])
    np.testing.assert_array_equal(held(it, "a"), a)
    np.testing.assert_array_equal(held(it, "b"), b)
    assert (it.get_seq_len("a"), it.get_seq_len("b")) == (9, 6)
    tables = [as_numpy(it.get_page_table(r), "t") for r in "ab"]
    assert [len(table) for table in tables] == [3, 2]
    assert len(set(np.concatenate(tables).tolist())) == 5


def test_unknown_requests():
    it = manager()
    assert it.get_page_table("a") is None
    assert it.get_seq_len("a") == 0
    with pytest.raises(RequestError, match="'a' is unknown"):
        it.free("a")
    it.append("a", *tokens(0, 2))
    it.free("a")
    assert it.get_page_table("a") is None
    assert it.pool.num_free == 6


def test_a_freed_request_makes_room():
    it = manager()
    it.append("a", *tokens(0, 2, 24))
    before = bytes_of(it.kv_cache)
    for request in ("a", "b"):
        with pytest.raises(PoolExhausted, match=f"request '{request}'.*0 of 6 are free"):
            it.append(request, *tokens(1, 2))
    assert bytes_of(it.kv_cache) == before
    assert (it.get_seq_len("a"), it.get_page_table("b")) == (24, None)
    it.free("a")
    it.append("b", *tokens(1, 2))
    np.testing.assert_array_equal(held(it, "b"), tokens(1, 2)[:, None])
    it.pool.check_integrity()


@pytest.mark.parametrize("kind", WRITABLE)
def test_arrays_of_every_kind_can_be_appended(kind):
    for mine in ("numpy", "torch"):
        it = manager(mine)
        it.append(7, *(make(kind, side) for side in tokens(0, 2, 5)))
        np.testing.assert_array_equal(held(it, 7), tokens(0, 2, 5))
        assert (kind_of(it.kv_cache), kind_of(it.get_page_table(7))) == (mine, mine)


def test_torch_is_the_kind_where_it_is_imported():
    it = PagedKVCacheManager(4, 2, 1, 8)
    assert isinstance(it.kv_cache, torch.Tensor)
    assert (it.kv_cache.shape, it.kv_cache.dtype) == ((4, 2, 2, 1, 8), torch.float16)
    assert PagedKVCacheManager(4, 2, 1, 8, torch.bfloat16, torch.device("cpu")).kv_cache.dtype == torch.bfloat16


def test_its_tables_are_those_of_the_functions():
    it = manager("torch")
    it.append("a", *tokens(0, 2, 5))
    row = torch.ones(1, 2, 8)
    append_paged_kv_cache(row, row, it.kv_cache, it.get_page_table("a")[None], torch.tensor([1]), it.page_size)
    it.append("a", *tokens(1, 2, 2))  # the first of them where the function wrote: the manager did not know of it
    np.testing.assert_array_equal(held(it, "a"), np.concatenate([tokens(0, 2, 5), tokens(1, 2, 2)], axis=1))


def test_a_compiler_that_is_missing_takes_no_pages(monkeypatch):
    def missing(_: object) -> None:
        raise ToolchainError("no compiler")

    it = manager()
    monkeypatch.setattr(kv_copy, "runtime_on", missing)
    with pytest.raises(ToolchainError):
        it.append("a", *tokens(0, 2))
    assert it.get_page_table("a") is None
    assert it.pool.num_free == 6


@pytest.mark.parametrize(
    ("k", "v", "error", "said"),
    [
        (
            tokens(0),
            tokens(0).astype("float16"),
            ContractTypeError,
            "v: expected the cache's dtype float32, got float16",
        ),
        (tokens(0)[:1], tokens(0), ShapeError, r"k: expected \[N, 2, 8\]"),
        (tokens(0, 2), tokens(0, 3), ShapeError, "v: expected k's 2 rows, got 3"),
        (tokens(0, 1, 1), tokens(0), ShapeError, r"k: expected \[N, 2, 8\]"),
        ([1.0], tokens(0), ContractTypeError, "k: expected an array .*list"),
    ],
)
def test_tokens_that_do_not_fit_change_nothing(k, v, error, said):
    it = manager()
    before = bytes_of(it.kv_cache)
    with pytest.raises(error, match=said):
        it.append("a", k, v)
    assert it.get_page_table("a") is None
    assert it.pool.num_free == 6
    assert bytes_of(it.kv_cache) == before


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"page_size": 0}, ContractError, "page_size: expected at least 1"),
        ({"head_dim": 0}, ContractError, "head_dim: expected at least 1"),
        ({"num_kv_heads": 1.0}, ContractTypeError, "num_kv_heads: expected an integer"),
        ({"dtype": "int2"}, ContractTypeError, "dtype: 'int2' is none of"),
        ({"device": "cuda:63"}, ToolchainError, "GPU 63: MAX finds no such device"),
        ({"device": "tpu"}, ContractError, r"device: expected the CPU or a GPU \('cuda', 'cuda:1'\), got 'tpu'"),
        ({"kind": "jax"}, ContractError, "kind: expected None or 'numpy' or 'torch', got 'jax'"),
    ],
)
def test_managers_that_cannot_be(change, error, said):
    with pytest.raises(error, match=said):
        PagedKVCacheManager(**{"max_num_pages": 4, "page_size": 4, "num_kv_heads": 1, "head_dim": 8, **change})


@pytest.mark.parametrize(("request_id", "count"), [("a", 6), ("new", 5)])
def test_an_append_that_is_interrupted_anywhere_wrote_all_tokens_or_none(request_id, count):
    old, new = tokens(0, 2, 7), tokens(1, 2, count)
    before = old if request_id == "a" else old[:, :0]
    after, seen = np.concatenate([before, new], axis=1), set()

    def make() -> PagedKVCacheManager:
        it = manager(pages=8)
        it.append("a", *old)
        it.append("other", *old[:, :2])
        return it

    for it, place in interrupted_anywhere(make, lambda it: it.append(request_id, *new), 100, seed=count):
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
    it = manager(pages=60)
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for turn in range(8):
                new = tokens(100 * index + turn, 2, 13)
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
    it = manager(pages=8)
    it.append("a", *tokens(0, 2, 3))

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("paged_kv.calls.append.write_rows", fail)
    for request_id in ("a", "new"):
        with pytest.raises(RuntimeError, match="gone"):
            it.append(request_id, *tokens(1, 2, 9))
    assert (it.get_seq_len("a"), it.get_page_table("new"), it.pool.num_free) == (3, None, 7)


@pytest.mark.parametrize("request_id", [[], {}, np.zeros(1), ([],)])
def test_unhashable_ids_are_refused_by_every_method(request_id):
    it = manager(pages=8)
    for call in (it.get_page_table, it.get_seq_len, it.free, lambda r: it.append(r, *tokens(0, 2, 1))):
        with pytest.raises(ContractTypeError, match="request_id: expected a hashable, comparable value"):
            call(request_id)
    assert it.pool.num_free == 8
    assert not it.kv_cache.any()


def test_nan_is_no_id():
    it = manager(pages=8)
    with pytest.raises(ContractError, match="request_id must equal itself, nan does not"):
        it.append(float("nan"), *tokens(0, 2, 1))
    assert not it.kv_cache.any()


@pytest.mark.parametrize("size", [2**31, 10**5000], ids=lambda n: f"{n.bit_length()} bits")
@pytest.mark.parametrize("position", range(4))
def test_sizes_past_int32_are_refused(size, position):
    sizes = [4, 4, 2, 8]
    sizes[position] = size
    name = ("max_num_pages", "page_size", "num_kv_heads", "head_dim")[position]
    with pytest.raises(ContractError, match=f"^{name}: expected at most 2147483647, got"):
        PagedKVCacheManager(*sizes)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("pages", [2**20, 2**31 - 1])
def test_a_cache_that_does_not_fit_in_memory_is_refused(kind, pages):
    with pytest.raises(ContractError, match=r"kv_cache: shape .* of float32 does not fit in memory"):
        PagedKVCacheManager(pages, 2**20, 2**10, 2**10, "float32", kind=kind)


def test_an_empty_pool_takes_no_token():
    it = manager(pages=0)
    with pytest.raises(PoolExhausted):
        it.append("a", *tokens(0, 2, 1))
