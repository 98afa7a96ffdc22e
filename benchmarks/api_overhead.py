"""Time of single calls on the CPU where there is little to compute: `plan` over large page tables, and one call of each
kind at batch size 1.

    python -m benchmarks.api_overhead [--repeats N]

`plan`: 256 requests of up to 32,768 tokens, pages of 16 (524,288 page ids where all are full), checks included.
Calls: one request of 16 tokens, 8 query and 2 KV heads of 128, latent attention of 512 + 64; also "apart", with a
millisecond of other work before each call.
Times are medians of single calls; a tenth as many calls are made before to warm up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paged_kv import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    PagedKVCache,
    append_paged_kv_cache,
    gather_kv,
    merge_state,
)
from paged_kv.arrays.host import as_numpy
from paged_kv.torch import append_paged_kv, gather_paged_kv, paged_attention

PLAN_BATCH, PLAN_TOKENS, PAGE_SIZE = 256, 32768, 16
HEADS = (8, 2, 128)  # query heads, KV heads, head_dim
RUN_TOKENS = 16
LATENT = (512, 64)  # head_dim_ckv, head_dim_kpe


def median_us(repeats: int, call: Callable[[], Any], apart_s: float = 0.0) -> float:
    """The median of `repeats` single runs of a call. Before each one the thread computes for `apart_s`."""
    times = np.zeros(repeats // 10 + 1 + repeats)
    for i in range(len(times)):
        begin = time.perf_counter() + apart_s
        while time.perf_counter() < begin:
            pass
        start = time.perf_counter_ns()
        call()
        times[i] = time.perf_counter_ns() - start
    return float(np.median(times[-repeats:])) / 1e3


def plan_us(to_array: Callable[[np.ndarray], Any], *, full: bool, repeats: int) -> float:
    """`plan` of one page table, either of full tables or of lengths from half of that up."""
    rng = np.random.default_rng(0)
    most = PLAN_TOKENS // PAGE_SIZE
    pages = np.full(PLAN_BATCH, most) if full else rng.integers(most // 2, most, PLAN_BATCH, endpoint=True)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    indices = rng.permutation(indptr[-1]).astype(np.int32)
    table: list[Any] = [to_array(array) for array in (indptr, indices, np.full(PLAN_BATCH, PAGE_SIZE, np.int32))]
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(None)
    return median_us(repeats, lambda: wrapper.plan(*table, *HEADS, PAGE_SIZE, q_data_type="bfloat16"))


def calls_of(kind: str, dtype: str) -> dict[str, Callable[[], Any]]:
    """One call of each kind at batch size 1, over 16 tokens in arrays of NumPy or torch."""
    heads, kv_heads, head_dim = HEADS

    def array(*shape: int) -> Any:
        tensor = torch.randn(*shape).to(getattr(torch, dtype))
        return tensor if kind == "torch" else as_numpy(tensor, "array")

    def indices(*values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32) if kind == "torch" else np.array(values, np.int32)

    q, cache = array(1, heads, head_dim), array(4, 2, PAGE_SIZE, kv_heads, head_dim)
    table = indices(0, 1), indices(2), indices(RUN_TOKENS)
    decode: Any = BatchDecodeWithPagedKVCacheWrapper(None)
    decode.plan(*table, *HEADS, PAGE_SIZE, q_data_type=dtype)
    rows, at = array(1, kv_heads, head_dim), (indices(0), indices(RUN_TOKENS - 1))
    pools = PagedKVCache(cache[:, 0], cache[:, 1], indices([2]), table[2])
    states = q, torch.zeros(1, heads) if kind == "torch" else np.zeros((1, heads), np.float32)
    latent, (ckv, kpe) = BatchMLAPagedAttentionWrapper(None), LATENT
    latent.plan(indices(0, 1), *table, heads, ckv, kpe, PAGE_SIZE, False, 0.1, dtype, dtype)
    of_latent = array(1, heads, ckv), array(1, heads, kpe), array(4, PAGE_SIZE, ckv), array(4, PAGE_SIZE, kpe)
    calls: dict[str, Callable[[], Any]] = {
        "decode, run": lambda: decode.run(q, cache),
        "append_paged_kv_cache": lambda: append_paged_kv_cache(rows, rows, *at, cache, table[1], table[0], table[2]),
        "gather_kv": lambda: gather_kv(pools, 0),
        "merge_state": lambda: merge_state(*states, *states),
        "MLA, run": lambda: latent.run(*of_latent),
    }
    if kind == "torch":
        k, v, blocks = cache[:, 0], cache[:, 1], indices([2])
        calls |= {
            "torch, paged_attention": lambda: paged_attention(q, k, v, blocks, table[2]),
            "torch, append_paged_kv": lambda: append_paged_kv(rows, rows, k, v, blocks, *at),
            "torch, gather_paged_kv": lambda: gather_paged_kv(k, v, blocks, table[2], RUN_TOKENS),
        }
    return calls


def measure(repeats: int) -> list[dict[str, Any]]:
    """One row a measurement, in microseconds."""
    rows: list[dict[str, Any]] = []
    for kind, to_array in (("numpy", lambda array: array), ("torch", torch.from_numpy)):
        for full in (True, False):
            what = f"plan, {'equal' if full else 'unequal'} lengths"
            rows.append({"what": what, "arrays": kind, "us": plan_us(to_array, full=full, repeats=repeats // 4)})
    for dtype in ("float32", "bfloat16"):
        for kind in ("numpy", "torch"):
            calls = calls_of(kind, dtype)
            for apart, apart_s in (("", 0.0), (", apart", 1e-3)):
                for what, call in calls.items():  # each by itself: in turns they evict each other from the CPU's caches
                    us = median_us(repeats // 4 if apart_s else repeats, call, apart_s)
                    rows.append({"what": f"{what}, {dtype}{apart}", "arrays": kind, "us": us})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000, help="calls per measurement of run; plan takes a quarter")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats)
    for row in rows:
        print(f"{row['what']:<40} {row['arrays']:<8} {row['us']:>8.1f} us")


if __name__ == "__main__":
    main()
