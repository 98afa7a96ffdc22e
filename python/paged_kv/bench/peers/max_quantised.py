"""MAX's own product with weights in GGUF's blocks."""

from __future__ import annotations

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.quantization import QuantizationEncoding

from paged_kv.arrays.host import to_buffer, to_numpy
from paged_kv.bench.case_kinds import MAX_ENCODINGS, Case, QuantisedCase
from paged_kv.bench.peers.base import Peer, repeat
from paged_kv.bench.problems import Array, QuantisedProblem
from paged_kv.runtime.cpu_target import apply_cpu_target

MOST_COPIES = 32
"""Each is a model of its own, since MAX packs weights where a model is bound to them: 600 MB of Q4_K."""


class MaxQuantised(Peer):
    name = "MAX qmatmul"

    def available(self, case: Case) -> str | None:
        return None if isinstance(case, QuantisedCase) and case.encoding in MAX_ENCODINGS else "no such case"

    def prepare(self, problem: QuantisedProblem, copies: int) -> None:
        case = problem.case
        assert isinstance(case, QuantisedCase)
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
