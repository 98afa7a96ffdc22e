"""What torch and MAX pass to each other: float8 as bytes, and nothing without an element.

torch on the CPU stands in for a GPU, and refuses what some versions of it refuse there.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType

from paged_kv import cascade, page
from paged_kv.arrays import exchange
from paged_kv.arrays.exchange import copied_to, to_max, to_torch
from paged_kv.arrays.host import as_numpy
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.mla import BatchMLAPagedAttentionWrapper
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper
from support.stand_in import STAND_IN, tensors

pytestmark = pytest.mark.usefixtures("stand_in", "strict")

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.fixture
def strict(monkeypatch):
    """float8 and empty tensors are refused by DLPack in both directions; what did cross is in the list."""
    crossed: list[tuple[str, str, int]] = []
    exported, received = torch.utils.dlpack.to_dlpack, exchange._received

    def check(way: str, dtype: str, elements: int) -> None:
        if "float8" in dtype or not elements:
            raise BufferError(f"{way}: {elements} elements of {dtype} cannot cross")
        crossed.append((way, dtype, elements))

    def to_dlpack(tensor: torch.Tensor) -> object:
        check("to MAX", str(tensor.dtype), tensor.numel())
        return exported(tensor)

    def receive(buffer: Buffer) -> torch.Tensor:
        check("to torch", buffer.dtype.name, buffer.num_elements)
        return received(buffer)

    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", to_dlpack)
    monkeypatch.setattr(exchange, "_received", receive)
    return crossed


def random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).uniform(-2, 2, shape).astype(np.float32).astype(dtype)


def table(lengths: list[int], size: int) -> tuple[np.ndarray, ...]:
    """indptr, indices, last_page_len and lengths of requests whose pages stand in their order."""
    array = np.array(lengths, np.int32)
    pages = -(-array // size)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    return indptr, np.arange(indptr[-1], dtype=np.int32), np.where(array > 0, (array - 1) % size + 1, 0), array


def bits(array: object) -> np.ndarray:
    view = as_numpy(array, "result")
    return view.view(f"u{view.itemsize}")


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 8), (0,), (0, 3, 8), (3, 0)], ids=str)
def test_float8_and_empty_arrays_cross_both_ways(shape, dtype):
    tensor = tensors(random(*shape).astype(getattr(ml_dtypes, dtype)))
    buffer = to_max(tensor, CPU())
    assert (tuple(buffer.shape), buffer.dtype) == (shape, DType[dtype])
    found = to_torch(buffer, CPU())
    assert (tuple(found.shape), found.dtype) == (shape, tensor.dtype)
    if tensor.numel():
        found.view(torch.uint8).fill_(7)  # the same memory all the way
        assert tensor.view(torch.uint8).eq(7).all()


def test_an_empty_host_buffer_is_copied_without_its_address():
    found = copied_to(Buffer(DType.float32, [0, 4], CPU()), CPU())
    assert (tuple(found.shape), found.dtype) == ((0, 4), DType.float32)


def test_the_stand_in_refuses():
    """Planted: the ways that are not taken do fail."""
    with pytest.raises(BufferError):
        torch.utils.dlpack.to_dlpack(torch.zeros(3, dtype=torch.float8_e5m2))
    with pytest.raises(BufferError):
        exchange._received(Buffer(DType.float32, [0], CPU()))


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_decode_over_float8(strict, q_dtype, kv_dtype):
    q, cache = random(2, 4, 16, dtype=q_dtype), random(5, 2, 4, 2, 16, dtype=kv_dtype)
    requests = table([9, 3], 4)[:3]
    results = []
    for kind in (np.asarray, tensors):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(*requests, 4, 2, 16, 4, q_data_type=q_dtype, kv_data_type=kv_dtype, o_data_type="bfloat16")
        results.append(wrapper.run(kind(q), kind(cache), k_scale=0.5, return_lse=True))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(found), bits(expected))
    assert [dtype for way, dtype, _ in strict if way == "to MAX"].count("torch.uint8") == 2  # K and V


@pytest.mark.parametrize("dtype", FLOAT8)
def test_append_of_float8(dtype):
    k, v = random(3, 2, 8, dtype=dtype), random(3, 2, 8, dtype=dtype)
    caches = []
    for kind in (np.asarray, tensors):
        cache = kind(np.zeros((2, 2, 4, 2, 8), dtype))
        where = (np.zeros(3, np.int32), np.array([0, 4, 5]))
        page.append_paged_kv_cache(kind(k), kind(v), *where, cache, np.array([1, 0]), np.array([0, 2]), np.array([2]))
        caches.append(bits(cache))
    np.testing.assert_array_equal(*caches)
    assert caches[0].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("pages", [0, 2])
def test_decode_of_nothing(lengths, pages):
    """No rows, no tokens, no pages; o and lse may be empty too."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*table(lengths, 4)[:3], 4, 2, 8, 4, q_data_type="float32")
    q, cache = torch.ones(len(lengths), 4, 8), torch.full((pages, 2, 4, 2, 8), torch.nan)
    o, lse = wrapper.run(q, cache, return_lse=True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:2])
    assert not o.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize(("rows", "lengths"), [([0], [0]), ([0, 2], [0, 6]), ([0, 0], [0, 0]), ([], [])], ids=str)
def test_prefill_of_nothing(rows, lengths):
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    indptr, indices, last, _ = table(lengths, 4)
    wrapper.plan(offsets, indptr, indices, last, 4, 2, 8, 4, causal=True, q_data_type="float32")
    q, cache = torch.ones(int(offsets[-1]), 4, 8), torch.ones(len(indices), 2, 4, 2, 8)
    o, lse = wrapper.run(q, cache, return_lse=True)
    assert o.eq(1).all()
    assert (o.shape, lse.shape) == (q.shape, q.shape[:2])


def test_single_decode_over_no_tokens():
    o, lse = single_decode_with_kv_cache(torch.ones(4, 8), *torch.ones(2, 0, 2, 8), return_lse=True)
    assert not o.any()
    assert lse.isneginf().all()


def test_a_latent_cache_without_pages():
    wrapper = BatchMLAPagedAttentionWrapper(None)
    none = np.zeros(0, np.int32)
    wrapper.plan(
        *(np.zeros(2, np.int32), np.zeros(2, np.int32), none, np.zeros(1, np.int32)),
        *(4, 16, 8, 4, False, 0.1, "float32", "float32"),
    )
    arrays = torch.ones(0, 4, 16), torch.ones(0, 4, 8), torch.ones(0, 4, 16), torch.ones(0, 4, 8)
    o, lse = wrapper.run(*arrays, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 4, 16), (0, 4))


@pytest.mark.parametrize("pages", [0, 3])
def test_append_of_no_rows(pages):
    cache = torch.full((pages, 2, 4, 2, 8), 5.0)
    none = torch.zeros(0, dtype=torch.int32)
    rows = torch.ones(0, 2, 8)
    page.append_paged_kv_cache(rows, rows, none, none, cache, none, torch.zeros(1, dtype=torch.int32), none)
    assert cache.eq(5).all()


def test_merging_no_states():
    v, s = cascade.merge_states(torch.ones(0, 2, 4, 8), torch.ones(0, 2, 4))
    assert (v.shape, s.shape) == ((0, 4, 8), (0, 4))


def test_a_buffer_of_float8_is_viewed():
    q, k = torch.ones(4, 8), random(9, 2, 8, dtype=FLOAT8[0])
    buffers = [to_max(tensors(array), CPU()) for array in (k, k)]
    views = [STAND_IN.view(buffer, "k") for buffer in buffers]
    assert {view.dtype for view in views} == {torch.float8_e4m3fn}
    found = single_decode_with_kv_cache(q, *views)
    np.testing.assert_array_equal(found.numpy(), single_decode_with_kv_cache(q.numpy(), k, k))
