"""What the wrappers of graphs/trees.py refuse while a graph is built: nothing here is compiled."""

import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

from paged_kv.errors import ContractError, ContractTypeError, ShapeError
from paged_kv.graphs import trees
from paged_kv.graphs.ops import PagedCache

CPU, GPU = DeviceRef.CPU(), DeviceRef.GPU()
I32, U32 = DType.int32, DType.uint32
ROWS = {
    "parents": TensorType(I32, ["R"], CPU),
    "row_offsets": TensorType(U32, ["offsets"], CPU),
    "cache_lengths": TensorType(U32, ["B"], CPU),
}
MOVES = {
    "batch_indices": TensorType(I32, [7], CPU),
    "sources": TensorType(I32, [7], CPU),
    "targets": TensorType(I32, [7], CPU),
    "lookup_table": TensorType(U32, ["B", "M"], CPU),
    "blocks": BufferType(DType.float32, ["P", 2, 16, 2, 64], CPU),
}


def rows_of(types, **options):
    with Graph("refused", input_types=list((ROWS | types).values())) as graph:
        return trees.TreeRows.of(*(value.tensor for value in graph.inputs), **options)


def move(types):
    with Graph("refused", input_types=list((MOVES | types).values())) as graph:
        *numbers, table = (value.tensor for value in graph.inputs[:-1])
        return trees.move_tokens(PagedCache.of(graph.inputs[-1].buffer, table), *numbers)


@pytest.mark.parametrize(
    ("types", "options", "error", "words"),
    [
        ({"parents": TensorType(U32, ["R"], CPU)}, {}, ContractTypeError, "parents: dtype uint32, expected int32"),
        ({"parents": TensorType(I32, ["R", 2], CPU)}, {}, ShapeError, "parents: rank 2, expected 1"),
        ({"row_offsets": TensorType(I32, ["o"], CPU)}, {}, ContractTypeError, "row_offsets: dtype int32"),
        ({"cache_lengths": TensorType(U32, [], CPU)}, {}, ShapeError, "cache_lengths: rank 0"),
        ({"cache_lengths": TensorType(U32, ["B"], GPU)}, {}, ContractError, "cache_lengths is on"),
        ({}, {"window_left": -2}, ContractError, "window_left must be at least -1"),
        ({}, {"window_left": 2**31}, ContractError, "window_left must be at most"),
        ({}, {"window_left": 1.5}, ContractTypeError, "window_left must be an integer"),
        ({}, {"largest_tree": 0}, ContractError, "largest_tree must be at least 1"),
        ({}, {"largest_tree": None}, ContractTypeError, "largest_tree must be an integer"),
    ],
)
def test_rows_that_are_refused(types, options, error, words):
    with pytest.raises(error, match=words):
        rows_of(types, **options)


@pytest.mark.parametrize(
    ("types", "error", "words"),
    [
        ({"batch_indices": TensorType(U32, [7], CPU)}, ContractTypeError, "batch_indices: dtype uint32"),
        ({"sources": TensorType(I32, [6], CPU)}, ShapeError, "sources: dimension 0 is 6, expected 7"),
        ({"targets": TensorType(I32, [7, 1], CPU)}, ShapeError, "targets: rank 2"),
        ({"targets": TensorType(I32, [7], GPU)}, ContractError, "targets is on"),
    ],
)
def test_moves_that_are_refused(types, error, words):
    with pytest.raises(error, match=words):
        move(types)


def test_no_tensor_is_refused():
    with pytest.raises(ContractTypeError, match="parents must be a graph tensor, not list"):
        trees.TreeRows.of([-1], [0, 1], [0])


@pytest.mark.parametrize("call", [rows_of, move])
def test_the_right_arguments_pass_the_checks(call):
    """No custom ops are loaded: MAX does not know the op."""
    with pytest.raises(ValueError, match="paged_kv_"):
        call({})
