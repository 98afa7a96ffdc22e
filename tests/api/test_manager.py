"""The cache manager: pages that never collide, come back when they are freed, and hold what was appended."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
from support.kinds import WRITABLE, bytes_of, kind_of, make
from support.properties import examples


def manager(kind="numpy", dtype="float32", pages=6, size=4) -> PagedKVCacheManager:
    return PagedKVCacheManager(pages, size, 2, 8, dtype, kind=kind)


def tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*shape, 2, 8), np.float32)


def held(of: PagedKVCacheManager, request_id) -> np.ndarray:
    """What a request's pages hold, `[2, length, Hk, D]`."""
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


def test_a_page_is_taken_only_for_a_token_that_needs_it():
    it = manager()
    it.append("a", *tokens(0, 2, 4))
    assert len(it.get_page_table("a")) == 1
    it.append("a", *tokens(0, 2))
    assert len(it.get_page_table("a")) == 2


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
        (tokens(0), tokens(0).astype("float16"), ContractTypeError, "v: dtype float16, the cache's is float32"),
        (tokens(0)[:1], tokens(0), ShapeError, r"k must be \[N, 2, 8\]"),
        (tokens(0, 2), tokens(0, 3), ShapeError, "v has 3 rows, k has 2"),
        (tokens(0, 1, 1), tokens(0), ShapeError, r"k must be \[N, 2, 8\]"),
        ([1.0], tokens(0), ContractTypeError, "k must be an array .*list"),
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
        ({"page_size": 0}, ContractError, "page_size must be at least 1"),
        ({"head_dim": 0}, ContractError, "head_dim must be at least 1"),
        ({"num_kv_heads": 1.0}, ContractTypeError, "num_kv_heads must be an integer"),
        ({"dtype": "int2"}, ContractTypeError, "dtype: 'int2' is none of"),
        ({"device": "cuda:63"}, ToolchainError, "GPU 63: MAX finds no such device"),
        ({"device": "tpu"}, ContractError, r"device must be the CPU or a GPU \('cuda', 'cuda:1'\), not 'tpu'"),
        ({"kind": "jax"}, ContractError, "kind must be 'numpy' or 'torch', not 'jax'"),
    ],
)
def test_managers_that_cannot_be(change, error, said):
    with pytest.raises(error, match=said):
        PagedKVCacheManager(**{"max_num_pages": 4, "page_size": 4, "num_kv_heads": 1, "head_dim": 8, **change})


class Managed(RuleBasedStateMachine):
    """A manager against a dictionary of what each request should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.it, self.truth, self.step = manager(), {}, 0

    @rule(request=st.integers(0, 4), count=st.integers(0, 7))
    def append(self, request: int, count: int) -> None:
        self.step += 1
        new = tokens(self.step, 2, count)
        try:
            self.it.append(request, *new)
        except PoolExhausted:
            return
        self.truth[request] = np.concatenate([self.truth.get(request, np.empty((2, 0, 2, 8))), new], axis=1)

    @rule(request=st.integers(0, 4))
    def free(self, request: int) -> None:
        if self.truth.pop(request, None) is not None:
            self.it.free(request)

    @invariant()
    def every_request_holds_its_tokens(self) -> None:
        self.it.pool.check_integrity()
        for request, wanted in self.truth.items():
            np.testing.assert_array_equal(held(self.it, request), wanted)


Managed.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=20, derandomize=True, deadline=None)
TestManaged = Managed.TestCase
