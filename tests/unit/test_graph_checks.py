"""The refusals of graphs/ops.py while a graph is built: nothing here is compiled.

Every call is made from arguments that are right but for one. A call that slipped through would fail otherwise: no
custom ops are loaded, so MAX does not know the op (`test_the_right_arguments_pass_the_checks`).
"""

import math

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

from paged_kv.errors import ContractError, ContractTypeError, PagedKVError, ShapeError
from paged_kv.graphs import ops
from paged_kv.graphs.ops import PagedCache

CPU, GPU = DeviceRef.CPU(), DeviceRef.GPU()
F16, F32, I32, U32, I64 = DType.float16, DType.float32, DType.int32, DType.uint32, DType.int64
NHD = ["P", 16, 2, 64]


def tensor(dtype, *shape, device=CPU):
    return TensorType(dtype, list(shape), device)


def buffer(dtype, *shape, device=CPU):
    return BufferType(dtype, list(shape), device)


TYPES = {
    "k": tensor(F32, "N", 2, 64),
    "v": tensor(F32, "N", 2, 64),
    "batch_indices": tensor(I32, "N"),
    "positions": tensor(I32, "N"),
    "q": tensor(F32, "R", 6, 64),
    "row_batch": tensor(I32, "R"),
    "row_lengths": tensor(I32, "R"),
    "indptr": tensor(I32, "offsets"),
    "sources": tensor(I32, "N"),
    "targets": tensor(I32, "N"),
    "k_blocks": buffer(F32, *NHD),
    "v_blocks": buffer(F32, *NHD),
    "lookup_table": tensor(U32, "B", "max_pages"),
    "view": tensor(I64, 12),
    "row_offsets": tensor(U32, "offsets"),
    "cache_lengths": tensor(U32, "B"),
    "states": tensor(F32, "S", "n", 6, 64),
    "sums": tensor(F32, "S", "n", 6),
}
BOTH = {"one": buffer(F32, "P", 2, 16, 2, 64)}  # one buffer of K and V, passed twice


def call(op, types=None, kv_layout="NHD", *, view=False, values=None, **options):
    """Builds a graph of one op from TYPES, changed by `types`; `values` stand in for graph values."""
    types = {**TYPES, **(types or {})}
    with Graph("refused", input_types=list(types.values())) as graph:
        inputs = zip(types.items(), graph.inputs, strict=True)
        args = {name: x.buffer if isinstance(kind, BufferType) else x.tensor for (name, kind), x in inputs}
        args.update(values or {})
        if op == "ragged_rows":
            return ops.ragged_rows(args["row_offsets"], args["cache_lengths"], "N")
        if op == "merge_states":
            return ops.merge_states(args["states"], args["sums"])
        k_blocks, v_blocks = (args.get("one", args[name]) for name in ("k_blocks", "v_blocks"))
        cache = PagedCache(k_blocks, v_blocks, args["lookup_table"], kv_layout, args["view"] if view else None)
        if op == "append":
            return ops.append(cache, args["k"], args["v"], args["batch_indices"], args["positions"], **options)
        if op == "gather":
            return ops.gather(cache, args["indptr"], "N", **options)
        if op == "copy_pages":
            return ops.copy_pages(cache, args["sources"], args["targets"])
        return ops.attention(cache, args["q"], args["row_batch"], args["row_lengths"], **options)


def both(*shape):
    return {"types": {"one": buffer(F32, *shape)}}


def given(name, kind):
    return {"types": {name: kind}}


def of_head_dim(head_dim):
    blocks = buffer(F32, "P", 16, 2, head_dim)
    return {"types": {"k_blocks": blocks, "v_blocks": blocks, "q": tensor(F32, "R", 6, head_dim)}}


FLAT = {name: buffer(F32, "elements") for name in ("k_blocks", "v_blocks")}
STRIDED = {"types": FLAT, "kv_layout": "STRIDED", "view": True}
NOT_A_TENSOR = np.zeros((2, 2), np.float32)

CACHE = [
    ("a tensor as storage", {"values": {"k_blocks": NOT_A_TENSOR}}, ContractTypeError, "k_blocks"),
    ("no buffer", given("v_blocks", tensor(F32, *NHD)), ContractTypeError, "v_blocks"),
    ("dtype", given("k_blocks", buffer(DType.float64, *NHD)), ContractTypeError, "k_blocks.*float64"),
    ("K, V dtypes", given("v_blocks", buffer(F16, *NHD)), ContractTypeError, "v_blocks.*float32.*got float16"),
    ("K, V devices", given("v_blocks", buffer(F32, *NHD, device=GPU)), ContractError, "v_blocks.*gpu"),
    ("K, V shapes", given("v_blocks", buffer(F32, "P", 16, 4, 64)), ShapeError, "v_blocks.*2, 64.*4, 64"),
    ("K, V pages", given("v_blocks", buffer(F32, "Q", 16, 2, 64)), ShapeError, "v_blocks.*P.*Q"),
    ("rank 3", both("P", 32, 64), ShapeError, "k_blocks.*rank.*got 3"),
    ("rank 7", both(1, "P", 2, 3, 16, 2, 64), ShapeError, "k_blocks.*rank.*got 7"),
    ("K and V in one", both("P", 3, 16, 2, 64), ShapeError, "k_blocks.*dimension 1.*3"),
    ("K and V in one, symbolic", both("P", "two", 16, 2, 64), ShapeError, "k_blocks.*dimension 1.*two"),
    ("layout", {"kv_layout": "HDN"}, ContractError, "kv_layout.*'HDN'"),
    ("HND of all layers", {**both("P", 2, 3, 16, 2, 64), "kv_layout": "HND"}, ContractError, "kv_layout.*rank 6"),
    ("table dtype", given("lookup_table", tensor(I32, "B", "m")), ContractTypeError, "lookup_table.*uint32, got int32"),
    ("table rank", given("lookup_table", tensor(U32, "B")), ShapeError, "lookup_table.*rank.*got 1"),
    ("table device", given("lookup_table", tensor(U32, "B", "m", device=GPU)), ContractError, "lookup_table.*gpu"),
    ("table is no tensor", {"values": {"lookup_table": NOT_A_TENSOR}}, ContractTypeError, "lookup_table.*ndarray"),
    ("strided rank", {"kv_layout": "STRIDED", "view": True}, ShapeError, "k_blocks.*rank.*got 4"),
    ("strided without view", {**STRIDED, "view": False}, ContractError, "view"),
    ("view dtype", {**STRIDED, "types": {**FLAT, "view": tensor(I32, 12)}}, ContractTypeError, "view.*int32"),
    ("view size", {**STRIDED, "types": {**FLAT, "view": tensor(I64, 8)}}, ShapeError, "view.*12 .*got 8"),
    ("negative layer", {**both("P", 2, 3, 16, 2, 64), "layer": -1}, ContractError, "layer.*3 layers, got -1"),
    ("layer past the last", {**both("P", 2, 3, 16, 2, 64), "layer": 3}, ContractError, "layer.*3 layers, got 3"),
    ("layer without layers", {"layer": 1}, ContractError, "layer.*1 layers, got 1"),
]
ON_GPU = {name: type(kind)(kind.dtype, kind.shape, CPU if name == "view" else GPU) for name, kind in TYPES.items()}
OWN = [
    ("append", given("k", tensor(F16, "N", 2, 64)), ContractTypeError, "k.*float32, got float16"),
    ("append", given("v", tensor(F16, "N", 2, 64)), ContractTypeError, "v.*float32, got float16"),
    ("append", given("k", tensor(F32, "N", 128)), ShapeError, "k.*rank.*got 2"),
    ("append", given("k", tensor(F32, "N", 4, 64)), ShapeError, "k.*dimension 1 to be 2, got 4"),
    ("append", given("k", tensor(F32, "N", 2, 32)), ShapeError, "k.*dimension 2 to be 64, got 32"),
    ("append", given("v", tensor(F32, "N", 4, 64)), ShapeError, "v.*dimension 1 to be 2, got 4"),
    ("append", given("v", tensor(F32, "N", 2, 32)), ShapeError, "v.*dimension 2 to be 64, got 32"),
    ("append", {"types": {"k": tensor(F32, 4, 2, 64), "v": tensor(F32, 5, 2, 64)}}, ShapeError, "v: .*4, got 5"),
    ("append", {"types": {"k": tensor(F32, 4, 2, 64), "positions": tensor(I32, 5)}}, ShapeError, "positions.*4, got 5"),
    ("append", given("k", tensor(F32, "N", 2, 64, device=GPU)), ContractError, "k.*got gpu"),
    ("append", given("batch_indices", tensor(I64, "N")), ContractTypeError, "batch_indices.*int32, got int64"),
    ("append", given("batch_indices", tensor(I32, "N", 1)), ShapeError, "batch_indices.*rank.*got 2"),
    ("append", given("positions", tensor(U32, "N")), ContractTypeError, "positions.*int32, got uint32"),
    ("append", {"values": {"k": NOT_A_TENSOR}}, ContractTypeError, "k.*tensor, got ndarray"),
    ("append", {"values": {"positions": [0, 1]}}, ContractTypeError, "positions.*tensor, got list"),
    ("gather", given("indptr", tensor(U32, "offsets")), ContractTypeError, "indptr.*int32, got uint32"),
    ("gather", given("indptr", tensor(I32, "offsets", device=GPU)), ContractError, "indptr.*got gpu"),
    ("gather", {**STRIDED, "head_dim": 64}, ContractError, "num_kv_heads"),
    ("gather", {**STRIDED, "num_kv_heads": 2}, ContractError, "head_dim"),
    ("gather", {"num_kv_heads": 4}, ShapeError, "num_kv_heads: expected 2.*got 4"),
    ("gather", {"head_dim": 32}, ShapeError, "head_dim: expected 64.*got 32"),
    ("copy_pages", given("sources", tensor(U32, "N")), ContractTypeError, "sources.*int32, got uint32"),
    ("copy_pages", given("targets", tensor(I32, "N", 1)), ShapeError, "targets.*rank.*got 2"),
    ("copy_pages", {"types": {"sources": tensor(I32, 3), "targets": tensor(I32, 4)}}, ShapeError, "targets.*3, got 4"),
    ("attention", given("q", tensor(I32, "R", 6, 64)), ContractTypeError, "q: .*int32"),
    ("attention", given("q", tensor(F32, "R", 384)), ShapeError, "q.*rank.*got 2"),
    ("attention", given("q", tensor(F32, "R", 6, 32)), ShapeError, "q.*dimension 2 to be 64, got 32"),
    ("attention", given("q", tensor(F32, "R", 5, 64)), ShapeError, "q: .*2 KV heads, got 5 heads"),
    ("attention", given("q", tensor(F32, "R", 6, 64, device=GPU)), ContractError, "q.*got gpu"),
    ("attention", {"values": {"q": NOT_A_TENSOR}}, ContractTypeError, "q.*tensor, got ndarray"),
    ("attention", given("row_batch", tensor(I64, "R")), ContractTypeError, "row_batch.*int32, got int64"),
    ("attention", given("row_lengths", tensor(U32, "R")), ContractTypeError, "row_lengths.*int32, got uint32"),
    ("attention", {"types": {"q": tensor(F32, 4, 6, 64), "row_batch": tensor(I32, 5)}}, ShapeError, "row_batch.*got 5"),
    ("attention", {"window_left": -2}, ContractError, "window_left.*-2"),
    ("attention", {"window_left": np.int32(-2)}, ContractError, "window_left.*-2"),
    ("attention", {"window_left": 2.5}, ContractTypeError, "window_left.*2.5"),
    ("attention", {"logits_soft_cap": -1}, ContractError, "logits_soft_cap.*-1"),
    ("attention", {"logits_soft_cap": math.nan}, ContractError, "logits_soft_cap.*nan"),
    ("attention", {"logits_soft_cap": np.float32(math.inf)}, ContractError, "logits_soft_cap.*inf"),
    ("attention", {"sm_scale": math.inf}, ContractError, "sm_scale.*inf"),
    ("attention", {"sm_scale": math.nan}, ContractError, "sm_scale.*nan"),
    *(("attention", of_head_dim(n), ShapeError, f"q.*head_dim.*got {n}") for n in (4, 12, 520)),
    ("attention", given("q", tensor(F32, "R", 6, "D")), ContractError, "sm_scale.*D"),
    ("attention", {"batch_invariant": True}, ContractError, "batch_invariant: requires a GPU"),
    ("attention", {"gpu_kernel": "fast"}, ContractError, "gpu_kernel: expected 'best' or 'plain', got 'fast'"),
    ("attention", {"types": ON_GPU | {"q": TYPES["q"]}}, ContractError, "q: expected device gpu:0, got cpu:0"),
    ("attention", {"types": ON_GPU | {"v_blocks": TYPES["v_blocks"]}}, ContractError, "v_blocks: .*gpu:0, as k_blocks"),
    ("merge_states", given("states", tensor(F32, "S", 6, 64)), ShapeError, "v: expected rank 4, got 3"),
    ("merge_states", given("states", tensor(DType.float64, "S", "n", 6, 64)), ContractTypeError, "v.*got float64"),
    ("merge_states", given("sums", tensor(F16, "S", "n", 6)), ContractTypeError, "s.*got float16"),
    ("merge_states", given("sums", tensor(F32, "S", "n", 5)), ShapeError, "s.*dimension 2 to be 6, got 5"),
    ("merge_states", given("sums", tensor(F32, "S", "n", 6, device=GPU)), ContractError, "s: .* cpu:0, got gpu:0"),
    ("ragged_rows", given("row_offsets", tensor(I32, "offsets")), ContractTypeError, "row_offsets.*uint32, got int32"),
    ("ragged_rows", given("row_offsets", tensor(U32, "B", 2)), ShapeError, "row_offsets.*rank.*got 2"),
    ("ragged_rows", given("cache_lengths", tensor(I64, "B")), ContractTypeError, "cache_lengths.*uint32, got int64"),
    ("ragged_rows", given("cache_lengths", tensor(U32, "B", device=GPU)), ContractError, "cache_lengths.*got gpu"),
    ("ragged_rows", {"values": {"row_offsets": [0, 1]}}, ContractTypeError, "row_offsets.*tensor, got list"),
    ("ragged_rows", {"values": {"cache_lengths": [0, 1]}}, ContractTypeError, "cache_lengths.*tensor, got list"),
]


def refuse(op, change, error, message):
    with pytest.raises(PagedKVError, match=message) as caught:
        call(op, **change)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", ["append", "gather", "attention"])
@pytest.mark.parametrize(("change", "error", "message"), [pytest.param(*row[1:], id=row[0]) for row in CACHE])
def test_cache(op, change, error, message):
    refuse(op, change, error, message)


@pytest.mark.parametrize(
    ("op", "change", "error", "message"), [pytest.param(*row, id=f"{row[0]}-{row[3]}") for row in OWN]
)
def test_own_arguments(op, change, error, message):
    refuse(op, change, error, message)


@pytest.mark.parametrize(
    ("name", "kind", "error", "message"),
    [
        ("window_left", tensor(F32), ContractTypeError, "window_left.*float32"),
        ("window_left", tensor(I32, 1), ShapeError, "window_left.*rank.*got 1"),
        ("window_left", tensor(I32, device=GPU), ContractError, "window_left.*got gpu"),
        ("options", tensor(I32, 6), ContractTypeError, "options.*int32"),
        ("options", tensor(F32, 5), ShapeError, "options.*6, got 5"),
        ("alibi_slopes", tensor(F32, 5), ShapeError, "alibi_slopes.*6, got 5"),
        ("sinks", tensor(F32, 6, 1), ShapeError, "sinks.*rank.*got 2"),
        ("sinks", tensor(F32, 6, device=GPU), ContractError, "sinks.*got gpu"),
    ],
)
def test_options_as_graph_values(name, kind, error, message):
    kinds = {"alibi_slopes": tensor(F32, 6), "sinks": tensor(F32, 0), "window_left": tensor(I32)}
    kinds = {**kinds, "options": tensor(F32, 6), name: kind}
    with Graph("options", input_types=[*TYPES.values(), *kinds.values()]) as graph:
        args = dict(zip([*TYPES, *kinds], graph.inputs, strict=True))
        cache = PagedCache(args["k_blocks"].buffer, args["v_blocks"].buffer, args["lookup_table"].tensor)
        rows = (args[key].tensor for key in ("q", "row_batch", "row_lengths"))
        with pytest.raises(error, match=message):
            ops.attention_at_run_time(cache, *rows, **{key: args[key].tensor for key in kinds})


OPS = ("append", "gather", "copy_pages", "attention", "ragged_rows", "merge_states")


@pytest.mark.parametrize("op", OPS)
def test_the_right_arguments_pass_the_checks(op):
    with pytest.raises(Exception, match=f"paged_kv_{op}") as caught:
        call(op)
    assert not isinstance(caught.value, PagedKVError)


@pytest.mark.parametrize("op", OPS)
def test_everything_but_the_view_lies_on_the_gpu(op):
    with pytest.raises(ValueError, match="paged_kv_"):
        call(op, ON_GPU)
