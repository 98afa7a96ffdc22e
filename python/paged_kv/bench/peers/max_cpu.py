"""MAX: its paged attention, over `[pages, 2, layers, page_size, Hk, D]`, and its products with weights in blocks."""

from __future__ import annotations

import math

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType, Weight, ops
from max.graph.quantization import QuantizationEncoding

from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.bench.case_kinds import AttentionCase, Case
from paged_kv.bench.peer import Peer, repeat, unequal
from paged_kv.bench.problems import Array, AttentionProblem, bits
from paged_kv.bench.quantised import QuantisedProblem
from paged_kv.errors import ToolchainError
from paged_kv.runtime.cpu_target import apply_cpu_target

PAGE_SIZE = 128
"""MAX's own page size; it takes no smaller ones on a GPU."""
HOST_INPUTS = 4


class MaxAttention(Peer):
    name = f"MAX flash_attention_ragged, page {PAGE_SIZE}"

    def available(self, case: Case) -> str | None:
        assert isinstance(case, AttentionCase)
        return f"not measured over {case.kv_dtype}" if case.kv_dtype != case.dtype else unequal(case)

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        case = problem.case
        apply_cpu_target()
        graph = flash_graph("peer", DType[case.dtype], case.heads, case.kv_heads, case.head_dim, DeviceRef.CPU())
        self._model = InferenceSession(devices=[CPU()]).load(graph)
        batch, pages = len(case.lengths), case.lengths[0] // PAGE_SIZE
        table = np.random.default_rng(1).permutation(batch * pages).astype(np.uint32).reshape(batch, pages)
        shape = (batch * pages, PAGE_SIZE, case.kv_heads, case.head_dim)
        caches = np.empty((copies, shape[0], 2, 1, *shape[1:]), problem.k.dtype)
        for cache in caches:
            for which, array in enumerate((problem.k, problem.v)):
                bits(cache)[table.reshape(-1), which, 0] = bits(array).reshape(shape)
        offsets, *after = map(
            to_buffer, flash_inputs(table, case.lengths[0], case.new_tokens, 2 * math.prod(shape[1:]))
        )
        self._inputs = [[to_buffer(problem.q), offsets, to_buffer(cache), *after] for cache in caches]

    def run(self, i: int) -> None:
        self._o = self._model.execute(*self._inputs[i % len(self._inputs)])[0]

    def output(self) -> Array:
        return to_numpy(self._o)


def flash_inputs(table: Array, length: int, new: int, page_numbers: int) -> list[Array]:
    """Return what the graph takes beside q and the cache: the rows' offsets, then tokens before the step, pages, the
    longest step and cache, numbers in a page of K and V, and what MAX calls dispatch.
    """
    batch = len(table)
    words = [np.arange(batch + 1) * new, np.full(batch, length - new), table, np.array([new]), np.array([length])]
    return [*(one.astype(np.uint32) for one in words), np.array([page_numbers]), np.zeros(4, np.int64)]


def flash_graph(
    name: str,
    dtype: DType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: DeviceRef,
    module: Module | None = None,
) -> Graph:
    """A graph of it, causal: q, the rows' offsets, and the cache as MAX has it, of which `HOST_INPUTS`, the last ones,
    lie on the host.

    Raises:
        ToolchainError: this MAX has other inputs.
    """
    from max.nn.attention.mask_config import MHAMaskVariant
    from max.nn.kernels import flash_attention_ragged
    from max.nn.kv_cache import MHAKVCacheParams  # compiled by MAX where it is first imported: not on every host

    params = MHAKVCacheParams(
        dtype=dtype, head_dim=head_dim, num_layers=1, devices=[device], page_size=PAGE_SIZE, n_kv_heads=kv_heads
    )
    q_type = TensorType(dtype, ["rows", heads, head_dim], device)
    types = [q_type, TensorType(DType.uint32, ["offsets"], device), *params.flattened_kv_inputs()]
    on_host = [kind.device.is_cpu() for kind in types]
    if on_host != [device.is_cpu()] * (len(types) - HOST_INPUTS) + [True] * HOST_INPUTS:
        raise ToolchainError(f"this MAX has other inputs of paged attention: {types}")
    with Graph(name, input_types=types, module=module) as graph:
        q, offsets, *kv = graph.inputs
        cache = params.unflatten_kv_inputs(iter(kv))[0]
        layer = ops.constant(0, DType.uint32, DeviceRef.CPU())
        mask, scale = MHAMaskVariant.CAUSAL_MASK, head_dim**-0.5
        graph.output(flash_attention_ragged(params, q.tensor, offsets.tensor, cache, layer, mask, scale=scale))
    return graph


MOST_COPIES = 32
"""Each is a model of its own, since MAX packs weights where a model is bound to them: 600 MB of Q4_K."""


class MaxQuantised(Peer):
    name = "MAX qmatmul"

    def prepare(self, problem: QuantisedProblem, copies: int) -> None:
        case = problem.case
        apply_cpu_target()
        session, cpu = InferenceSession(devices=[CPU()]), DeviceRef.CPU()
        with Graph("peer", input_types=[TensorType(DType.float32, ["M", case.inner], cpu)]) as graph:
            w = graph.add_weight(Weight("w", DType.uint8, [case.outer, case.row_bytes], cpu, align=1))
            graph.output(ops.qmatmul(QuantizationEncoding(case.encoding), None, graph.inputs[0].tensor, w))
        self._weights = repeat(problem.w, min(copies, MOST_COPIES))
        compiled = session.compile(graph)
        self._models = [session.init(compiled, weights_registry={"w": to_buffer(weight)}) for weight in self._weights]
        self._x = to_buffer(problem.x)

    def run(self, i: int) -> None:
        self._y = self._models[i % len(self._models)].execute(self._x)[0]

    def output(self) -> Array:
        return to_numpy(self._y)
