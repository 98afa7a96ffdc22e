"""The Python side of a GPU call, without one: the same code over torch tensors on the CPU, which stands in as a place.

What only a GPU can show (streams, kernels) is in tests/gpu.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from max.driver import Buffer

from paged_kv import page, reference
from paged_kv.arrays import devices
from paged_kv.arrays.cache_storage import cache_operands, paged_views
from paged_kv.arrays.host import HOST, as_numpy
from paged_kv.arrays.streams import Streams
from paged_kv.calls.buffers import PageTableBuffers
from paged_kv.calls.page_table import PageTable
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from support.cases import CacheCase, build
from support.compare import assert_close, assert_lse_close
from support.stand_in import STAND_IN, OnGpu, csr, stand_in, storage_of, tensors

__all__ = ["stand_in"]  # the fixture

CASES = [
    CacheCase((33, 0, 7), rank=5, page_size=16, dtype="float32"),
    CacheCase((20, 5), rank=5, page_size=5, layout="HND", dtype="bfloat16"),
    CacheCase((64, 1), rank=4, page_size=16, dtype="float16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("stand_in")
def test_run_over_tensors_is_the_oracles(case):
    cache = build(case)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, case.layout)
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    wrapper.plan(*csr(cache), *sizes, q_data_type=case.dtype, window_left=17)
    sinks = torch.linspace(-1, 1, case.num_q_heads, dtype=torch.float16)
    out = torch.empty(cache.q.shape, dtype=getattr(torch, case.dtype))
    o, lse = wrapper.run(tensors(cache.q), storage_of(cache), v_scale=0.5, return_lse=True, out=out, sinks=sinks)
    assert o is out
    assert isinstance(lse, torch.Tensor)
    expected = reference.attention(
        cache.q,
        *cache.pages,
        *cache.decode_rows,
        **cache.storage,
        window_left=17,
        v_scale=0.5,
        sinks=sinks.float().numpy(),
    )
    assert_close(
        as_numpy(o, "o"), expected[0], rel={"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[case.dtype], what="o"
    )
    assert_lse_close(lse.numpy(), expected[1], tol=1e-5, what="lse")


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
    flat_k, flat_v, numbers = cache_operands(*paged_views(cache, layout, device=STAND_IN), STAND_IN)
    expected = paged_views(cache.numpy(), layout)
    pages, slots, heads, dim, *strides = numbers.to_numpy()
    for flat, view, (start, page_stride, slot_stride, head_stride) in zip(
        (flat_k, flat_v), expected, (strides[:4], strides[4:]), strict=True
    ):
        assert view.shape == (pages, slots, heads, dim)
        elements = flat.to_numpy()
        for at in np.ndindex(*view.shape[:3]):
            begin = start + at[0] * page_stride + at[1] * slot_stride + at[2] * head_stride
            np.testing.assert_array_equal(elements[begin : begin + dim], view[at])


@pytest.mark.usefixtures("stand_in")
def test_append_with_indices_on_the_device():
    """Rows land where the host's own arithmetic puts them; rows without a place are skipped."""
    rng = np.random.default_rng(3)
    pages, size, heads, dim = 6, 4, 2, 8
    indptr, indices, last = np.array([0, 2, 2, 5]), np.array([4, 1, 0, 5, 2]), np.array([4, 0, 1])
    batch = np.array([0, 2, -1, 0, 2, 1, 3, 0])
    positions = np.array([7, 8, 0, 0, 5, 0, 0, 8])  # the last three have no place
    k, v = (rng.standard_normal((len(batch), heads, dim), np.float32) for _ in range(2))
    cache = np.full((pages, 2, size, heads, dim), np.nan, np.float32)
    expected = cache.copy()
    page.append_paged_kv_cache(k[:5], v[:5], batch[:5], positions[:5], expected, indices, indptr, last)
    found = torch.from_numpy(cache)
    index = [torch.from_numpy(array) for array in (batch, positions)]
    table = [torch.from_numpy(array) for array in (indices, indptr, last)]
    page.append_paged_kv_cache(torch.from_numpy(k), torch.from_numpy(v), *index, found, *table)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.usefixtures("stand_in")
def test_append_with_indices_on_the_host_checks_them():
    cache = torch.zeros(3, 2, 4, 2, 8)
    rows = torch.ones(1, 2, 8)
    table = np.array([1]), np.array([0, 1]), np.array([2])
    with pytest.raises(PageTableError, match="position 9"):
        page.append_paged_kv_cache(rows, rows, np.array([0]), np.array([9]), cache, *table)
    assert not cache.any()
    page.append_paged_kv_cache(rows, rows, np.array([0]), np.array([1]), cache, *table)
    assert cache[1, :, 1].eq(1).all()
    assert cache.sum() == 2 * 2 * 8


def test_plan_refuses_arrays_on_a_gpu():
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    indices, last = np.array([0]), np.array([1])
    with pytest.raises(ContractTypeError, match=r"indptr is on a GPU.*indptr\.cpu\(\)"):
        wrapper.plan(OnGpu(), indices, last, 2, 1, 8, 4)


@pytest.mark.parametrize("other", [np.zeros(1), OnGpu(1)], ids=["host", "second GPU"])
def test_mixed_devices_are_refused(other):
    with pytest.raises(ContractTypeError, match=r"paged_kv_cache\[1\] is on (the CPU|GPU 1), q is on GPU 0"):
        devices.device_of(q=OnGpu(), out=None, paged_kv_cache=(OnGpu(), other))


def test_host_arrays_are_on_the_host():
    assert devices.device_of(q=np.zeros(1), k=torch.zeros(1), v=None) is HOST


def test_a_gpu_that_max_has_not_is_named():
    with pytest.raises(Exception, match="GPU 63"):
        devices.gpu(63)


@pytest.mark.usefixtures("stand_in")
def test_rotary_keys_go_to_a_gpu_too():
    q, k, v = torch.randn(4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    options = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0}
    found = single_decode_with_kv_cache(q, k, v, **options)
    expected = single_decode_with_kv_cache(q.numpy(), k.numpy(), v.numpy(), **options)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert not np.allclose(found.numpy(), single_decode_with_kv_cache(q, k, v).numpy(), atol=1e-3)


@pytest.mark.usefixtures("stand_in")
def test_shapes_and_dtypes_are_checked_on_a_gpu():
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(np.array([0, 1]), np.array([0]), np.array([1]), 2, 1, 8, 4, q_data_type="float32")
    q, cache = torch.zeros(1, 2, 8), torch.zeros(1, 2, 4, 1, 8)
    for wrong, error in (
        ((q.half(), cache), ContractTypeError),
        ((q[:, :1], cache), ShapeError),
        ((q, cache.double()), ContractTypeError),
        ((q, cache[:, :, :3]), ShapeError),
        ((q, cache[:, :1]), ShapeError),
        ((q, cache[..., ::2]), ContractError),
        ((q, cache[:0]), PageTableError),
    ):
        with pytest.raises(error):
            wrapper.run(*wrong)
    with pytest.raises(ShapeError, match="sinks"):
        wrapper.run(q, cache, sinks=torch.zeros(3))


def test_buffers_on_a_gpu_are_written_by_plan_and_not_read(monkeypatch):
    """The three buffers hold what was planned, and the rows are those of the plan."""
    monkeypatch.setattr("paged_kv.calls.buffers.device_of", lambda **_: STAND_IN)
    buffers = [torch.zeros(3, dtype=torch.int32), torch.full((5,), -7), torch.zeros(2, dtype=torch.int32)]
    fixed = PageTableBuffers(*buffers)
    with pytest.raises(ContractError, match="nothing is planned"):
        fixed.read()
    table = PageTable.of(np.array([0, 2, 3]), np.array([9, 1, 4]), np.array([2, 4]), 4)
    fixed.fill(table)
    assert [buffer.tolist() for buffer in buffers] == [[0, 2, 3], [9, 1, 4, -7, -7], [2, 4]]
    buffers[0].zero_()
    assert fixed.read().lengths.tolist() == [6, 4]
    too_long = PageTable.of(np.array([0, 2, 6]), np.arange(6), np.array([2, 4]), 4)
    with pytest.raises(ShapeError, match="6 page ids, paged_kv_indices_buffer holds 5"):
        fixed.fill(too_long)
    assert fixed.read().lengths.tolist() == [6, 4]


def test_streams_follow_each_other(monkeypatch):
    """MAX's stream waits for torch's before the call, torch's for MAX's after it, an error included."""
    log = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

    class Device:
        def __init__(self, index: int) -> None:
            assert index == 5

        def __enter__(self) -> None:
            log.append("enter")

        def __exit__(self, *_: object) -> None:
            log.append("exit")

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("torch"))
    device = SimpleNamespace(is_host=False, id=5, default_queue=SimpleNamespace(native_stream_handle=77))
    with pytest.raises(IndexError), Streams(device).ordered():
        log.pop(9)
    assert log == ["enter", "77 waits for torch", "torch waits for 77", "exit"]


@pytest.mark.usefixtures("stand_in")
def test_a_dtype_that_is_not_supported_is_refused_by_name():
    k = torch.zeros(9, 2, 16)
    with pytest.raises(ContractTypeError, match=r"v: torch\.complex64 is none of"):
        single_decode_with_kv_cache(torch.zeros(4, 16), k, k.to(torch.complex64))
