"""Operations of a graph as calls of kernels: the numbers of each call, in the order of its struct in `mojo_ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from max.dtype import DType

from paged_kv.graphs.encodings import ENCODINGS, block_elements, row_bytes
from paged_kv.runtime.graph_reading import Operation, UnknownGraph, Value, Word, product
from paged_kv.runtime.libraries import COPIED, Kernel, built_encodings

ACTIVATIONS = ("silu", "gelu_tanh", "sigmoid", "relu", "none")
"""In the order of `mojo_ops/layers/call.mojo`."""
CONVERTED = ("bfloat16", "float16", "int32")
"""In the order of `mojo_ops/layers/call.mojo`."""
UNARY = ("TanhOp", "FloorOp", "Log1pOp", "RsqrtOp", "GeluTanhOp", "SigmoidOp")
"""In the order of `mojo_ops/layers/pointwise.mojo`."""
BINARY = ("AddOp", "SubOp", "MulOp", "DivOp", "MinOp", "MaxOp")
_COMPUTING = ("paged_kv_rms_norm", "paged_kv_linear", "paged_kv_add_scaled", "AddOp")
_DTYPES = {"f": DType.float32, "i": DType.int32, "u": DType.uint32, "b": DType.uint8}
_ENCODING_BITS = 5
_ROPE_THETA = 3


class Call(NamedTuple):
    """A call of a kernel, but for its threads."""

    kernel: Kernel
    words: list[Word]
    members: list[Word] = []  # noqa: RUF012 - never changed
    """Numbers to which the first word of a product of several weights points."""


@dataclass(frozen=True)
class Layers:
    """The library of a step's small ops."""

    dtype: str
    """The dtype of the step's activations."""

    @staticmethod
    def of(operations: Sequence[Operation]) -> Layers:
        """The library of some operations: that of bfloat16 where one computes in it."""
        computing = [op for op in operations if op.name in _COMPUTING]
        narrow = any(value.dtype == DType.bfloat16 for op in computing for value in op.results)
        return Layers("bfloat16" if narrow else "float32")

    def kernel(self, kind: str, dtype: DType | None = None) -> Kernel:
        """One of its kernels; of another dtype, that of another such library."""
        name = self.dtype if dtype is None else dtype.name
        if name not in ("float32", "bfloat16"):
            raise UnknownGraph(f"{kind} of {name}")
        return Kernel(kind, (name,))


def calls_of_all(operations: Sequence[Operation], layers: Layers) -> list[list[Call]]:
    """The calls of each operation. Those that take quantised weights are calls of one library, of all encodings of the
    step: the code of an encoding is compiled once.

    Raises:
        UnknownGraph: as `calls_of`.
        ToolchainError: as `built_encodings`.
    """
    of_each = [calls_of(op, layers) for op in operations]
    masks: dict[str, int] = {}
    for call in chain.from_iterable(of_each):
        if mask := call.kernel.mask:
            (dtype,) = call.kernel.dtypes
            masks[dtype] = masks.get(dtype, 0) | mask
    masks = {dtype: built_encodings(dtype, mask) for dtype, mask in masks.items()}

    def together(call: Call) -> Call:
        if not call.kernel.mask:
            return call
        return call._replace(kernel=replace(call.kernel, mask=masks[call.kernel.dtypes[0]]))

    return [[together(call) for call in calls] for calls in of_each]


def calls_of(op: Operation, layers: Layers) -> list[Call]:
    """The calls that compute an operation.

    Raises:
        UnknownGraph: there is no kernel for it.
    """
    if op.name not in _OPS:
        raise UnknownGraph(f"the operation {op.name}")
    read, dtypes = _OPS[op.name]
    _check_dtypes(op, dtypes)
    return [read(op, layers)]


def _check_dtypes(op: Operation, expected: str) -> None:
    """Holds the dtypes of an operation's values against the ones that its kernel reads: a kernel gets addresses alone.

    Args:
        expected: A letter of `_DTYPES` for each result, `|`, and one for each operand; `x` and `w` are each one dtype
            throughout, `?` is any, and a last `*` repeats the letter before it.

    Raises:
        UnknownGraph: one has another dtype.
    """
    letters = dict(_DTYPES)
    for values, sequence in zip((op.results, op.operands), expected.split("|"), strict=True):
        if sequence.endswith("*"):
            sequence = sequence[:-1] + sequence[-2] * (len(values) - len(sequence) + 1)
        for value, letter in zip(values, sequence, strict=False):
            if letter != "?" and letters.setdefault(letter, value.dtype) != value.dtype:
                raise UnknownGraph(f"{op.name} of {value.dtype.name} where {letters[letter].name} is expected")


def _require(op: Operation, fits: bool, what: str) -> None:
    """A size that the registered op compares when it runs; a kernel gets addresses and sizes alone.

    Raises:
        UnknownGraph: it does not fit.
    """
    if not fits:
        raise UnknownGraph(f"{op.name}: {what}")


def _take_rows(op: Operation, layers: Layers) -> Call:
    (y,), (x, rows) = op.results, op.operands
    row_bytes = product(x.shape[1:]).times(x.dtype.size_in_bytes)
    return Call(layers.kernel("take_rows"), [y.address, x.address, rows.address, rows.shape[0], row_bytes, x.shape[0]])


def _gather(op: Operation, layers: Layers) -> Call:
    (y,), (x, rows, *_) = op.results, op.operands
    if rows.dtype != DType.int32 or y.shape != (*rows.shape, *x.shape[1:]):
        raise UnknownGraph("a gather that takes no rows")
    row_bytes = product(x.shape[1:]).times(x.dtype.size_in_bytes)
    return Call(layers.kernel("take_rows"), [y.address, x.address, rows.address, rows.size, row_bytes, x.shape[0]])


def _take_columns(op: Operation, layers: Layers) -> Call:
    (y,), (x, place) = op.results, op.operands
    if place.data is None:
        raise UnknownGraph("columns that are not constant")
    groups, first = map(int, place.data)
    size = x.dtype.size_in_bytes
    sizes = [x.static(1) // groups * size, first * size, y.static(1) // groups * size]
    return Call(layers.kernel("take_columns"), [y.address, x.address, x.shape[0], Word(groups), *map(Word, sizes)])


def _broadcast_row(op: Operation, layers: Layers) -> Call:
    """One row stands for all: they are the columns of one row, whose groups all begin with the first column."""
    (y,), x = op.results, op.operands[0]
    if product(x.shape) != product(y.shape[1:]):
        raise UnknownGraph("a broadcast that is none of a row")
    row_bytes = product(x.shape).times(x.dtype.size_in_bytes)
    return Call(
        layers.kernel("take_columns"),
        [y.address, x.address, Word(1), y.shape[0], Word(0), Word(0), row_bytes],
    )


def _rms_norm(op: Operation, layers: Layers) -> Call:
    (y,), (x, weight, numbers) = op.results, op.operands
    wide = int(weight.dtype == DType.float32)
    if weight.dtype not in (x.dtype, DType.float32):
        raise UnknownGraph(f"a norm of {x.dtype} by {weight.dtype}")
    words = [y.address, x.address, weight.address, *x.shape, numbers.address]
    return Call(layers.kernel("rms_norm", x.dtype), [*words, Word(int(op.parameters["rounds_once"])), Word(wide)])


def _rotate(op: Operation, layers: Layers) -> Call:
    (y,), (x, cos, sin) = op.results, op.operands
    columns, head_dim = cos.static(1), x.static(2)
    _require(op, 2 * columns <= head_dim, f"cos: its {columns} columns are too many for heads of {head_dim}")
    addresses = [each.address for each in (y, x, cos, sin)]
    pairs = Word(int(op.parameters["pairs"]))
    return Call(layers.kernel("rotate", x.dtype), [*addresses, *x.shape, cos.shape[1], pairs])


def _hadamard(op: Operation, layers: Layers) -> Call:
    (y,), (x,) = op.results, op.operands
    return Call(layers.kernel("hadamard", x.dtype), [y.address, x.address, *x.shape])


def _rotary_tables(op: Operation, layers: Layers) -> Call:
    (cos, sin), (positions, frequencies, numbers) = op.results, op.operands
    addresses = [each.address for each in (cos, sin, positions, frequencies)]
    return Call(layers.kernel("rotary_tables"), [*addresses, *cos.shape, numbers.address])


def _add_scaled(op: Operation, layers: Layers) -> Call:
    (total,), (x, y, numbers) = op.results, op.operands
    return Call(layers.kernel("add_scaled", x.dtype), [total.address, x.address, y.address, x.size, numbers.address])


def _gate_units(op: Operation, layers: Layers) -> Call:
    (y,), (gate, up) = op.results, op.operands
    activation = ACTIVATIONS.index(op.parameters["activation"])
    words = [y.address, gate.address, up.address, *up.shape, gate.shape[1], Word(activation)]
    return Call(layers.kernel("gate_units", up.dtype), words)


def _convert(op: Operation, layers: Layers) -> Call:
    (y,), x = op.results, op.operands[0]
    pair = [CONVERTED.index(each.dtype.name) if each.dtype.name in CONVERTED else -1 for each in (x, y)]
    if DType.float32 not in (x.dtype, y.dtype) or (pair[0] < 0) == (pair[1] < 0) or y.dtype == DType.int32:
        raise UnknownGraph(f"a conversion of {x.dtype.name} to {y.dtype.name}")
    return Call(layers.kernel("convert"), [y.address, x.address, x.size, *map(Word, pair)])


def _step_rows(op: Operation, layers: Layers) -> Call:
    (lengths, last), (positions, row_offsets) = op.results, op.operands
    addresses = [lengths.address, last.address, positions.address]
    return Call(layers.kernel("step_rows"), [*addresses, lengths.shape[0], row_offsets.address, last.shape[0]])


def _ragged_rows(op: Operation, layers: Layers) -> Call:
    (requests, positions), (row_offsets, cache_lengths) = op.results, op.operands
    words = [requests.address, positions.address, requests.shape[0], row_offsets.address, cache_lengths.address]
    return Call(layers.kernel("ragged_rows"), [*words, cache_lengths.shape[0]])


def _tree_rows(op: Operation, layers: Layers) -> Call:
    parents, row_offsets, cache_lengths, window_left = op.operands
    mask = op.results[3]
    sizes = [*mask.shape, parents.address, row_offsets.address, cache_lengths.address, cache_lengths.shape[0]]
    words = [*(each.address for each in op.results), *sizes, Word(int(window_left.number()))]
    return Call(layers.kernel("tree_rows"), words)


def _pointwise(op: Operation, layers: Layers) -> Call:
    (y,) = op.results
    if op.name in UNARY:
        (x,) = op.operands
        function = Word(UNARY.index(op.name))
        return Call(layers.kernel("unary", x.dtype), [y.address, x.address, y.size, function])
    rows, columns = product(y.shape[:-1]), y.shape[-1]
    words = [y.address]
    for operand in op.operands:
        words += [operand.address, *_strides(operand, y)]
    function = Word(BINARY.index(op.name))
    return Call(layers.kernel("binary", y.dtype), [*words, rows, columns, function])


def _strides(operand: Value, y: Value) -> tuple[Word, Word]:
    """Elements from a row of an operand to the next, and from a column to the next, where it is `y` `[..., columns]`,
    one row of it, one column or one number.
    """
    shape = (Word(1),) * (len(y.shape) - len(operand.shape)) + operand.shape
    column = Word(0) if shape[-1] == Word(1) != y.shape[-1] else Word(1)
    if shape[:-1] == y.shape[:-1]:
        return shape[-1], column
    if all(word == Word(1) for word in shape[:-1]):
        return Word(0), column
    raise UnknownGraph("operands whose rows differ")


def _linear(op: Operation, _: Layers) -> Call:
    x, *weights = op.operands
    for w in weights:
        _require(op, w.shape[1] == x.shape[1], f"w: its depth is {w.static(1)}, that of x is {x.static(1)}")
    kernel = Kernel("linear", (x.dtype.name, weights[0].dtype.name))
    members: list[Word] = []
    for y, w in zip(op.results, weights, strict=True):
        members += [y.address, w.address, w.shape[0], Word(0), Word(0)]
    return Call(kernel, [Word(len(weights)), x.address, *x.shape], members)


def _quantised_linear(op: Operation, _: Layers) -> Call:
    x, *weights = op.operands
    encodings = _encodings(op, len(weights))
    members: list[Word] = []
    for y, w, encoding in zip(op.results, weights, encodings, strict=True):
        _check_row_bytes(op, w.static(1), encoding, x.static(1))
        members += [y.address, w.address, *w.shape, Word(encoding)]
    kernel = Kernel("quantised_linear", (x.dtype.name,), _mask(encodings))
    return Call(kernel, [Word(len(weights)), x.address, *x.shape], members)


def _quantised_rows(op: Operation, _: Layers) -> Call:
    (y,), (w, rows) = op.results, op.operands
    encoding = int(op.parameters["encoding"])
    _check_row_bytes(op, w.static(1), encoding, y.static(1))
    kernel = Kernel("quantised_rows", ("float32",), 1 << encoding)
    return Call(kernel, [y.address, w.address, rows.address, *y.shape, w.shape[1], w.shape[0], Word(encoding)])


def _check_row_bytes(op: Operation, found: int, encoding: int, elements: int) -> None:
    name = ENCODINGS[encoding]
    _require(op, elements % block_elements(name) == 0, f"x: {elements} columns are no blocks of {block_elements(name)}")
    _require(op, found == (size := row_bytes(name, elements)), f"w: its rows have {found} bytes, not {size}")


def _encodings(op: Operation, count: int) -> list[int]:
    number = int(op.parameters["encodings"])
    return [number >> _ENCODING_BITS * i & (1 << _ENCODING_BITS) - 1 for i in range(count)]


def _mask(encodings: Sequence[int]) -> int:
    mask = 0
    for encoding in encodings:
        mask |= 1 << encoding
    return mask


def _mean(op: Operation, layers: Layers) -> Call:
    (y,), x = op.results, op.operands[0]
    if x.dtype != DType.float32 or product(y.shape) != product(x.shape[:-1]):
        raise UnknownGraph("a mean that is none of float32 rows")
    return Call(layers.kernel("mean"), [y.address, x.address, y.size, x.shape[-1]])


def _choose_experts(op: Operation, layers: Layers) -> Call:
    (weights, experts), (logits, bias, sizes, scale) = op.results, op.operands
    if sizes.data is None:
        raise UnknownGraph("sizes that are not constant")
    groups, chosen_groups, sigmoid, sum_to_one = map(int, sizes.data)
    count = logits.static(1)
    _require(op, 1 <= groups <= count and count % groups == 0, f"sizes: {groups} groups do not divide {count} experts")
    _require(op, 1 <= chosen_groups <= groups, f"sizes: {chosen_groups} of {groups} groups are chosen")
    open_to = count // groups * chosen_groups
    _require(op, experts.static(1) <= open_to, f"experts: {experts.static(1)} of {open_to} are chosen")
    _require(op, bias.static(0) in (0, count), f"bias: its length is {bias.static(0)}, not {count}")
    addresses = [weights.address, experts.address, logits.address, bias.address]
    flags = [groups, chosen_groups, int(bias.static(0) > 0), sigmoid, sum_to_one]
    return Call(
        layers.kernel("choose_experts"),
        [*addresses, *logits.shape, experts.shape[1], *map(Word, flags), scale.address],
    )


def _gate_halves(op: Operation, layers: Layers) -> Call:
    (y,), (x, numbers) = op.results, op.operands
    clamped = Word(int(op.parameters["activation"] == "clamped"))
    return Call(layers.kernel("gate_halves", x.dtype), [y.address, x.address, *y.shape, numbers.address, clamped])


def _weighted_sum(op: Operation, layers: Layers) -> Call:
    (y,), (x, weights) = op.results, op.operands
    return Call(layers.kernel("weighted_sum", x.dtype), [y.address, x.address, weights.address, *x.shape])


def _expert_linear(op: Operation, _: Layers) -> Call:
    (y,), (x, w, experts) = op.results, op.operands
    _require(op, w.shape[2] == x.shape[1], f"w: its depth is {w.static(2)}, that of x is {x.static(1)}")
    member = [y.address, w.address, w.shape[1], Word(0), Word(0)]
    words = [Word(1), x.address, experts.address, experts.shape[0], x.shape[0], w.shape[0], x.shape[1]]
    return Call(Kernel("experts", (x.dtype.name, w.dtype.name)), words, member)


def _quantised_experts(op: Operation, _: Layers) -> Call:
    x, experts, *weights = op.operands
    encodings = _encodings(op, len(weights))
    members: list[Word] = []
    for y, w, encoding in zip(op.results, weights, encodings, strict=True):
        _check_row_bytes(op, w.static(2), encoding, x.static(1))
        members += [y.address, w.address, *w.shape[1:], Word(encoding)]
    words = [Word(len(weights)), x.address, experts.address, experts.shape[0], x.shape[0], weights[0].shape[0]]
    kernel = Kernel("quantised_experts", (x.dtype.name,), _mask(encodings))
    return Call(kernel, [*words, x.shape[1]], members)


def _causal_conv1d(op: Operation, _: Layers) -> Call:
    (y,), (x, weight, bias, windows, layer, *table) = op.results, op.operands
    addresses = [y.address, x.address, weight.address, bias.address, Word(int(bias.static(0) > 0)), windows.address]
    flags = [op.parameters["activation"] == "silu", weight.dtype == DType.float32]
    sizes = [*x.shape, weight.shape[1], windows.shape[1], Word(int(layer.number()))]
    kernel = Kernel("causal_conv1d", (x.dtype.name,))
    return Call(kernel, [*addresses, *sizes, *(Word(int(flag)) for flag in flags), *_states(table, windows)])


def _linear_recurrence(op: Operation, layers: Layers) -> Call:
    (o,), (x, a, b, rates, bias, skip, sizes, numbers, matrices, layer, *table) = op.results, op.operands
    addresses = [each.address for each in (o, x, a, b, rates, bias, skip, matrices)]
    _, num_layers, heads, _, key_dim, _ = matrices.shape
    words = [x.shape[0], heads, key_dim, x.shape[1], sizes.address, numbers.address, num_layers]
    words += [Word(int(layer.number())), Word(int(op.parameters["delta"]))]
    return Call(Kernel("layer_recurrence", (layers.dtype,)), [*addresses, *words, *_states(table, matrices)])


def _gated_norm(op: Operation, _: Layers) -> Call:
    (y,), (x, z, weight, numbers) = op.results, op.operands
    addresses = [y.address, x.address, z.address, weight.address]
    flags = [op.parameters["gate_first"], weight.dtype == DType.float32]
    weight_rows = Word(weight.static(0) // x.static(1))
    return Call(
        Kernel("gated_norm", (z.dtype.name,)),
        [*addresses, *x.shape, weight_rows, numbers.address, *(Word(int(flag)) for flag in flags)],
    )


def _states(table: Sequence[Value], buffer: Value) -> list[Word]:
    """`StatesMemory`."""
    _, sources, _, save_counts, _ = table
    addresses = [each.address for each in table]
    return [*addresses, sources.shape[0], save_counts.shape[0], buffer.shape[0]]


def _append(op: Operation, _: Layers) -> Call:
    k, v, requests, positions, *cache = op.operands
    rows, memory = k.dtype.name, cache[0].dtype.name
    if rows == memory:
        rows = memory = COPIED[k.dtype.size_in_bytes]
    words = [k.address, v.address, *k.shape, *v.shape[1:], requests.address, positions.address]
    return Call(Kernel("append", (rows, memory)), [*words, *_cache(op, cache)])


def _move_tokens(op: Operation, _: Layers) -> Call:
    requests, sources, targets, *cache = op.operands
    memory = COPIED[cache[0].dtype.size_in_bytes]
    words = [requests.address, sources.address, targets.address, requests.shape[0], cache[0].shape[2]]
    return Call(Kernel("move_tokens", (memory, memory)), [*words, *_cache(op, cache)])


def _attention(op: Operation, _: Layers) -> Call:
    (o, lse), (q, row_batch, row_lengths, *rest) = op.results, op.operands
    masks, kind = [Word(0)] * 10, "attention"
    if op.name == "paged_kv_masked_attention":
        masks, kind = [number for each in rest[:5] for number in (each.address, each.size)], "masked_attention"
        rest = rest[5:]
    cache, (slopes, sinks, window_left, options) = rest[:4], rest[4:]
    if options.data is None or options.data[_ROPE_THETA]:
        raise UnknownGraph("attention that rotates keys")
    rows = [o.address, lse.address, q.address, *q.shape, o.shape[2], row_batch.address, row_lengths.address]
    logits = [slopes.address, slopes.shape[0], sinks.address, sinks.shape[0]]
    logits += [Word(int(window_left.number())), options.address]
    kernel = Kernel(kind, (q.dtype.name, cache[0].dtype.name, o.dtype.name))
    return Call(kernel, [*rows, *masks, *logits, *_cache(op, cache)])


def _latent_attention(op: Operation, _: Layers) -> Call:
    (o, lse), (q_nope, q_pe, row_batch, row_lengths, *rest) = op.results, op.operands
    cache, (sinks, options) = rest[:4], rest[4:]
    addresses = [each.address for each in (o, lse, q_nope, q_pe)]
    sizes = [*q_nope.shape, q_pe.shape[2]]
    rows = [row_batch.address, row_lengths.address, sinks.address, sinks.shape[0], options.address]
    kernel = Kernel("latent", (q_nope.dtype.name, cache[0].dtype.name, o.dtype.name))
    return Call(kernel, [*addresses, *sizes, *rows, *_cache(op, cache)])


def _cache(op: Operation, operands: Sequence[Value]) -> list[Word]:
    """`CacheMemory` of a buffer of all layers, `[pages, 2, layers, page_size, Hk, D]`, or of latents,
    `[pages, layers, page_size, Dckv + Dkpe]`.
    """
    k, v, table, view = operands
    if op.parameters["kv_layout"] == "LATENT":
        return _latent_cache(k, table, view)
    if len(k.shape) != 6 or k is not v or op.parameters["kv_layout"] != "NHD":
        raise UnknownGraph("a cache that is no buffer of all layers")
    layer = int(view.number())
    pages, _, layers, page_size, kv_heads, head_dim = k.shape
    row = product((kv_heads, head_dim))
    layer_size = product((page_size, row))
    half = product((layers, layer_size))
    start = layer_size.times(layer)
    strides = [half.times(2), row, head_dim]
    v_start = Word(start.constant + half.constant)
    memory = [k.address, k.size, k.address, k.size, pages, page_size, kv_heads, head_dim]
    return [*memory, start, *strides, v_start, *strides, head_dim, table.address, *table.shape]


def _latent_cache(slots: Value, table: Value, view: Value) -> list[Word]:
    if view.data is None:
        raise UnknownGraph("a view that is not constant")
    layer, value_dim = map(int, view.data)
    pages, layers, page_size, width = slots.shape
    layer_size = product((page_size, width))
    start, page = layer_size.times(layer), product((layers, layer_size))
    strides = [page, width, width]
    sizes = [pages, page_size, Word(1), width.plus(-value_dim)]
    memory = [slots.address, slots.size] * 2
    views = [start.plus(value_dim), *strides, start, *strides, Word(value_dim)]
    return [*memory, *sizes, *views, table.address, *table.shape]


_OPS: dict[str, tuple[Callable[[Operation, Layers], Call], str]] = {
    **dict.fromkeys((*UNARY, *BINARY), (_pointwise, "x|xx")),
    "CastOp": (_convert, "?|?*"),
    "paged_kv_take_rows": (_take_rows, "x|xi"),
    "paged_kv_take_columns": (_take_columns, "x|x?"),
    "paged_kv_rms_norm": (_rms_norm, "x|x?f"),
    "paged_kv_rotate": (_rotate, "x|xff"),
    "paged_kv_hadamard": (_hadamard, "x|x"),
    "paged_kv_rotary_tables": (_rotary_tables, "ff|iff"),
    "paged_kv_add_scaled": (_add_scaled, "x|xxf"),
    "paged_kv_gate_units": (_gate_units, "x|xx"),
    "paged_kv_widen": (_convert, "?|?"),
    "paged_kv_step_rows": (_step_rows, "ii|iu"),
    "paged_kv_ragged_rows": (_ragged_rows, "ii|uu"),
    "paged_kv_tree_rows": (_tree_rows, "iiib?i|iuui"),
    "paged_kv_linear": (_linear, "x*|xw*"),
    "paged_kv_quantised_linear": (_quantised_linear, "x*|xb*"),
    "paged_kv_quantised_rows": (_quantised_rows, "f|bi"),
    "GatherOp": (_gather, "x|xi?*"),
    "ReduceMeanOp": (_mean, "f|f?*"),
    "paged_kv_choose_experts": (_choose_experts, "fi|ffif"),
    "paged_kv_gate_halves": (_gate_halves, "x|xf"),
    "paged_kv_weighted_sum": (_weighted_sum, "x|xf"),
    "paged_kv_expert_linear": (_expert_linear, "x|x?i"),
    "paged_kv_quantised_experts": (_quantised_experts, "x*|xib*"),
    "paged_kv_causal_conv1d": (_causal_conv1d, "f|xwwf?uiuii"),
    "paged_kv_linear_recurrence": (_linear_recurrence, "f|ffffffiff?uiuii"),
    "paged_kv_gated_norm": (_gated_norm, "x|fx?f"),
    "paged_kv_append": (_append, "|xxii??u?*"),
    "paged_kv_move_tokens": (_move_tokens, "|iii??u?"),
    "paged_kv_attention": (_attention, "?f|xii??u?ff?f"),
    "paged_kv_masked_attention": (_attention, "?f|xiiiib?i??u?ff?f"),
    "paged_kv_mla_attention": (_latent_attention, "?f|xxii??u?ff"),
    "BroadcastToOp": (_broadcast_row, "x|x?*"),
}
"""By the name of an operation, what makes its call, and the dtypes of its values as `_check_dtypes` reads them."""
