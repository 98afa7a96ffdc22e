"""Operations of a graph as calls of kernels: the operands of each call by the names of its struct's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

from max.dtype import DType

from paged_kv.call_layouts import (
    CACHE,
    CALLS,
    MASKS,
    MEMBER,
    SOFTMAX_OPTIONS,
    STATES,
    STRIDES,
    TOKEN_ROWS,
    Layout,
    named,
)
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
MEMBERS = Word(0, 1, "members")
"""Stands for the address of the members of a call."""

Operand: TypeAlias = Value | Word | int
"""A value for its address, or a number."""


class KernelCall(NamedTuple):
    """A call of a kernel, but for its threads."""

    kernel: Kernel
    words: list[Word]
    members: Sequence[Word]
    """The numbers of the members of a product of several weights."""


def _word(operand: Operand) -> Word:
    if isinstance(operand, Value):
        return operand.address
    return operand if isinstance(operand, Word) else Word(int(operand))


def _struct(layout: Layout, /, **operands: Operand | list[Word]) -> list[Word]:
    """The numbers of a struct; those of a field that is a struct are given."""
    return layout.flat(**{name: each if isinstance(each, list) else _word(each) for name, each in operands.items()})


def _call(kernel: Kernel, /, members: Sequence[Word] = (), **operands: Operand | list[Word]) -> KernelCall:
    """A call of a kernel; `members`, of products of several weights, are the numbers of all of them."""
    if members:
        operands["members"] = MEMBERS
    return KernelCall(kernel, _struct(CALLS[kernel.kind], **operands), members)


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


def calls_of_all(operations: Sequence[Operation], layers: Layers) -> list[list[KernelCall]]:
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

    def together(call: KernelCall) -> KernelCall:
        if not call.kernel.mask:
            return call
        return call._replace(kernel=replace(call.kernel, mask=masks[call.kernel.dtypes[0]]))

    return [[together(call) for call in calls] for calls in of_each]


def calls_of(op: Operation, layers: Layers) -> list[KernelCall]:
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


def _take_rows(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, rows) = op.results, op.operands
    row_bytes = product(x.shape[1:]).times(x.dtype.size_in_bytes)
    kernel = layers.kernel("take_rows")
    return _call(kernel, y=y, x=x, rows=rows, count=rows.shape[0], row_bytes=row_bytes, available=x.shape[0])


def _gather(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, rows, *_) = op.results, op.operands
    if rows.dtype != DType.int32 or y.shape != (*rows.shape, *x.shape[1:]):
        raise UnknownGraph("a gather that takes no rows")
    row_bytes = product(x.shape[1:]).times(x.dtype.size_in_bytes)
    kernel = layers.kernel("take_rows")
    return _call(kernel, y=y, x=x, rows=rows, count=rows.size, row_bytes=row_bytes, available=x.shape[0])


def _take_columns(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, place) = op.results, op.operands
    if place.data is None:
        raise UnknownGraph("columns that are not constant")
    groups, first = map(int, place.data)
    size = x.dtype.size_in_bytes
    group, each = (value.static(1) // groups * size for value in (x, y))
    kernel = layers.kernel("take_columns")
    return _call(kernel, y=y, x=x, rows=x.shape[0], groups=groups, group=group, first=first * size, each=each)


def _broadcast_row(op: Operation, layers: Layers) -> KernelCall:
    """One row stands for all: they are the columns of one row, whose groups all begin with the first column."""
    (y,), x = op.results, op.operands[0]
    if product(x.shape) != product(y.shape[1:]):
        raise UnknownGraph("a broadcast that is none of a row")
    row_bytes = product(x.shape).times(x.dtype.size_in_bytes)
    return _call(layers.kernel("take_columns"), y=y, x=x, rows=1, groups=y.shape[0], group=0, first=0, each=row_bytes)


def _rms_norm(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, weight, numbers) = op.results, op.operands
    if weight.dtype not in (x.dtype, DType.float32):
        raise UnknownGraph(f"a norm of {x.dtype} by {weight.dtype}")
    sizes, rounds_once = named("rows columns", x.shape), op.parameters["rounds_once"]
    wide = weight.dtype == DType.float32
    arrays = named("y x weight numbers", (y, x, weight, numbers))
    return _call(layers.kernel("rms_norm", x.dtype), **arrays, **sizes, rounds_once=rounds_once, wide_weight=wide)


def _rotate(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, cos, sin) = op.results, op.operands
    columns, head_dim = cos.static(1), x.static(2)
    _require(op, 2 * columns <= head_dim, f"cos: its {columns} columns are too many for heads of {head_dim}")
    sizes, pairs = named("rows heads head_dim", x.shape), op.parameters["pairs"]
    return _call(layers.kernel("rotate", x.dtype), y=y, x=x, cos=cos, sin=sin, **sizes, half=columns, pairs=pairs)


def _hadamard(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x,) = op.results, op.operands
    return _call(layers.kernel("hadamard", x.dtype), y=y, x=x, **named("rows heads head_dim", x.shape))


def _rotary_tables(op: Operation, layers: Layers) -> KernelCall:
    arrays = named("cos sin positions frequencies numbers", (*op.results, *op.operands))
    return _call(layers.kernel("rotary_tables"), **arrays, **named("rows half", op.results[0].shape))


def _add_scaled(op: Operation, layers: Layers) -> KernelCall:
    (total,), (x, y, numbers) = op.results, op.operands
    return _call(layers.kernel("add_scaled", x.dtype), sum=total, x=x, y=y, count=x.size, numbers=numbers)


def _gate_units(op: Operation, layers: Layers) -> KernelCall:
    (y,), (gate, up) = op.results, op.operands
    activation = ACTIVATIONS.index(op.parameters["activation"])
    sizes = named("rows columns", up.shape) | named("_ gate_columns", gate.shape)
    return _call(layers.kernel("gate_units", up.dtype), y=y, gate=gate, up=up, **sizes, activation=activation)


def _convert(op: Operation, layers: Layers) -> KernelCall:
    (y,), x = op.results, op.operands[0]
    pair = [CONVERTED.index(each.dtype.name) if each.dtype.name in CONVERTED else -1 for each in (x, y)]
    if DType.float32 not in (x.dtype, y.dtype) or (pair[0] < 0) == (pair[1] < 0) or y.dtype == DType.int32:
        raise UnknownGraph(f"a conversion of {x.dtype.name} to {y.dtype.name}")
    return _call(layers.kernel("convert"), y=y, x=x, count=x.size, source=pair[0], target=pair[1])


def _step_rows(op: Operation, layers: Layers) -> KernelCall:
    lengths, last = op.results
    arrays = named("lengths last positions row_offsets", (lengths, last, *op.operands))
    return _call(layers.kernel("step_rows"), **arrays, rows=lengths.size, batch=last.size)


def _ragged_rows(op: Operation, layers: Layers) -> KernelCall:
    arrays = named("batch_indices positions row_offsets cache_lengths", (*op.results, *op.operands))
    return _call(layers.kernel("ragged_rows"), **arrays, rows=op.results[0].size, batch=op.operands[1].size)


def _pointwise(op: Operation, layers: Layers) -> KernelCall:
    (y,) = op.results
    if op.name in UNARY:
        (x,) = op.operands
        return _call(layers.kernel("unary", x.dtype), y=y, x=x, count=y.size, function=UNARY.index(op.name))
    sizes = named("rows columns", (product(y.shape[:-1]), y.shape[-1]))
    words = [word for operand in op.operands for word in (operand, *_strides(operand, y))]
    operands = named("x x_row x_column z z_row z_column", words)
    return _call(layers.kernel("binary", y.dtype), y=y, **operands, **sizes, function=BINARY.index(op.name))


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


def _linear(op: Operation, _: Layers) -> KernelCall:
    x, *weights = op.operands
    for w in weights:
        _require(op, w.shape[1] == x.shape[1], f"w: its depth is {w.static(1)}, that of x is {x.static(1)}")
    kernel = Kernel("linear", (x.dtype.name, weights[0].dtype.name))
    members: list[Word] = []
    for y, w in zip(op.results, weights, strict=True):
        members += _struct(MEMBER, y=y, w=w, n=w.shape[0], row_bytes=0, encoding=0)
    return _call(kernel, members=members, count=len(weights), x=x, m=x.shape[0], k=x.shape[1])


def _quantised_linear(op: Operation, _: Layers) -> KernelCall:
    x, *weights = op.operands
    encodings = _encodings(op, len(weights))
    members: list[Word] = []
    for y, w, encoding in zip(op.results, weights, encodings, strict=True):
        _check_row_bytes(op, w.static(1), encoding, x.static(1))
        members += _struct(MEMBER, y=y, w=w, n=w.shape[0], row_bytes=w.shape[1], encoding=encoding)
    kernel = Kernel("quantised_linear", (x.dtype.name,), _mask(encodings))
    return _call(kernel, members=members, count=len(weights), x=x, m=x.shape[0], k=x.shape[1])


def _quantised_rows(op: Operation, _: Layers) -> KernelCall:
    (y,), (w, rows) = op.results, op.operands
    encoding = int(op.parameters["encoding"])
    _check_row_bytes(op, w.static(1), encoding, y.static(1))
    kernel = Kernel("quantised_rows", ("float32",), 1 << encoding)
    sizes = named("count k", y.shape) | named("available row_bytes", w.shape)
    return _call(kernel, y=y, w=w, rows=rows, **sizes, encoding=encoding)


def _check_row_bytes(op: Operation, available: int, encoding: int, elements: int) -> None:
    name = ENCODINGS[encoding]
    _require(op, elements % block_elements(name) == 0, f"x: {elements} columns are no blocks of {block_elements(name)}")
    _require(op, available == (size := row_bytes(name, elements)), f"w: its rows have {available} bytes, not {size}")


def _encodings(op: Operation, count: int) -> list[int]:
    number = int(op.parameters["encodings"])
    return [number >> _ENCODING_BITS * i & (1 << _ENCODING_BITS) - 1 for i in range(count)]


def _mask(encodings: Sequence[int]) -> int:
    mask = 0
    for encoding in encodings:
        mask |= 1 << encoding
    return mask


def _mean(op: Operation, layers: Layers) -> KernelCall:
    (y,), x = op.results, op.operands[0]
    if x.dtype != DType.float32 or product(y.shape) != product(x.shape[:-1]):
        raise UnknownGraph("a mean that is none of float32 rows")
    return _call(layers.kernel("mean"), y=y, x=x, rows=y.size, columns=x.shape[-1])


def _choose_experts(op: Operation, layers: Layers) -> KernelCall:
    (weights, experts), (logits, bias, sizes, numbers) = op.results, op.operands
    if sizes.data is None:
        raise UnknownGraph("sizes that are not constant")
    groups, chosen_groups, sigmoid, sum_to_one = map(int, sizes.data)
    count = logits.static(1)
    _require(op, 1 <= groups <= count and count % groups == 0, f"sizes: {groups} groups do not divide {count} experts")
    _require(op, 1 <= chosen_groups <= groups, f"sizes: {chosen_groups} of {groups} groups are chosen")
    open_to = count // groups * chosen_groups
    _require(op, experts.static(1) <= open_to, f"experts: {experts.static(1)} of {open_to} are chosen")
    _require(op, bias.static(0) in (0, count), f"bias: its length is {bias.static(0)}, not {count}")
    return _call(
        layers.kernel("choose_experts"),
        **named("weights experts logits bias numbers", (weights, experts, logits, bias, numbers)),
        **named("rows count", logits.shape),
        chosen=experts.shape[1],
        groups=groups,
        chosen_groups=chosen_groups,
        has_bias=bias.static(0) > 0,
        sigmoid=sigmoid,
        sum_to_one=sum_to_one,
    )


def _gate_halves(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, numbers) = op.results, op.operands
    sizes, clamped = named("rows columns", y.shape), op.parameters["activation"] == "clamped"
    return _call(layers.kernel("gate_halves", x.dtype), y=y, x=x, **sizes, numbers=numbers, clamped=clamped)


def _weighted_sum(op: Operation, layers: Layers) -> KernelCall:
    (y,), (x, weights) = op.results, op.operands
    sizes = named("rows count columns", x.shape)
    return _call(layers.kernel("weighted_sum", x.dtype), y=y, x=x, weights=weights, **sizes)


def _expert_linear(op: Operation, _: Layers) -> KernelCall:
    (y,), (x, w, experts) = op.results, op.operands
    _require(op, w.shape[2] == x.shape[1], f"w: its depth is {w.static(2)}, that of x is {x.static(1)}")
    member = _struct(MEMBER, y=y, w=w, n=w.shape[1], row_bytes=0, encoding=0)
    return _experts(Kernel("experts", (x.dtype.name, w.dtype.name)), member, x, experts, [w])


def _adapter_linear(op: Operation, _: Layers) -> KernelCall:
    (result,), (y, x, a, b, adapters) = op.results, op.operands
    _require(op, x.shape[1] == a.shape[2], f"a: its depth is {a.static(2)}, that of x is {x.static(1)}")
    _require(op, (*a.shape[:2], y.shape[1]) == b.shape, f"b: its width is {b.static(2)}, that of y is {y.static(1)}")
    sizes = named("m n", y.shape) | named("count rank k", a.shape)
    operands = named("result y x a b adapters", (result, y, x, a, b, adapters))
    return _call(Kernel("adapter_linear", (x.dtype.name, a.dtype.name)), **operands, **sizes)


def _quantised_experts(op: Operation, _: Layers) -> KernelCall:
    x, experts, *weights = op.operands
    encodings = _encodings(op, len(weights))
    members: list[Word] = []
    for y, w, encoding in zip(op.results, weights, encodings, strict=True):
        _check_row_bytes(op, w.static(2), encoding, x.static(1))
        members += _struct(MEMBER, y=y, w=w, n=w.shape[1], row_bytes=w.shape[2], encoding=encoding)
    kernel = Kernel("quantised_experts", (x.dtype.name,), _mask(encodings))
    return _experts(kernel, members, x, experts, weights)


def _experts(kernel: Kernel, members: list[Word], x: Value, experts: Value, weights: Sequence[Value]) -> KernelCall:
    sizes = named("m k", x.shape) | named("rows", experts.shape)
    count, num_experts = len(weights), weights[0].shape[0]
    return _call(kernel, members=members, count=count, x=x, experts=experts, num_experts=num_experts, **sizes)


def _causal_conv1d(op: Operation, _: Layers) -> KernelCall:
    (y,), (x, weight, bias, windows, layer, *table) = op.results, op.operands
    flags = {"silu": op.parameters["activation"] == "silu", "wide_weight": weight.dtype == DType.float32}
    return _call(
        Kernel("causal_conv1d", (x.dtype.name,)),
        **named("y x weight bias windows", (y, x, weight, bias, windows)),
        **named("rows channels", x.shape),
        **{"has_bias": bias.static(0) > 0, "kernel": weight.shape[1], **flags},
        layers=windows.shape[1],
        layer=int(layer.number()),
        states=_states(table, windows),
    )


def _linear_recurrence(op: Operation, layers: Layers) -> KernelCall:
    x, *_, matrices, layer = op.operands[:10]
    return _call(
        Kernel("layer_recurrence", (layers.dtype,)),
        **named("o x a b rates bias skip sizes numbers matrices", (*op.results, *op.operands[:9])),
        **named("rows width", x.shape),
        **named("_ layers heads _ key_dim _", matrices.shape),
        layer=int(layer.number()),
        delta=int(op.parameters["delta"]),
        states=_states(op.operands[10:], matrices),
    )


def _gated_norm(op: Operation, _: Layers) -> KernelCall:
    x, z, weight, _numbers = op.operands
    flags = {"gate_first": op.parameters["gate_first"], "wide_weight": weight.dtype == DType.float32}
    return _call(
        Kernel("gated_norm", (z.dtype.name,)),
        **named("y x z weight numbers", (*op.results, *op.operands)),
        **named("rows columns", x.shape),
        weight_rows=weight.static(0) // x.static(1),
        **flags,
    )


def _states(table: Sequence[Value], buffer: Value) -> list[Word]:
    arrays = named("row_offsets sources save_offsets save_counts save_slots", table)
    return _struct(STATES, **arrays, requests=table[1].size, saves=table[3].size, slots=buffer.shape[0])


def _append(op: Operation, _: Layers) -> KernelCall:
    k, v, requests, positions, *cache = op.operands
    rows, memory = k.dtype.name, cache[0].dtype.name
    if rows == memory:
        rows = memory = COPIED[k.dtype.size_in_bytes]
    sizes = named("count k_heads k_dim", k.shape) | named("_ v_heads v_dim", v.shape)
    return _call(
        Kernel("append", (rows, memory)),
        rows=_struct(TOKEN_ROWS, k=k, v=v, **sizes),
        **named("batch_indices positions", (requests, positions)),
        cache=_cache(op, cache),
    )


def _attention(op: Operation, _: Layers) -> KernelCall:
    """Attention, with masks or without."""
    (o, lse), (q, row_batch, row_lengths, *rest) = op.results, op.operands
    masks = [word for mask in rest[:-8] for word in (mask.address, mask.size)]
    cache, (slopes, sinks, window_left, options) = rest[-8:-4], rest[-4:]
    if options.data is None or options.data[SOFTMAX_OPTIONS.index("rope_theta")]:
        raise UnknownGraph("attention that rotates keys")
    return _call(
        Kernel("masked_attention" if masks else "attention", (q.dtype.name, cache[0].dtype.name, o.dtype.name)),
        **named("o lse q row_batch row_lengths", (o, lse, q, row_batch, row_lengths)),
        **named("num_rows num_heads head_dim", q.shape),
        **named("slopes num_slopes sinks num_sinks", (slopes, slopes.size, sinks, sinks.size)),
        value_dim=o.shape[2],
        window_left=int(window_left.number()),
        options=options,
        masks=masks or [Word(0)] * MASKS.size,
        cache=_cache(op, cache),
    )


def _latent_attention(op: Operation, _: Layers) -> KernelCall:
    (o, lse), (q_nope, q_pe, row_batch, row_lengths, *rest) = op.results, op.operands
    cache, (sinks, options) = rest[:4], rest[4:]
    return _call(
        Kernel("latent", (q_nope.dtype.name, cache[0].dtype.name, o.dtype.name)),
        **named("o lse q_nope q_pe row_batch row_lengths", (o, lse, q_nope, q_pe, row_batch, row_lengths)),
        **named("num_rows num_heads nope_dim", q_nope.shape),
        pe_dim=q_pe.shape[2],
        sinks=sinks,
        num_sinks=sinks.size,
        options=options,
        cache=_cache(op, cache),
    )


def _cache(op: Operation, operands: Sequence[Value]) -> list[Word]:
    """The layer of a buffer of all layers, `[pages, 2, layers, page_size, Hk, D]`, or of latents,
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
    strides = {"page": half.times(2), "slot": row, "head": head_dim}
    v_start = Word(start.constant + half.constant)
    sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "k_dim": head_dim, "v_dim": head_dim}
    return _cache_in_one(k, start, v_start, strides, sizes, table)


def _latent_cache(slots: Value, table: Value, view: Value) -> list[Word]:
    if view.data is None:
        raise UnknownGraph("a view that is not constant")
    layer, value_dim = map(int, view.data)
    pages, layers, page_size, width = slots.shape
    layer_size = product((page_size, width))
    start, page = layer_size.times(layer), product((layers, layer_size))
    strides = {"page": page, "slot": width, "head": width}
    sizes = {"pages": pages, "page_size": page_size, "kv_heads": Word(1)}
    sizes |= {"k_dim": width.plus(-value_dim), "v_dim": Word(value_dim)}
    return _cache_in_one(slots, start.plus(value_dim), start, strides, sizes, table)


def _cache_in_one(
    memory: Value, k_start: Word, v_start: Word, strides: Mapping[str, Word], sizes: Mapping[str, Word], table: Value
) -> list[Word]:
    """A cache whose K and V lie in one buffer, with the same strides."""
    return _struct(
        CACHE,
        **named("k k_size v v_size", (memory, memory.size) * 2),
        k_strides=_struct(STRIDES, start=k_start, **strides),
        v_strides=_struct(STRIDES, start=v_start, **strides),
        **named("batch max_pages", table.shape),
        entries=table,
        **sizes,
    )


_OPS: dict[str, tuple[Callable[[Operation, Layers], KernelCall], str]] = {
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
    "paged_kv_linear": (_linear, "x*|xw*"),
    "paged_kv_quantised_linear": (_quantised_linear, "x*|xb*"),
    "paged_kv_quantised_rows": (_quantised_rows, "f|bi"),
    "GatherOp": (_gather, "x|xi?*"),
    "ReduceMeanOp": (_mean, "f|f?*"),
    "paged_kv_choose_experts": (_choose_experts, "fi|ffif"),
    "paged_kv_gate_halves": (_gate_halves, "x|xf"),
    "paged_kv_weighted_sum": (_weighted_sum, "x|xf"),
    "paged_kv_expert_linear": (_expert_linear, "x|x?i"),
    "paged_kv_adapter_linear": (_adapter_linear, "x|xxwwi"),
    "paged_kv_quantised_experts": (_quantised_experts, "x*|xib*"),
    "paged_kv_causal_conv1d": (_causal_conv1d, "f|xwwf?uiuii"),
    "paged_kv_linear_recurrence": (_linear_recurrence, "f|ffffffiff?uiuii"),
    "paged_kv_gated_norm": (_gated_norm, "x|fx?f"),
    "paged_kv_append": (_append, "|xxii??u?*"),
    "paged_kv_attention": (_attention, "?f|xii??u?ff?f"),
    "paged_kv_masked_attention": (_attention, "?f|xiiiib?i??u?ff?f"),
    "paged_kv_mla_attention": (_latent_attention, "?f|xxii??u?ff"),
    "BroadcastToOp": (_broadcast_row, "x|x?*"),
}
"""By the name of an operation, what makes its call, and the dtypes of its values as `_check_dtypes` reads them."""
