"""The behaviour that is special to arrays on a GPU, without one: torch tensors on the CPU stand in for them.

What a GPU shares with the host is tried there too by the tests of tests/api whose parameter is "gpu", and by
test_drawn.py. What only a GPU can show (streams, kernels) is in tests/gpu; the kernels run in tests/gpu/model.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType

from paged_kv import page
from paged_kv.arrays import devices, dlpack_transfer
from paged_kv.arrays.dlpack_transfer import copied_to, to_max, to_torch
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.streams import Streams
from paged_kv.arrays.types import ArrayDevice
from paged_kv.cache import PagedKVCache, gather_kv, init_paged_kv_cache
from paged_kv.calls.buffers import FixedBuffers
from paged_kv.calls.rows import DecodeBatch
from paged_kv.calls.table import Table
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.errors import ContractError, ContractTypeError, ShapeError, ToolchainError
from paged_kv.flashinfer.wrapper import TABLE_BUFFERS
from paged_kv.mla import BatchMLAPagedAttentionWrapper
from paged_kv.page import PagedKVCacheManager
from paged_kv.prefill import BatchPrefillWithPagedKVCacheWrapper
from support.compare import assert_bits_equal
from support.refusing import refuses
from support.stand_in import STAND_IN, OnGpu, tensors

pytestmark = pytest.mark.usefixtures("decode_variants")


@pytest.mark.usefixtures("stand_in")
def test_a_max_buffer_comes_back_as_one(monkeypatch):
    monkeypatch.setattr(devices, "device_of", lambda **_: STAND_IN)
    q, k, v = (torch.randn(shape) for shape in ((4, 16), (9, 2, 16), (9, 2, 16)))
    o, lse = single_decode_with_kv_cache(Buffer.from_dlpack(q), k, v, return_lse=True)
    assert isinstance(o, Buffer)
    assert isinstance(lse, Buffer)
    monkeypatch.undo()
    expected = single_decode_with_kv_cache(q.numpy(), k.numpy(), v.numpy(), return_lse=True)
    np.testing.assert_array_equal(o.to_numpy(), expected[0])
    np.testing.assert_array_equal(lse.to_numpy(), expected[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_operands_describe_the_same_memory(layout):
    shape = (7, 2, 5, 3, 8) if layout == "NHD" else (7, 2, 3, 5, 8)
    cache = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)[1:, :, ::2]
    flat_k, flat_v, numbers = Pages.of(cache, layout, device=STAND_IN).operands()
    expected = Pages.of(cache.numpy(), layout)
    pages, slots, heads, dim, *strides = numbers
    for flat, view, (start, page_stride, slot_stride, head_stride) in zip(
        (flat_k, flat_v), (expected.k, expected.v), (strides[:4], strides[4:]), strict=True
    ):
        assert view.shape == (pages, slots, heads, dim)
        elements = flat.to_numpy()
        for at in np.ndindex(*view.shape[:3]):
            begin = start + at[0] * page_stride + at[1] * slot_stride + at[2] * head_stride
            np.testing.assert_array_equal(elements[begin : begin + dim], view[at])


def test_plan_refuses_arrays_on_a_gpu():
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    indices, last = np.array([0]), np.array([1])
    with pytest.raises(ContractTypeError, match=r"indptr is on a GPU.*indptr\.cpu\(\)"):
        wrapper.plan(OnGpu(), indices, last, 2, 1, 8, 4)


def test_a_mask_on_a_gpu_is_refused():
    """Its bits are packed on the host, as the page table is made there."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(None)
    table = (np.array([0, 1]), np.array([0, 1]), np.array([0]), np.array([1]))
    for name in ("custom_mask", "packed_custom_mask"):
        with pytest.raises(ContractTypeError, match=f"{name} is on a GPU.*packed on the host"):
            wrapper.plan(*table, 2, 1, 8, 4, **{name: OnGpu()})


@pytest.mark.parametrize("other", [np.zeros(1), OnGpu(1)], ids=["host", "second GPU"])
def test_mixed_devices_are_refused(other):
    with pytest.raises(ContractTypeError, match=r"paged_kv_cache\[1\] is on (the CPU|GPU 1), q is on GPU 0"):
        devices.device_of(q=OnGpu(), out=None, paged_kv_cache=(OnGpu(), other))


def test_host_arrays_are_on_the_host():
    assert devices.device_of(q=np.zeros(1), k=torch.zeros(1), v=None) is HOST


def test_buffers_on_a_gpu_are_written_by_plan_and_not_read(monkeypatch):
    """The three buffers hold what was planned, and the rows are those of the plan."""
    monkeypatch.setattr("paged_kv.calls.buffers.device_of", lambda **_: STAND_IN)
    buffers = [torch.zeros(3, dtype=torch.int32), torch.full((5,), -7), torch.zeros(2, dtype=torch.int32)]
    fixed = FixedBuffers([TABLE_BUFFERS], buffers, "the page table lives")
    with pytest.raises(ContractError, match="nothing is planned"):
        fixed.read()
    table = Table.csr(np.array([0, 2, 3]), np.array([9, 1, 4]), np.array([2, 4]), 4)
    fixed.fill(DecodeBatch(table, 1))
    assert [buffer.tolist() for buffer in buffers] == [[0, 2, 3], [9, 1, 4, -7, -7], [2, 4]]
    buffers[0].zero_()
    assert fixed.read().lengths.tolist() == [6, 4]
    too_long = Table.csr(np.array([0, 2, 6]), np.arange(6), np.array([2, 4]), 4)
    with pytest.raises(ShapeError, match="6 page ids, paged_kv_indices_buffer holds 5"):
        fixed.fill(DecodeBatch(too_long, 1))
    assert fixed.read().lengths.tolist() == [6, 4]


def test_streams_follow_each_other(monkeypatch):
    """MAX's stream waits for torch's before the call, torch's for MAX's after it, an error included."""
    log = []

    class Stream:
        def __init__(self, name: object, gpu: int) -> None:
            self.name = f"{name} of {gpu}"

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: Stream("torch", gpu))
    device = SimpleNamespace(is_host=False, id=5, default_queue=SimpleNamespace(native_stream_handle=77))
    with pytest.raises(IndexError), Streams(device).ordered():
        log.pop(9)
    assert log == ["77 of 5 waits for torch of 5", "torch of 5 waits for 77 of 5"]


def test_overlaps_are_those_of_numpy():
    """Neighbours that touch, interleaved columns, one element in common, arrays without elements."""
    memory = torch.zeros(4, 6)
    views = [memory[:2], memory[2:], memory[:, ::2], memory[:, 1::2], memory[1:3, 2:4], memory[0, :1], memory[:0]]
    for a in views:
        for b in views:
            assert STAND_IN.overlap(a, b) == np.shares_memory(a.numpy(), b.numpy()), (a.shape, b.shape)


@pytest.mark.usefixtures("stand_in")
def test_a_dtype_that_is_not_supported_is_refused_by_name():
    k = torch.zeros(9, 2, 16)
    with pytest.raises(ContractTypeError, match=r"v: torch\.complex64 is none of"):
        single_decode_with_kv_cache(torch.zeros(4, 16), k, k.to(torch.complex64))


def rows_of(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.usefixtures("stand_in")
def test_rows_without_a_place_are_skipped():
    """Faults in index arrays on a GPU: a full last page, a page that the pool has not, more rows than tokens."""
    rows = torch.ones(3, 2, 8)
    cache = torch.zeros(6, 2, 4, 2, 8)
    table = torch.tensor([[4, 1, -1], [6, -1, -1], [-1, -1, -1]])
    page.append_paged_kv_cache(rows, rows, cache, table, torch.tensor([4, 1, 0]), 4)
    assert not cache.any()
    indptr, indices, last = (
        torch.from_numpy(array) for array in (np.array([0, 2, 2, 5]), np.array([4, 1, 0, 5, 2]), np.array([1, 0, 1]))
    )
    page.append_paged_kv_cache(rows, rows, torch.tensor([0, 0, 2, 3]), cache, indices, indptr, last)
    assert cache.sum() == 2 * 2 * 8  # K and V of request 2's token 8; request 1 has no page for its two
    assert cache[2, :, 0].eq(1).all()


@pytest.mark.usefixtures("stand_in")
def test_offsets_past_the_page_ids_read_nothing_there():
    """Values of index arrays on a GPU stay unread: a row that the table sends past `kv_indices` is skipped."""
    rows = torch.ones(3, 2, 8)
    cache = torch.zeros(6, 2, 4, 2, 8)
    table = [torch.tensor(values) for values in ([4, 1], [0, 9, -3], [4, 4])]  # indices, indptr, last_page_len
    page.append_paged_kv_cache(rows, rows, torch.tensor([0, 0, 1]), torch.tensor([5, 30, 0]), cache, *table)
    assert cache.sum() == 2 * 2 * 8  # token 5 of request 0 alone
    assert cache[1, :, 1].eq(1).all()


@pytest.mark.usefixtures("stand_in")
def test_shapes_of_index_arrays_are_checked_where_their_values_are_not_read():
    rows, cache = torch.ones(3, 2, 8), torch.zeros(6, 2, 4, 2, 8)
    two, three = torch.ones(2).int(), torch.ones(3).int()
    table = [torch.tensor(values) for values in ([4, 1, 5], [0, 1, 2, 3], [1, 1, 1])]
    for call, said in (
        (lambda: page.append_paged_kv_cache(rows, rows, two, cache, *table), "append_indptr: expected B + 1 = 4"),
        (
            lambda: page.append_paged_kv_cache(rows, rows, three, two, cache, *table),
            "positions: expected an entry for each",
        ),
        (
            lambda: page.append_paged_kv_cache(rows, rows, cache, three[:, None], two, 4),
            "last_page_len: expected B = 3 entries, got 2",
        ),
        (lambda: page.get_batch_indices_positions(three, three, 6), "append_indptr: expected B + 1 = 4 entries"),
        (lambda: page.get_seq_lens(two, three, 4), "kv_indptr: expected B + 1 = 4 entries"),
    ):
        refuses(call, ShapeError, said, cache)
    floats = [rows, rows, three.float(), three, cache, *table]
    refuses(lambda: page.append_paged_kv_cache(*floats), ContractTypeError, "batch_indices: expected an integer dtype")
    counted = (three[:, None], three, 4)
    refuses(lambda: page.get_batch_indices_positions(*counted), ContractTypeError, "page_table is on a GPU: how many")


def on_host(device: object) -> ArrayDevice:
    assert device in ("cuda:1", None)
    return devices.HOST if device is None else STAND_IN


@pytest.mark.usefixtures("stand_in")
def test_the_functional_cache(monkeypatch):
    """Its pools are made there; what is done with them is in test_cache.py."""
    monkeypatch.setattr(devices, "device_named", on_host)
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    cache = init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda:1")
    assert (type(cache.key_pool), cache.value_pool.shape) == (torch.Tensor, (7, 4, 2, 8))
    assert not cache.key_pool.any()
    assert gather_kv(cache, 0)[0].shape == (0, 2, 8)


def test_books_on_a_gpu_are_refused():
    pool = np.zeros((2, 4, 2, 8), np.float32)
    cache = PagedKVCache(pool, pool, OnGpu(), np.zeros(1, np.int32))
    with pytest.raises(ContractTypeError, match=r"block_table is on a GPU.*block_table\.cpu\(\)"):
        gather_kv(cache, 0)


@pytest.mark.usefixtures("stand_in")
def test_the_manager(monkeypatch):
    monkeypatch.setattr(devices, "device_named", on_host)
    found = PagedKVCacheManager(5, 4, 2, 8, "bfloat16", device="cuda:1")
    expected = PagedKVCacheManager(5, 4, 2, 8, "bfloat16", kind="numpy")
    for request, count in (("a", 3), ("b", 5), ("a", 2)):
        k, v = rows_of((count, 2, 8), "bfloat16"), rows_of((count, 2, 8), "bfloat16")
        found.append(request, tensors(k), tensors(v))
        expected.append(request, k, v)
    assert_bits_equal(as_numpy(found.kv_cache, "found"), expected.kv_cache, what="the manager's cache")
    assert found.get_page_table("b").tolist() == expected.get_page_table("b").tolist()
    with pytest.raises(ContractError, match="kind: expected None or 'torch'"):
        PagedKVCacheManager(5, 4, 2, 8, device="cuda:1", kind="numpy")


def test_a_gpu_that_is_not_there():
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    with pytest.raises(ToolchainError, match="GPU 63: MAX finds no such device"):
        init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda:63")
    with pytest.raises(ContractError, match="got 'metal'"):
        init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="metal")


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).uniform(-2, 2, shape).astype(np.float32).astype(dtype)


def bits(array: object) -> np.ndarray:
    view = as_numpy(array, "result")
    return view.view(f"u{view.itemsize}")


@pytest.mark.usefixtures("stand_in")
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


@pytest.mark.usefixtures("stand_in")
def test_an_empty_host_buffer_is_copied_without_its_address():
    found = copied_to(Buffer(DType.float32, [0, 4], CPU()), CPU())
    assert (tuple(found.shape), found.dtype) == ((0, 4), DType.float32)


@pytest.mark.usefixtures("stand_in")
def test_the_stand_in_refuses():
    """Planted: the ways that are not taken do fail."""
    with pytest.raises(BufferError):
        torch.utils.dlpack.to_dlpack(torch.zeros(3, dtype=torch.float8_e5m2))
    with pytest.raises(BufferError):
        dlpack_transfer._received(Buffer(DType.float32, [0], CPU()))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("q_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_decode_over_float8(q_dtype, kv_dtype):
    q, cache = random(2, 4, 16, dtype=q_dtype), random(5, 2, 4, 2, 16, dtype=kv_dtype)
    requests = np.array([0, 3, 4]), np.arange(4), np.array([1, 3])
    results = []
    for kind in (np.asarray, tensors):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(*requests, 4, 2, 16, 4, q_data_type=q_dtype, kv_data_type=kv_dtype, o_data_type="bfloat16")
        results.append(wrapper.run(kind(q), kind(cache), k_scale=0.5, return_lse=True))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.usefixtures("stand_in")
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


@pytest.mark.usefixtures("stand_in")
def test_a_buffer_of_float8_is_viewed():
    q, k = random(4, 8, dtype="bfloat16"), random(9, 2, 8, dtype=FLOAT8[0])
    buffers = [to_max(tensors(array), CPU()) for array in (k, k)]
    views = [STAND_IN.view(buffer, "k") for buffer in buffers]
    assert {view.dtype for view in views} == {torch.float8_e4m3fn}
    found = single_decode_with_kv_cache(tensors(q), *views)
    np.testing.assert_array_equal(bits(found), bits(single_decode_with_kv_cache(q, k, k)))
