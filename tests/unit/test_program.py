"""A step as a program without its kernels: sizes, the arena, the numbers of calls, what is not known."""

import re

import numpy as np
import pytest
from max.dtype import DType

from paged_kv.engine.step import demo_libraries
from paged_kv.graphs.encodings import ENCODINGS, row_bytes
from paged_kv.graphs.models import decoder
from paged_kv.graphs.ops import kernels
from paged_kv.runtime import libraries, program_ops
from paged_kv.runtime.graph_reading import Operation, ReadGraph, UnknownGraph, Value, Word, product
from paged_kv.runtime.libraries import Kernel
from paged_kv.runtime.program import Program, graph_kernels, place
from paged_kv.runtime.program_ops import (
    ACTIVATIONS,
    BINARY,
    CONVERTED,
    MEMBERS,
    UNARY,
    KernelCall,
    Layers,
    calls_of,
    calls_of_all,
)

T, B = Word(0, 1, "T"), Word(0, 1, "B")


def value(*shape, dtype=DType.float32):
    return Value(tuple(Word(size) if isinstance(size, int) else size for size in shape), dtype)


def add(x, y):
    z = value(*x.shape)
    return Operation("AddOp", [x, y], [z], {}), z


def chain(length):
    """Each operation reads what the last one made, and one of them the result of the first too."""
    x = value(T, 8)
    x.at = Word(0, 1, "input 0")
    operations, made = [], [x]
    for _ in range(length):
        operation, z = add(made[-1], made[1] if len(made) == length - 1 else x)
        operations.append(operation)
        made.append(z)
    return ReadGraph([x], operations, [made[-1]])


@pytest.mark.parametrize(
    ("sizes", "expected"), [((), Word(1)), ((Word(3), Word(4)), Word(12)), ((Word(3), T, Word(2)), Word(0, 6, "T"))]
)
def test_a_product_has_at_most_one_symbol(sizes, expected):
    assert product(sizes) == expected


@pytest.mark.parametrize("sizes", [(T, B), (T, T), (Word(1, 1, "T"),)])
def test_other_products_are_not_known(sizes):
    with pytest.raises(UnknownGraph):
        product(sizes)


def test_words_are_scaled_and_moved():
    assert T.times(4) == Word(0, 4, "T")
    assert Word(3).times(4).plus(1) == Word(13)
    assert value(T, 8, dtype=DType.bfloat16).bytes == Word(0, 16, "T")


def lives(graph):
    """The slot of each value that an operation makes, and the calls from that which makes it to the last that reads."""
    last = {}
    for index, op in enumerate(graph.operations):
        last.update((id(each.memory), index) for each in (*op.operands, *op.results))
    for index, op in enumerate(graph.operations):
        for each in op.results:
            if each.source is None and each.at.symbol.startswith("slot"):
                yield each, each.at.symbol, set(range(index, last[id(each)] + 1))


def assert_apart(graph, slots):
    by_name = {slot.name: slot for slot in slots}
    living = list(lives(graph))
    assert living
    for number, (value_of, name, calls) in enumerate(living):
        size, whole = value_of.bytes, by_name[name].size
        assert size.symbol == whole.symbol
        assert (size.constant, size.coefficient) <= (whole.constant, whole.coefficient)
        for _, other, others in living[:number]:
            assert name != other or not calls & others


@pytest.mark.parametrize("length", [3, 7])
def test_no_two_values_that_are_alive_share_a_slot(length):
    graph = chain(length)
    slots = place(graph)
    assert_apart(graph, slots)
    assert len(slots) == min(length - 1, 3)


def test_values_that_grow_with_other_sizes_share_none():
    x, y = value(T, 8), value(B, 8)
    x.at, y.at = Word(0, 1, "input 0"), Word(0, 1, "input 1")
    operations, made = [], []
    for source in (x, y) * 3:
        operation, z = add(source, source)
        operations.append(operation)
        made.append(z)
    graph = ReadGraph([x, y], operations, [made[-1]])
    slots = place(graph)
    assert_apart(graph, slots)
    assert {slot.size.symbol for slot in slots} == {"T", "B"}


def test_the_demo_s_step_is_apart_in_its_arena(demo_graph):
    assert_apart(demo_graph, place(demo_graph))


@pytest.fixture
def demo_graph(monkeypatch):
    """The graph of the demo's step, as `StepGraph` reads it."""
    from paged_kv.engine import step

    graphs = []
    monkeypatch.setattr(step, "graph_kernels", lambda graph: graphs.append(graph) or [])
    demo_libraries()
    return graphs[0]


def test_the_demo_calls_two_libraries(demo_graph):
    kernels = graph_kernels(demo_graph)
    assert {kernel.library.file for kernel in kernels} == {"layers_float32", "pages_float32_float32"}
    assert len(demo_graph.outputs) == 1
    assert demo_graph.weights
    assert decoder.STEP


def test_the_numbers_of_calls_lie_one_after_the_other():
    program = Program.__new__(Program)
    kernel = Kernel("linear", ("float32", "float32"))
    first, second = (
        KernelCall(kernel, [MEMBERS, Word(2), T], [Word(5), Word(6)]),
        KernelCall(kernel, [Word(1, 3, "T")], []),
    )
    program.calls = [first, second]
    program.slots = []
    program._pack({kernel: 17})
    # Members, their address, the call's own numbers, then its three of threads.
    assert program._words.tolist() == [5, 6, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0]
    assert program._workers_at == [5, 9]
    assert program._functions.tolist() == [17, 17]
    assert ((program._operands - program._words.ctypes.data) // 8).tolist() == [2, 8]
    assert program._varying.tolist() == [2, 4, 8]
    assert program._coefficients.tolist() == [1, 1, 3]


@pytest.mark.parametrize(
    ("name", "operands", "words"),
    [
        ("MatmulOp", [value(T, 8)] * 2, "the operation MatmulOp"),
        ("AddOp", [value(T, 8), value(B, 8)], "operands whose rows differ"),
        ("CastOp", [value(T, 8, dtype=DType.bfloat16)], "a conversion of bfloat16 to bfloat16"),
        ("TanhOp", [value(T, 8, dtype=DType.float16)], "unary of float16"),
        ("AddOp", [value(T, 8), value(8, dtype=DType.bfloat16)], "AddOp of bfloat16 where float32 is expected"),
        (
            "paged_kv_linear",
            [value(T, 8), value(8, 8), value(8, 8, dtype=DType.bfloat16)],
            "paged_kv_linear of bfloat16",
        ),
    ],
)
def test_what_no_kernel_computes_is_not_known(name, operands, words):
    result = value(T, 8, dtype=operands[0].dtype)
    with pytest.raises(UnknownGraph, match=words):
        calls_of(Operation(name, operands, [result], {}), Layers("float32"))


@pytest.mark.parametrize("is_there", [False, True])
def test_quantised_products_of_a_step_are_calls_of_one_library(is_there, monkeypatch):
    """That of their encodings, or of all where that one lies on this machine."""
    monkeypatch.setattr(libraries, "_there", lambda wanted: dict.fromkeys(wanted if is_there else []))
    monkeypatch.setattr(program_ops, "built_encodings", libraries.built_encodings)

    def product_of(*encodings):
        number = sum(encoding << 5 * at for at, encoding in enumerate(encodings))
        sizes = [row_bytes(ENCODINGS[encoding], 256) for encoding in encodings]
        x, *ws = value(T, 256), *(value(8, size, dtype=DType.uint8) for size in sizes)
        results = [value(T, 8) for _ in encodings]
        return Operation("paged_kv_quantised_linear", [x, *ws], results, {"encodings": number})

    calls = calls_of_all([product_of(2), product_of(2, 5), add(value(T, 8), value(T, 8))[0]], Layers("float32"))
    mask = libraries.ALL_ENCODINGS if is_there else 1 << 2 | 1 << 5
    assert [[call.kernel.mask for call in of_one] for of_one in calls] == [[mask]] * 2 + [[0]]


def test_an_output_that_no_operation_makes_is_not_known():
    x = value(T, 8)
    x.at = Word(0, 1, "input 0")
    with pytest.raises(UnknownGraph, match="an output"):
        place(ReadGraph([x], [], [x]))


def test_an_input_of_another_dtype_or_shape_is_refused():
    program = Program.__new__(Program)
    program._inputs = [value(T, 8), value(T)]
    good = np.zeros((3, 8), np.float32), np.zeros(3, np.float32)
    assert program._sizes(good) == {"T": 3}
    for index, wrong in ((0, np.zeros((3, 8))), (0, np.zeros((3, 9), np.float32)), (1, np.zeros(4, np.float32))):
        inputs = [*good[:index], wrong, *good[index + 1 :]]
        with pytest.raises(Exception, match=f"input {index}: got "):
            program._sizes(inputs)


def mojo_tuple(file, name):
    """The members of `comptime NAME = (...)` in a Mojo file, in lower case and without `DType.`."""
    (members,) = re.findall(rf"^comptime {name} = \(([^)]*)\)", (kernels() / file).read_text(), re.MULTILINE)
    return [each.strip().removeprefix("DType.").lower() for each in members.split(",")]


@pytest.mark.parametrize(
    ("file", "name", "names"),
    [
        ("layers/call.mojo", "ACTIVATIONS", ACTIVATIONS),
        ("layers/call.mojo", "CONVERTED", CONVERTED),
        ("layers/pointwise.mojo", "UNARY", [op.removesuffix("Op") for op in UNARY]),
        ("layers/pointwise.mojo", "BINARY", [op.removesuffix("Op") for op in BINARY]),
    ],
)
def test_mojo_and_python_number_functions_alike(file, name, names):
    assert [each.replace("_", "") for each in mojo_tuple(file, name)] == [
        each.lower().replace("_", "") for each in names
    ]
