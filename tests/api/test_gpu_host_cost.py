"""The cost of a call on a GPU for the host: arrays that cross to MAX and back, and copies to the device, of each `run`.

torch on the CPU stands in for a GPU; the graph's execution is replaced.
"""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType

from paged_kv.arrays import dlpack_transfer
from paged_kv.arrays.gpu import TorchArrays
from paged_kv.calls import attend
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from support.stand_in import STAND_IN, stand_in

__all__ = ["stand_in"]  # the fixture

B, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 16, 4
TABLE = np.array([0, 2, 3]), np.array([2, 0, 1]), np.array([1, 4])

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture
def crossings(monkeypatch):
    """Count how often something crossed: "in" to MAX, "out" to torch, "up" from the host to the device."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            counts[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", counted("in", torch.utils.dlpack.to_dlpack))
    monkeypatch.setattr(dlpack_transfer, "_received", counted("out", dlpack_transfer._received))
    monkeypatch.setattr(TorchArrays, "upload", counted("up", TorchArrays.upload))
    return counts


@pytest.fixture
def executed(monkeypatch):
    """The operands of the last execution."""
    operands: list[Buffer] = []

    def execute(_: object, *given: Buffer) -> tuple[Buffer, Buffer]:
        operands[:] = given
        results = DType.float32, [B, HEADS, DIM], DType.float32, [B, HEADS]
        return Buffer(*results[:2], CPU()), Buffer(*results[2:], CPU())

    monkeypatch.setattr(attend, "runtime_on", lambda _: SimpleNamespace(execute=execute))
    return operands


def planned(kind: str) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    if kind == "captured":
        buffers = (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(5, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers)
    wrapper.plan(*TABLE, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    return wrapper


def cost(crossings: Counter[str], call: Callable[[], object]) -> tuple[int, int, int]:
    crossings.clear()
    call()
    return crossings["in"], crossings["out"], crossings["up"]


@pytest.mark.parametrize("kind", ["plain", "captured"])
def test_what_crosses_in_a_run(kind, crossings, executed, monkeypatch):
    monkeypatch.setattr("paged_kv.calls.buffers.device_of", lambda **_: STAND_IN)
    wrapper = planned(kind)
    layers = [torch.zeros(3, 2, PAGE, KV_HEADS, DIM) for _ in range(2)]
    q = [torch.zeros(B, HEADS, DIM) for _ in range(2)]
    # Slopes, no sinks, a head of V; then requests, lengths and table: once a plan.
    assert cost(crossings, lambda: wrapper.run(q[0], layers[0])) == (3, 2, 6)
    assert cost(crossings, lambda: wrapper.run(q[0], layers[0])) == (1, 2, 0)
    assert cost(crossings, lambda: wrapper.run(q[1], layers[0])) == (1, 2, 0)
    assert cost(crossings, lambda: wrapper.run(q[1], layers[1])) == (3, 2, 0)
    sinks = torch.zeros(HEADS)
    assert cost(crossings, lambda: wrapper.run(q[1], layers[1], sinks=sinks, v_scale=0.5)) == (2, 2, 0)
    wrapper.plan(*TABLE, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    assert cost(crossings, lambda: wrapper.run(q[1], layers[1])) == (3, 2, 6)
    assert len(executed) == 11


def test_what_is_kept_is_never_stale(executed):
    """Storage that was freed, moved or cut otherwise is imported again: each run gets the address it is given."""
    wrapper = planned("plain")
    q = torch.zeros(B, HEADS, DIM)
    whole = torch.zeros(9, 2, PAGE, KV_HEADS, DIM)
    seen = set()

    def run(cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
        wrapper.run(q, cache)
        k, v = (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache
        _, _, _, k_blocks, v_blocks, _, view, *_ = executed
        assert STAND_IN.take(k_blocks).data_ptr() == k.data_ptr()
        assert STAND_IN.take(v_blocks).data_ptr() == v.data_ptr()
        pages, slots, heads, dim, *strides = view.tolist()
        assert (pages, slots, heads, dim) == tuple(k.shape)
        assert strides == [0, *k.stride()[:3], 0, *v.stride()[:3]]
        seen.add(k.data_ptr())

    run(whole)
    run(whole[3:])  # another address
    run(whole[:5])  # another shape at the first one
    run((whole[:, 0], whole[:, 1]))
    run((whole[:, 1], whole[:, 0]))
    run((whole[::2, 0], whole[::2, 1]))  # other strides
    keys, *values = torch.zeros(3, 4, PAGE, KV_HEADS, DIM)
    run((keys, values[0]))
    run((keys, values[1]))  # V alone is another
    run((values[1], values[1]))
    wide = torch.zeros(4, 2 * PAGE, KV_HEADS, DIM)
    for other in (wide[:, :PAGE], wide.view(8, PAGE, KV_HEADS, DIM)[:4]):  # V's strides alone are others
        run((keys, other))
    for other in (wide[:, :PAGE], wide.view(8, PAGE, KV_HEADS, DIM)[:4]):  # K's
        run((other, keys))
    for _ in range(20):  # freed, so that the next may get its address
        run(torch.zeros(4, 2, PAGE, KV_HEADS, DIM))
    moved = torch.zeros(4, 2, PAGE, KV_HEADS, DIM)
    run(moved)
    moved.set_(torch.zeros_like(moved))
    run(moved)
    assert len(seen) > 4
