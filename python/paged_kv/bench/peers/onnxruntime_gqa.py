"""ONNX Runtime's GroupQueryAttention over contiguous K and V, past and present in one memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.bench.case_kinds import AttentionCase, Case
from paged_kv.bench.peer import Peer, batched, repeat, unequal
from paged_kv.bench.problems import Array, AttentionProblem


class OnnxRuntimeAttention(Peer):
    """Each run also writes the newest token, as the operator does."""

    name, packages = "ONNX Runtime GQA, contiguous", ("onnx", "onnxruntime")

    def available(self, case: Case) -> str | None:
        super().available(case)
        assert isinstance(case, AttentionCase)
        if case.dtype not in ("float32", "float16") or case.kv_dtype != case.dtype:
            return f"takes no {case.kv_dtype} on the CPU"
        return unequal(case) if case.new_tokens == 1 else "only decode is measured"

    def prepare(self, problem: AttentionProblem, copies: int) -> None:
        import onnxruntime

        case = problem.case
        self._case = case
        batch, length = len(case.lengths), case.lengths[0]
        self._session = onnxruntime.InferenceSession(_model(case), providers=["CPUExecutionProvider"])
        last = problem.indptr[1:] - 1
        shared = {
            "q": problem.q.reshape(batch, 1, -1),
            "k": problem.k[last].reshape(batch, 1, -1),
            "v": problem.v[last].reshape(batch, 1, -1),
            "lens": np.full(batch, length - 1, np.int32),
            "total": np.array([length], np.int32),
        }
        self._alive = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in shared.items()}
        self._caches = [repeat(array, copies) for array in batched(problem)]
        self._bindings: list[Any] = []
        for k, v in zip(*self._caches, strict=True):
            binding = self._session.io_binding()
            binding.bind_output("o")  # the first output
            for name, value in self._alive.items():
                binding.bind_ortvalue_input(name, value)
            for past, present, array in (("pk", "ok", k), ("pv", "ov", v)):
                value = onnxruntime.OrtValue.ortvalue_from_numpy(array)  # over the same memory
                binding.bind_ortvalue_input(past, value)
                binding.bind_ortvalue_output(present, value)
            self._bindings.append(binding)

    def run(self, i: int) -> None:
        self._latest = self._bindings[i % len(self._bindings)]
        self._session.run_with_iobinding(self._latest)

    def output(self) -> Array:
        o: Array = self._latest.get_outputs()[0].numpy()
        return o.reshape(len(self._case.lengths), self._case.heads, self._case.head_dim)


def _model(case: AttentionCase) -> bytes:
    from onnx import TensorProto, helper

    batch, kv = len(case.lengths), case.kv_heads * case.head_dim
    cache = [batch, case.kv_heads, case.lengths[0], case.head_dim]
    proto = TensorProto.FLOAT if case.dtype == "float32" else TensorProto.FLOAT16
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "pk", "pv", "lens", "total"],
        ["o", "ok", "ov"],
        domain="com.microsoft",
        num_heads=case.heads,
        kv_num_heads=case.kv_heads,
        scale=case.head_dim**-0.5,
    )

    def info(name: str, *shape: int, kind: int = proto) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    q = [batch, 1, case.heads * case.head_dim]
    inputs = [info("q", *q), info("k", batch, 1, kv), info("v", batch, 1, kv), info("pk", *cache), info("pv", *cache)]
    inputs += [info("lens", batch, kind=TensorProto.INT32), info("total", 1, kind=TensorProto.INT32)]
    graph = helper.make_graph([node], "gqa", inputs, [info("o", *q), info("ok", *cache), info("ov", *cache)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    serialized: bytes = model.SerializeToString()
    return serialized
