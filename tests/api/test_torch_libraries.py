"""The libraries of kernels behind the torch operators: the bits of other calls, whose threads they run on, refusals."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import paged_kv.torch as operators
from paged_kv.call_layouts import ATTENTION, CACHE_STORAGE, CACHE_TABLE, CACHE_VIEW, MASKS
from paged_kv.errors import ContractError
from paged_kv.runtime.libraries import kernel
from paged_kv.runtime.thread_pool import workers
from paged_kv.torch import attention, cache, memory
from support.compare import assert_bits_equal, assert_close

pytestmark = pytest.mark.usefixtures("decode_variants")

LENGTHS = [700, 0, 33, 16]
PAGE_SIZE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64
FLOAT = torch.bfloat16


@pytest.fixture
def by_views(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the calls that follow go by NumPy's views, as those over tensors that are none of the ordinary do."""

    def forget() -> None:
        for module in (attention, cache, memory):
            monkeypatch.setattr(module, "holds", lambda *_: False)

    return forget


def results(stored: torch.dtype, bytes_of_head: int = DIM) -> list[torch.Tensor]:
    """Return what the operators give, and a cache that was written."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(FLOAT)

    pages = -(-torch.tensor(LENGTHS) // PAGE_SIZE)
    table = torch.full((len(LENGTHS), int(pages.max())), -1, dtype=torch.int32)
    ids, first = torch.randperm(int(pages.sum()), generator=generator).int(), 0
    for b, count in enumerate(pages.tolist()):
        table[b, :count], first = ids[first : first + count], first + count
    both = torch.zeros(int(pages.sum()), 2, PAGE_SIZE, KV_HEADS, bytes_of_head, dtype=stored)
    k, v = both[:, 0], both[:, 1]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    requests = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).int()
    new = [drawn(sum(LENGTHS), KV_HEADS, DIM) for _ in range(2)]
    rows = new if bytes_of_head != DIM else [x.to(stored) for x in new]
    operators.append_paged_kv(*rows, k, v, table, requests, positions)
    decoded = operators.paged_attention(drawn(4, HEADS, DIM), k, v, table, lengths, window_left=300, alibi=True)
    indptr = torch.tensor([0, 40, 40, 41, 57], dtype=torch.int32)
    sinks = torch.randn(HEADS, generator=generator)
    prefilled = operators.paged_attention(drawn(57, HEADS, DIM), k, v, table, lengths, indptr, sinks=sinks)
    gathered = operators.gather_paged_kv(k, v, table, lengths, sum(LENGTHS))
    y = operators.linear(drawn(9, 256), drawn(72, 256))
    return [both, *decoded, *prefilled, *gathered, y]


@pytest.mark.parametrize(
    ("stored", "bytes_of_head"),
    [(torch.bfloat16, DIM), (torch.float8_e4m3fn, DIM), (torch.int8, DIM + 4), (torch.uint8, DIM // 2 + 4)],
    ids=["bfloat16", "float8", "int8", "int4"],
)
def test_the_bits_are_those_of_other_calls(stored: torch.dtype, bytes_of_head: int, by_views: Any) -> None:
    found = results(stored, bytes_of_head)
    by_views()
    expected = results(stored, bytes_of_head)
    *found, y = found
    *expected, by_torch = expected
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_bits_equal(bits(one), bits(other), what=f"result {index}")
    assert_close(y.float().numpy(), by_torch.double().numpy(), rel=1e-2, what="y")


def bits(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.contiguous().view(torch.uint8).numpy()
    return found


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, which calls take."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_no_result_depends_on_the_threads(with_threads: Callable[[int], None]) -> None:
    found = []
    for threads in (1, 2, 5):
        with_threads(threads)
        found.append(results(FLOAT))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert_bits_equal(bits(one), bits(another), what="result")


def test_threads_that_call_at_once_get_what_one_gets() -> None:
    expected, found = results(FLOAT), []
    threads = [threading.Thread(target=lambda: found.append(results(FLOAT))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(found) == 4
    for result in found:
        for one, other in zip(result, expected, strict=True):
            assert_bits_equal(bits(one), bits(other), what="result")


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_no_normal_number_is_zero(threads: int, with_threads: Callable[[int], None]) -> None:
    """As in the ops, on the thread that calls and on others."""
    with_threads(threads)
    least = float(np.finfo(np.float32).smallest_normal)
    k = torch.zeros(64, PAGE_SIZE, KV_HEADS, DIM)
    v = torch.linspace(1.5 * least, 3 * least, DIM).expand_as(k).clone()
    v[32:] = 0  # half of the tokens, and so half of each value
    table, lengths = torch.arange(64, dtype=torch.int32)[None], torch.tensor([64 * PAGE_SIZE])
    o, _ = operators.paged_attention(torch.zeros(1, HEADS, DIM), k, v, table, lengths)
    halves = v[0, 0, 0].double() / 2
    assert not o[..., halves < 0.999 * least].any()
    assert o[..., halves > 1.001 * least].all()


@pytest.mark.parametrize("way", ["library", "views"])
def test_outputs_that_are_given(way: str, by_views: Any) -> None:
    """For code that calls `TensorAttention`, as the plugin of vLLM: also one of another dtype, and a strided one."""
    if way == "views":
        by_views()
    cache, q = torch.randn(3, PAGE_SIZE, 1, DIM), torch.randn(1, 2, DIM)
    rows = operators._rows.of(
        (PAGE_SIZE, 1), block_tables=torch.tensor([[2, 0]]), seq_lens=torch.tensor([20]), qo_indptr=None
    )
    attend = attention.planned((2, 1, DIM, PAGE_SIZE), (q.dtype, q.dtype), (None, -1, 0.0, False))
    expected, _ = attend.over_pages(rows, q, cache, cache)
    outputs = (
        torch.zeros(1, 2, DIM),
        torch.zeros(1, 2, DIM, dtype=torch.float64),
        torch.zeros(1, DIM, 2).transpose(1, 2),
    )
    for out in outputs:
        before = out._version
        found, _ = attend.over_pages(rows, q, cache, cache, out=out)
        assert found is out
        assert out._version > before
        assert torch.equal(out.float(), expected)


def test_rows_of_an_append_that_lie_in_the_cache() -> None:
    """They are copied first, as by every append of this package."""
    both = torch.arange(4 * 2 * PAGE_SIZE * KV_HEADS * DIM).reshape(4, 2, PAGE_SIZE, KV_HEADS, DIM).float()
    k, v, before = both[:, 0], both[:, 1], both.clone()
    table, requests = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.zeros(PAGE_SIZE, dtype=torch.int32)
    operators.append_paged_kv(k[0], v[0], k, v, table, requests, torch.arange(1, PAGE_SIZE + 1, dtype=torch.int32))
    flat, then = (
        both.transpose(1, 2).reshape(-1, 2, KV_HEADS, DIM),
        before.transpose(1, 2).reshape(-1, 2, KV_HEADS, DIM),
    )
    assert torch.equal(flat[1 : PAGE_SIZE + 1], then[:PAGE_SIZE])


def test_what_a_kernel_refuses_is_an_error_and_nothing_is_written() -> None:
    """Values that Python does not let through: a length that is negative, a result of another dtype."""
    q, o, lse, k = torch.ones(1, 1, 8), torch.full((1, 1, 8), 7.0), torch.full((1, 1), 7.0), torch.ones(1, 1, 1, 8)
    batch, lengths, table = np.zeros(1, np.int32), np.array([-3], np.int32), np.zeros((1, 1), np.uint32)
    options, none = np.array([1, 0, 1, 0, 1], np.float32), np.zeros(0, np.float32)
    storage = CACHE_STORAGE.pack(k.data_ptr(), 8, k.data_ptr(), 8)
    view = CACHE_VIEW.pack(*(1, 1, 1, 8), *(0, 8, 8, 8), *(0, 8, 8, 8), 8)
    operands = ATTENTION.pack(
        o=o.data_ptr(),
        lse=lse.data_ptr(),
        q=q.data_ptr(),
        num_rows=1,
        num_heads=1,
        head_dim=8,
        value_dim=8,
        row_batch=batch.ctypes.data,
        row_lengths=lengths.ctypes.data,
        slopes=none.ctypes.data,
        num_slopes=0,
        sinks=none.ctypes.data,
        num_sinks=0,
        masks=MASKS.zeros,
        window_left=-1,
        options=options.ctypes.data,
        cache=storage + view + CACHE_TABLE.pack(table.ctypes.data, 1, 1),
    )
    attend = kernel("attention", "float32", "float32", "float32")
    with pytest.raises(ContractError, match=r"row_lengths: row 0 \(request 0\) has length -3"):
        attend(operands + workers())
    with pytest.raises(ContractError, match=r"would write torch\.float32 to a tensor of torch\.bfloat16"):
        memory.output(lse.bfloat16(), torch.float32)
    assert float(o.sum()) == 7.0 * 8
    assert float(lse) == 7.0


@pytest.mark.slow
def test_a_call_starts_no_thread_of_max() -> None:
    program = (
        "import torch; from paged_kv.torch import *; from paged_kv.runtime.threads import pool_threads;"
        "q, c = torch.ones(1, 2, 64), torch.ones(2, 16, 1, 64); t = torch.tensor([[1]], dtype=torch.int32);"
        "o, _ = paged_attention(q, c, c.clone(), t, torch.tensor([16]));"
        "y = linear(torch.ones(2, 8), torch.ones(8, 8));"
        "print(float(o.sum()), float(y.sum()), pool_threads())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["128.0", "128.0", "0"]
