"""Calls whose arguments share memory: refused with nothing written, or right because what is read is copied first."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from paged_kv.cascade import merge_state, merge_state_in_place
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from paged_kv.errors import ContractError
from paged_kv.page import append_paged_kv_cache, append_paged_mla_kv_cache
from support.cases import CacheCase, build
from support.compare import assert_bits_equal, assert_close
from support.decoding import csr, load_variants, oracle, plan_sizes, planned
from support.kinds import bytes_of

CASE = build(CacheCase((17, 0, 48, 5), rank=5))  # 4 requests, 4 query heads and 2 KV heads of 32
SHAPE = CASE.q.shape


@pytest.fixture(autouse=True, scope="module")
def _variants() -> None:
    load_variants()


def refuses(call: Callable[[], Any], message: str, *arrays: Any) -> None:
    before = bytes_of(arrays)
    with pytest.raises(ContractError, match=re.escape(message)):
        call()
    assert bytes_of(arrays) == before


def in_torch(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


ITSELF = "is to be written, but some of its elements share memory"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("sinks", [None, "sinks"])
def test_what_run_writes(kind: str, sinks: str | None) -> None:
    wrapper = planned(CASE)
    arena = np.full(1 << 14, 7, np.float32)
    q = arena[: CASE.q.size].reshape(SHAPE)
    q[...] = CASE.q
    pages = CASE.k_blocks.copy()
    heads = np.zeros(8, np.float32)
    arguments: dict[str, Any] = {"q": q, "paged_kv_cache": pages} | ({"sinks": heads[:4]} if sinks else {})
    shifted = arena[8 : 8 + CASE.q.size].reshape(SHAPE)
    apart = arena[4096 : 4096 + CASE.q.size].reshape(SHAPE)
    cases = [
        ({"out": as_strided(arena[5000:], SHAPE, (0, 128, 4))}, f"out {ITSELF}"),
        ({"out": as_strided(arena[5000:], SHAPE, (512, 64, 4))}, f"out {ITSELF}"),
        ({"lse": as_strided(arena[5000:], SHAPE[:2], (0, 4))}, f"lse {ITSELF}"),
        ({"lse": as_strided(arena[5000:], SHAPE[:2], (4, 4))}, f"lse {ITSELF}"),
        ({"out": q}, "out shares memory with q"),
        ({"out": shifted}, "out shares memory with q"),
        ({"lse": q[0, 0, :16].reshape(4, 4)}, "lse shares memory with q"),
        ({"out": pages.reshape(-1)[40 : 40 + q.size].reshape(SHAPE)}, "out shares memory with paged_kv_cache"),
        ({"lse": pages.reshape(-1)[:16].reshape(4, 4)}, "lse shares memory with paged_kv_cache"),
        ({"out": apart, "lse": apart[0, 0, :16].reshape(4, 4)}, "out shares memory with lse"),
    ]
    if sinks:
        cases.append(({"lse": as_strided(heads[2:], (4, 4), (4, 0))}, f"lse {ITSELF}"))
        cases.append(({"out": as_strided(heads, (4, 4, 32), (0, 0, 0))}, f"out {ITSELF}"))
        cases.append(({"lse": as_strided(arguments["sinks"], (4, 4), (16, 4))}, "lse shares memory with sinks"))
    for change, message in cases:
        given = arguments | change
        if kind == "torch":
            given = {name: torch.from_numpy(array) for name, array in given.items()}
        refuses(lambda given=given: wrapper.run(**given), message, arena, pages, heads)


def test_neighbours_in_one_memory_are_no_overlap() -> None:
    """q, out and lse are columns of one array, and interleaved."""
    columns = np.zeros((*SHAPE[:2], 2, SHAPE[2]), np.float32)
    q, out = columns[:, :, 0], columns[:, :, 1]
    q[...] = CASE.q
    both = np.zeros((*SHAPE[:2], 2), np.float32)
    expected, lse = oracle(CASE, CASE.q)
    found = planned(CASE).run(q, CASE.k_blocks, out=out, lse=both[..., 1], return_lse=True)
    assert_close(found[0], expected, rel=1e-5, what="out")
    assert_bits_equal(columns[:, :, 0], CASE.q, what="q")
    assert np.allclose(both[..., 1], lse)
    assert not both[..., 0].any()


def buffers() -> list[np.ndarray]:
    return [np.zeros(n, np.int32) for n in (5, 20, 4)]


def in_buffers(arrays: list[Any]) -> BatchDecodeWithPagedKVCacheWrapper:
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *arrays)


@pytest.mark.parametrize(
    ("at", "array", "message"),
    [
        (0, np.broadcast_to(np.int32(0), 5), "paged_kv_indptr_buffer is read-only"),
        (0, torch.zeros(1, dtype=torch.int32).expand(5), f"paged_kv_indptr_buffer {ITSELF}"),
        (1, torch.zeros(1, dtype=torch.int32).expand(20), f"paged_kv_indices_buffer {ITSELF}"),
        (2, as_strided(np.zeros(9, np.int64), (4,), (4,)), f"paged_kv_last_page_len_buffer {ITSELF}"),
    ],
)
def test_a_fixed_buffer_that_is_one_element(at: int, array: Any, message: str) -> None:
    arrays: list[Any] = buffers()
    arrays[at] = array
    with pytest.raises(ContractError, match=message):
        in_buffers(arrays)


def test_fixed_buffers_that_share_memory() -> None:
    memory = np.zeros(40, np.int32)
    in_buffers([memory[:5], memory[5:25], memory[25:29]])
    with pytest.raises(ContractError, match="paged_kv_indices_buffer shares memory with paged_kv_last_page_len_buffer"):
        in_buffers([memory[:5], memory[5:25], memory[24:28]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_fixed_buffers_given_to_plan(dtype: type) -> None:
    """As they are, and with the new table in the wrong ones: plan reads all of it before it writes."""
    table = [array.astype(dtype) for array in csr(CASE)]
    sizes = {"q_data_type": "float32"}
    expected = planned(CASE).run(CASE.q, CASE.k_blocks)
    arrays = [np.zeros(n, dtype) for n in (5, 20, 4)]
    wrapper = in_buffers(arrays)
    for array, values in zip(arrays, table, strict=True):
        array[: len(values)] = values
    wrapper.plan(*arrays, *plan_sizes(CASE), **sizes)
    assert_bits_equal(wrapper.run(CASE.q, CASE.k_blocks), expected, what="o")

    indptr, indices, last = table
    arrays[1][:] = 0
    arrays[1][3:9], arrays[1][10:14], arrays[1][14:19] = indices, last, indptr
    wrapper.plan(arrays[1][14:19], arrays[1][3:9], arrays[1][10:14], *plan_sizes(CASE), **sizes)
    for array, values in zip(arrays, table, strict=True):
        np.testing.assert_array_equal(array[: len(values)], values)
    assert_bits_equal(wrapper.run(CASE.q, CASE.k_blocks), expected, what="o")


def test_run_does_not_write_over_the_page_table() -> None:
    memory = np.zeros(600, np.int32)
    arrays = [memory[:5], memory[5:25], memory[25:29]]
    wrapper = in_buffers(arrays)
    wrapper.plan(*csr(CASE), *plan_sizes(CASE), q_data_type="float32")
    out = memory[: CASE.q.size].view(np.float32).reshape(SHAPE)
    refuses(
        lambda: wrapper.run(CASE.q, CASE.k_blocks, out=out), "out shares memory with paged_kv_indptr_buffer", memory
    )
    wrapper.run(CASE.q, CASE.k_blocks, lse=memory[32:48].view(np.float32).reshape(4, 4))


# Appends. Pages of 4 slots, 2 heads of 8.
TABLE = (np.array([5, 3, 0], np.int32), np.array([0, 2, 2, 3], np.int32), np.array([2, 0, 1], np.int32))
AT = (np.array([0, 0, 2], np.int32), np.array([4, 5, 0], np.int32))


def test_a_cache_in_which_two_slots_are_one() -> None:
    memory = np.zeros(2048, np.float16)
    rows = np.ones((3, 2, 8), np.float16)
    whole = as_strided(memory, (6, 2, 4, 2, 8), (256, 128, 16, 16, 2))
    pair = tuple(as_strided(memory[at:], (6, 4, 2, 8), (128, 16, 16, 2)) for at in (0, 1024))
    for cache, message in ((whole, f"paged_kv_cache {ITSELF}"), (pair, f"paged_kv_cache[0] {ITSELF}")):
        refuses(lambda cache=cache: append_paged_kv_cache(rows, rows, *AT, cache, *TABLE), message, memory)
    latent = as_strided(memory, (6, 4, 16), (64, 16, 2)), np.zeros((6, 4, 4), np.float16)
    refuses(
        lambda: append_paged_mla_kv_cache(rows[:, 0].repeat(2, 1), rows[:, 0, :4], *AT, *latent, *TABLE),
        f"ckv_cache {ITSELF}",
        memory,
    )


def test_rows_in_the_cache_itself() -> None:
    """They count as they were before the call."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((6, 2, 4, 2, 8)).astype(np.float16)
    expected = cache.copy()
    k, v = cache[3, 1, 1:4], cache[5, 0, 1:4]
    for row, (page, slot) in enumerate(((3, 0), (3, 1), (0, 0))):
        expected[page, 0, slot], expected[page, 1, slot] = k[row], v[row]
    append_paged_kv_cache(k, v, *AT, cache, *TABLE)
    assert_bits_equal(cache, expected, what="cache")


def test_latent_rows_in_the_other_cache() -> None:
    """The widths differ, so the op writes one cache after the other: rows of the second lie in the first."""
    rng = np.random.default_rng(0)
    ckv, kpe = (rng.standard_normal((6, 4, width)).astype(np.float16) for width in (16, 4))
    new_ckv, new_kpe = rng.standard_normal((3, 16)).astype(np.float16), ckv[3, :3, :4]
    expected_ckv, expected_kpe = ckv.copy(), kpe.copy()
    for row, (page, slot) in enumerate(((3, 0), (3, 1), (0, 0))):
        expected_ckv[page, slot], expected_kpe[page, slot] = new_ckv[row], new_kpe[row]
    append_paged_mla_kv_cache(new_ckv, new_kpe, *AT, ckv, kpe, *TABLE)
    assert_bits_equal(ckv, expected_ckv, what="ckv")
    assert_bits_equal(kpe, expected_kpe, what="kpe")


def test_merging_in_place() -> None:
    rng = np.random.default_rng(0)
    arena = rng.standard_normal(400).astype(np.float32)

    def at(start: int, *shape: int) -> np.ndarray:
        return arena[start : start + int(np.prod(shape))].reshape(shape)

    v, s, v_other, s_other = at(0, 3, 2, 8), at(48, 3, 2), at(54, 3, 2, 8), at(102, 3, 2)
    mask = np.zeros(3, bool)
    cases = [
        ((v, s, v, s_other), "v shares memory with v_other"),
        ((v, s, at(40, 3, 2, 8), s_other), "v shares memory with v_other"),
        ((v, s, v_other, s), "s shares memory with s_other"),
        ((v, at(47, 3, 2), v_other, s_other), "v shares memory with s"),
        ((v, at(100, 3, 2), v_other, s_other), "s shares memory with v_other"),
        ((as_strided(v, v.shape, (32, 32, 4)), s, v_other, s_other), f"v {ITSELF}"),
        ((v, as_strided(s, s.shape, (0, 4)), v_other, s_other), f"s {ITSELF}"),
        ((v, s, v_other, s_other, arena.view(np.bool_)[:3]), "v shares memory with mask"),
        ((v, s, v_other, s_other, arena.view(np.bool_)[200:203]), "s shares memory with mask"),
    ]
    for arguments, message in cases:
        refuses(lambda arguments=arguments: merge_state_in_place(*arguments), message, arena, mask)
        refuses(lambda arguments=arguments: merge_state_in_place(*in_torch(*arguments)), message, arena)
    expected = merge_state(v, s, v_other, s_other)
    merge_state_in_place(v, s, v_other, s_other, ~mask)
    assert_bits_equal(v, expected[0], what="v")
    assert_bits_equal(s, expected[1], what="s")
