"""What is special to arrays on a GPU, without one: torch tensors on the CPU stand in for them.

What a GPU shares with the host is tried there too by the tests of tests/api whose parameter is "gpu", and by
test_drawn.py. What only a GPU can show (streams, kernels) is in tests/gpu; the kernels run in tests/gpu_model.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from max.driver import Buffer

from paged_kv import page
from paged_kv.arrays import devices
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.arrays.pages import Pages
from paged_kv.arrays.streams import Streams
from paged_kv.arrays.types import ArrayDevice
from paged_kv.cache import PagedKVCache, allocate_blocks, append_kv, gather_kv, init_paged_kv_cache
from paged_kv.calls.buffers import FixedBuffers
from paged_kv.calls.rows import DecodeBatch
from paged_kv.calls.table import Table
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.errors import ContractError, ContractTypeError, ShapeError, ToolchainError
from paged_kv.flashinfer import decode
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
    fixed = FixedBuffers([decode._BUFFERS], buffers, "the page table lives")
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
    """Of index arrays on a GPU: a full last page, a page that the pool has not, more rows than tokens."""
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
    """Of index arrays on a GPU, whose values stay unread: a row that the table sends past `kv_indices` is skipped."""
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
        (lambda: page.append_paged_kv_cache(rows, rows, two, cache, *table), "append_indptr must have B + 1 = 4"),
        (lambda: page.append_paged_kv_cache(rows, rows, three, two, cache, *table), "positions has 2 entries"),
        (lambda: page.append_paged_kv_cache(rows, rows, cache, three[:, None], two, 4), "last_page_len has 2 entries"),
        (lambda: page.get_batch_indices_positions(three, three, 6), "append_indptr must have B + 1 = 4 entries"),
        (lambda: page.get_seq_lens(two, three, 4), "kv_indptr must have B + 1 = 4 entries"),
    ):
        refuses(call, ShapeError, said, cache)
    floats = [rows, rows, three.float(), three, cache, *table]
    refuses(lambda: page.append_paged_kv_cache(*floats), ContractTypeError, "batch_indices: dtype must be an integer")
    counted = (three[:, None], three, 4)
    refuses(lambda: page.get_batch_indices_positions(*counted), ContractTypeError, "page_table is on a GPU: how many")


def on_host(device: object) -> ArrayDevice:
    assert device in ("cuda:1", None)
    return devices.HOST if device is None else STAND_IN


@pytest.mark.usefixtures("stand_in")
def test_the_functional_cache(monkeypatch):
    monkeypatch.setattr(devices, "device_named", on_host)
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    found = init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda:1")
    expected = init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16")
    assert isinstance(found.key_pool, torch.Tensor)
    empty = found
    for sequence, count, free in ((1, 6, [5, 2]), (0, 3, [0]), (1, 4, [6])):
        keys, values = rows_of((count, 2, 8)), rows_of((count, 2, 8)) - 1
        found, consumed = allocate_blocks(
            found, sequence_idx=sequence, num_new_tokens=count, free_block_ids=np.array(free)
        )
        assert consumed == len(free)
        expected, _ = allocate_blocks(
            expected, sequence_idx=sequence, num_new_tokens=count, free_block_ids=np.array(free)
        )
        found = append_kv(found, sequence, torch.from_numpy(keys), torch.from_numpy(values))
        expected = append_kv(expected, sequence, keys, values)
    assert not empty.key_pool.any()
    np.testing.assert_array_equal(found.key_pool.numpy(), expected.key_pool)
    for sequence in (0, 1):
        gathered, wanted = gather_kv(found, sequence), gather_kv(expected, sequence)
        assert gathered[2] == wanted[2]
        for tensor, array in zip(gathered[:2], wanted[:2], strict=True):
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(tensor.numpy(), array)
    assert gather_kv(empty, 0)[0].shape == (0, 2, 8)


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
    with pytest.raises(ContractError, match="kind must be 'torch'"):
        PagedKVCacheManager(5, 4, 2, 8, device="cuda:1", kind="numpy")


def test_a_gpu_that_is_not_there():
    sizes = {"num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2}
    with pytest.raises(ToolchainError, match="GPU 63: MAX finds no such device"):
        init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="cuda:63")
    with pytest.raises(ContractError, match="not 'metal'"):
        init_paged_kv_cache(**sizes, max_blocks_per_seq=3, dtype="float16", device="metal")
