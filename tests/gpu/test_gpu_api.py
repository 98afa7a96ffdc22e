"""The Python API over torch CUDA tensors: results beside the inputs, in the order of the caller's stream."""

import pytest
import torch
from max.driver import Accelerator, Buffer

from gpu import harness
from gpu.rules import attention_kernel
from paged_kv import reference
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from paged_kv.errors import ContractTypeError
from paged_kv.runtime.kernel_launches import launched
from support.cases import CacheCase, build, csr
from support.compare import assert_bits_equal, assert_close, assert_lse_close
from support.stand_in import storage_of, tensors

CASE = CacheCase((700, 0, 33, 16), 8, 2, 128, 16, rank=5, dtype="bfloat16")


def on_gpu(array):
    return tuple(map(on_gpu, array)) if isinstance(array, tuple) else array.cuda()


def numpy(tensor):
    return tensor.float().cpu().numpy()


@pytest.fixture(scope="module")
def planned():
    cache = build(CASE)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    wrapper.plan(*csr(cache), 8, 2, 128, 16, q_data_type="bfloat16")
    expected = reference.attention(cache.q, *cache.pages, *cache.decode_rows, **cache.storage)
    return cache, wrapper, expected


def test_run(planned):
    """Results beside the inputs, or in the tensors that are passed for them."""
    cache, wrapper, expected = planned
    q, paged = on_gpu(tensors(cache.q)), on_gpu(storage_of(cache))
    out, out_lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    assert wrapper.run(q, paged, out=out, lse=out_lse) is out
    for o, lse in ((out, out_lse), wrapper.run_return_lse(q, paged)):
        assert o.device.type == lse.device.type == "cuda"
        assert o.dtype == torch.bfloat16
        assert_close(numpy(o), expected[0], rel=1e-2, what="o")
        assert_lse_close(numpy(lse), expected[1], tol=1e-5, what="lse")


def test_the_kernel_for_this_gpu_runs(planned):
    """Not a plain one where there is a better one, except where keys are rotated."""
    cache, wrapper, _ = planned
    q, paged = on_gpu(tensors(cache.q)), on_gpu(storage_of(cache))
    with launched() as launches:
        wrapper.run(q, paged)
    best = attention_kernel(Accelerator(0).architecture_name, "bfloat16", "bfloat16", 128, 4, 16)
    harness.check_launches(launches, best, "bfloat16")
    with launched() as launches:
        single_decode_with_kv_cache(q[0], paged[:, 0, 0], paged[:, 1, 0], pos_encoding_mode="ROPE_LLAMA")
    harness.check_launches(launches, "gpu/generic", "bfloat16")


def test_work_on_a_side_stream_is_waited_for(planned):
    """The query is made late on a stream of the caller's, and the result is used there at once."""
    cache, wrapper, expected = planned
    paged, ready = on_gpu(storage_of(cache)), on_gpu(tensors(cache.q))
    q = torch.zeros_like(ready)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        q.copy_(ready)
        o = wrapper.run(q, paged)
        doubled = o.float() * 2
    stream.synchronize()
    assert_close(doubled.cpu().numpy() / 2, expected[0], rel=1e-2, what="o")


def test_single_decode_and_max_buffers():
    q, k, v = (torch.randn(shape, device="cuda").half() for shape in ((8, 64), (1000, 2, 64), (1000, 2, 64)))
    found = single_decode_with_kv_cache(q, k, v)
    expected = single_decode_with_kv_cache(*(array.float().cpu().numpy() for array in (q, k, v)))
    assert_close(numpy(found), expected, rel=2e-3, what="o")
    buffer = single_decode_with_kv_cache(Buffer.from_dlpack(q), k, v)
    assert isinstance(buffer, Buffer)
    assert buffer.device == Accelerator(0)
    assert_bits_equal(buffer.to_numpy(), found.cpu().numpy(), what="o of buffers")


def test_mixed_devices_are_refused(planned):
    cache, wrapper, _ = planned
    with pytest.raises(ContractTypeError, match="paged_kv_cache is on the CPU, q is on GPU 0"):
        wrapper.run(on_gpu(tensors(cache.q)), storage_of(cache))
