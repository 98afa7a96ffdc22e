"""A step of attention in a MAX graph: new tokens go into their pages, then every new token attends over its request.

Prefill and decode are the same graph: a step takes any number of new tokens from each request.
"""

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType

from paged_kv.graphs import ops

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16


def build() -> Graph:
    cpu, f32, u32 = DeviceRef.CPU(), DType.float32, DType.uint32
    types = [
        TensorType(f32, ["R", HEADS, HEAD_DIM], cpu),  # q: R rows, the new tokens of all requests
        TensorType(f32, ["R", KV_HEADS, HEAD_DIM], cpu),  # k
        TensorType(f32, ["R", KV_HEADS, HEAD_DIM], cpu),  # v
        TensorType(u32, ["offsets"], cpu),  # [B + 1]: request b has the rows [offsets[b], offsets[b + 1])
        TensorType(u32, ["B"], cpu),  # tokens that are in the cache already
        TensorType(u32, ["B", "max_pages"], cpu),  # page table
        BufferType(f32, ["pages", 2, PAGE_SIZE, KV_HEADS, HEAD_DIM], cpu),  # the cache, changed in place
    ]
    with Graph("step", input_types=types, custom_extensions=[ops.kernels()]) as graph:
        q, k, v, offsets, lengths, table = (value.tensor for value in graph.inputs[:-1])
        cache = ops.PagedCache.of(graph.inputs[-1].buffer, table)
        row_batch, positions = ops.ragged_rows(offsets, lengths, "R")
        ops.append(cache, k, v, row_batch, positions)
        o, lse = ops.attention(cache, q, row_batch, positions + 1)  # a row sees its own token and those before
        graph.output(o, lse)
    return graph


def main() -> None:
    model = InferenceSession(devices=[CPU()]).load(build())
    rng = np.random.default_rng(0)
    table = np.array([[7, 2, 0], [4, 9, 1]], np.uint32)  # entries past a request's pages are not read
    # Two requests of 22 and 34 tokens; q, k and v of a token lie side by side, as a projection leaves them.
    tokens = [rng.standard_normal((n, HEADS + 2 * KV_HEADS, HEAD_DIM), np.float32) for n in (22, 34)]

    def step(pages: np.ndarray, cached: list[int], new: list[int]) -> np.ndarray:
        """Puts each request's next `new[b]` tokens through the graph; o of each request's last row."""
        rows = np.concatenate([t[c : c + n] for t, c, n in zip(tokens, cached, new, strict=True)])
        q, k, v = map(np.ascontiguousarray, np.split(rows, [HEADS, HEADS + KV_HEADS], axis=1))
        offsets, lengths = np.cumsum([0, *new]).astype(np.uint32), np.array(cached, np.uint32)
        o, _ = model.execute(*map(Buffer.from_dlpack, (q, k, v, offsets, lengths, table, pages)))
        print(f"{len(rows)} rows after {cached} tokens: o {tuple(o.shape)}")
        return o.to_numpy()[offsets[1:] - 1]

    pages = np.zeros((10, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.float32)
    step(pages, [0, 0], [20, 32])  # prefill
    step(pages, [20, 32], [1, 1])  # two decode steps
    last = step(pages, [21, 33], [1, 1])
    at_once = step(np.zeros_like(pages), [0, 0], [22, 34])
    print(f"the same tokens in one step: largest difference {np.abs(last - at_once).max():.1e}")


if __name__ == "__main__":
    main()
