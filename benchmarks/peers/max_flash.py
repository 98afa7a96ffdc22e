"""MAX's own paged attention, `flash_attention_ragged`, over `[pages, 2, layers, page_size, Hk, D]`."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.benchmarks.case_kinds import AttentionCase, Case
from paged_kv.benchmarks.peers.base import Peer, unequal
from paged_kv.benchmarks.problems import Array, AttentionProblem, bits
from paged_kv.runtime.cpu_target import apply_cpu_target

PAGE_SIZE = 128
"""What MAX itself uses."""


class MaxAttention(Peer):
    name = f"MAX flash_attention_ragged, page {PAGE_SIZE}"

    def available(self, case: Case) -> str | None:
        assert isinstance(case, AttentionCase)
        return f"not measured over {case.kv_dtype}" if case.kv_dtype != case.dtype else unequal(case)

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        case = problem.case
        self._model = _model(case)
        batch, pages = len(case.lengths), case.lengths[0] // PAGE_SIZE
        table = np.random.default_rng(1).permutation(batch * pages).astype(np.uint32).reshape(batch, pages)
        shape = (batch * pages, PAGE_SIZE, case.kv_heads, case.head_dim)
        caches = np.empty((copies, shape[0], 2, 1, *shape[1:]), problem.k.dtype)
        for cache in caches:
            for which, array in enumerate((problem.k, problem.v)):
                bits(cache)[table.reshape(-1), which, 0] = bits(array).reshape(shape)

        def host(values: Any, dtype: type) -> Buffer:
            return Buffer.from_dlpack(np.array(values, dtype))

        cached, step = case.lengths[0] - case.new_tokens, case.new_tokens
        before = [to_buffer(problem.q), host(np.arange(batch + 1) * step, np.uint32)]
        # Lengths before the step, pages, the longest step and cache, bytes between pages, and what it calls dispatch.
        after = [host([cached] * batch, np.uint32), Buffer.from_dlpack(table), host([step], np.uint32)]
        after += [host([case.lengths[0]], np.uint32), host([2 * int(np.prod(shape[1:]))], np.int64)]
        after += [host(np.zeros(4), np.int64)]
        self._inputs = [[*before, to_buffer(cache), *after] for cache in caches]

    def run(self, i: int) -> None:
        self._o = self._model.execute(*self._inputs[i % len(self._inputs)])[0]

    def output(self) -> Array:
        return to_numpy(self._o)


def _model(case: AttentionCase) -> Any:
    from max.nn.attention.mask_config import MHAMaskVariant
    from max.nn.kernels import flash_attention_ragged
    from max.nn.kv_cache import MHAKVCacheParams

    apply_cpu_target()
    dtype, cpu = DType[case.dtype], DeviceRef.CPU()
    params = MHAKVCacheParams(
        dtype=dtype,
        head_dim=case.head_dim,
        num_layers=1,
        devices=[cpu],
        page_size=PAGE_SIZE,
        n_kv_heads=case.kv_heads,
    )
    types = [TensorType(dtype, ["rows", case.heads, case.head_dim], cpu), TensorType(DType.uint32, ["offsets"], cpu)]
    with Graph("peer", input_types=[*types, *params.flattened_kv_inputs()]) as graph:
        q, offsets, *kv = graph.inputs
        cache = params.unflatten_kv_inputs(iter(kv))[0]
        layer = ops.constant(0, DType.uint32, cpu)
        mask, scale = MHAMaskVariant.CAUSAL_MASK, case.head_dim**-0.5
        graph.output(flash_attention_ragged(params, q.tensor, offsets.tensor, cache, layer, mask, scale=scale))
    return InferenceSession(devices=[CPU()]).load(graph)
