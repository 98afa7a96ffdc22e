"""What the API itself costs on the CPU: `plan` over large page tables, and `run` and the torch operator where there is
little to attend to.

    python -m benchmarks.api_overhead [--csv] [--repeats N]

`plan`: 256 requests of up to 32,768 tokens, pages of 16 (524,288 page ids where all are full), checks included.
`run`: one request of 16 tokens, 8 query and 2 KV heads of 128. Its overhead is what it costs beyond the compiled
graph's own execution with operands prepared beforehand, on the same inputs. `paged_attention`: the operator on the same
request, which runs no graph, also where a millisecond of other work is done before each call.
Times are medians of single calls; a tenth as many calls are made before to warm up.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.dtype import DType

from paged_kv.arrays.cache_storage import cache_operands, paged_views
from paged_kv.arrays.host import as_numpy
from paged_kv.bench.provenance import provenance
from paged_kv.decode import BatchDecodeWithPagedKVCacheWrapper
from paged_kv.options import AttentionOptions
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.variants import Variant
from paged_kv.torch import paged_attention

PLAN_BATCH, PLAN_TOKENS, PAGE_SIZE = 256, 32768, 16
HEADS = (8, 2, 128)  # query heads, KV heads, head_dim
RUN_TOKENS = 16


def medians_us(repeats: int, *calls: Callable[[], Any], apart_s: float = 0.0) -> list[float]:
    """The median of `repeats` single runs of each call; the calls take turns, to meet the same noise.

    Before each one the thread computes for `apart_s`.
    """
    times = np.zeros((repeats // 10 + 1 + repeats, len(calls)))
    for row in times:
        for i, call in enumerate(calls):
            begin = time.perf_counter() + apart_s
            while time.perf_counter() < begin:
                pass
            start = time.perf_counter_ns()
            call()
            row[i] = time.perf_counter_ns() - start
    return [float(median) / 1e3 for median in np.median(times[-repeats:], axis=0)]


def plan_us(to_array: Callable[[np.ndarray], Any], *, full: bool, repeats: int) -> float:
    """`plan` of one page table, either of full tables or of lengths from half of that up."""
    rng = np.random.default_rng(0)
    most = PLAN_TOKENS // PAGE_SIZE
    pages = np.full(PLAN_BATCH, most) if full else rng.integers(most // 2, most, PLAN_BATCH, endpoint=True)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    indices = rng.permutation(indptr[-1]).astype(np.int32)
    table: list[Any] = [to_array(array) for array in (indptr, indices, np.full(PLAN_BATCH, PAGE_SIZE, np.int32))]
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(None)
    return medians_us(repeats, lambda: wrapper.plan(*table, *HEADS, PAGE_SIZE, q_data_type="bfloat16"))[0]


def run_us(kind: str, dtype: str, repeats: int, *, operator: bool = False, apart_s: float = 0.0) -> tuple[float, float]:
    """`run` of one short request, or the torch operator, and the bare execution of the same graph."""
    heads, kv_heads, head_dim = HEADS
    q: Any = torch.randn(1, heads, head_dim).to(getattr(torch, dtype))
    cache: Any = torch.randn(4, 2, PAGE_SIZE, kv_heads, head_dim).to(getattr(torch, dtype))
    table, tokens = (torch.tensor(values, dtype=torch.int32) for values in ([[2]], [RUN_TOKENS]))
    views = cache[:, 0], cache[:, 1]
    if kind == "numpy":
        q, cache = as_numpy(q, "q"), as_numpy(cache, "cache")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
    indptr, indices, last = (np.array(values, np.int32) for values in ([0, 1], [2], [RUN_TOKENS]))
    wrapper.plan(indptr, indices, last, *HEADS, PAGE_SIZE, q_data_type=dtype)

    variant = Variant("attention", DType[dtype], DType[dtype])
    k_blocks, v_blocks, view = cache_operands(*paged_views(cache, "NHD"))
    none = np.zeros(0, np.float32)
    operands = [
        as_numpy(q, "q"),
        np.zeros(1, np.int32),
        last,
        k_blocks,
        v_blocks,
        indices.astype(np.uint32)[None],
        view,
        none,
        none,
        np.array(-1, np.int32),
        AttentionOptions().numbers(head_dim),
    ]
    runtime = default_runtime()

    def call() -> Any:
        return paged_attention(q, *views, table, tokens) if operator else wrapper.run(q, cache)

    total, bare = medians_us(repeats, call, lambda: runtime.execute(variant, *operands), apart_s=apart_s)
    return total, bare


def measure(repeats: int) -> list[dict[str, Any]]:
    """One row a measurement, in microseconds."""
    rows: list[dict[str, Any]] = []
    for kind, to_array in (("numpy", lambda array: array), ("torch", torch.from_numpy)):
        for full in (True, False):
            what = f"plan, {'equal' if full else 'unequal'} lengths"
            rows.append({"what": what, "arrays": kind, "total_us": plan_us(to_array, full=full, repeats=repeats // 4)})
    for dtype in ("float32", "bfloat16"):
        for kind in ("numpy", "torch"):
            total, bare = run_us(kind, dtype, repeats)
            row = {"what": f"run, {dtype}", "arrays": kind, "total_us": total, "graph_us": bare}
            rows.append(row | {"overhead_us": total - bare})
        for apart, apart_s in (("", 0.0), (", apart", 1e-3)):
            total, _ = run_us("torch", dtype, repeats, operator=True, apart_s=apart_s)
            rows.append({"what": f"paged_attention, {dtype}{apart}", "arrays": "torch", "total_us": total})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", action="store_true", help="also write results/api_overhead.csv beside this script")
    parser.add_argument("--repeats", type=int, default=2000, help="calls per measurement of run; plan takes a quarter")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats)
    print(f"{'what':<32} {'arrays':<8} {'total us':>10} {'graph us':>10} {'overhead us':>12}")
    for row in rows:
        numbers = [f"{row[name]:.1f}" if name in row else "" for name in ("total_us", "graph_us", "overhead_us")]
        print(f"{row['what']:<32} {row['arrays']:<8} {numbers[0]:>10} {numbers[1]:>10} {numbers[2]:>12}")
    if arguments.csv:
        path = Path(__file__).parent / "results" / "api_overhead.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="") as file:
            names = ["what", "arrays", "total_us", "graph_us", "overhead_us", "machine", "date", "commit"]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                values = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in row.items()}
                writer.writerow(values | provenance())


if __name__ == "__main__":
    main()
