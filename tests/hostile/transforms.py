"""The changes to one argument of a valid call. Each transformation returns a label, or None where it does not apply.

Those of `BENIGN` leave a call valid that has to work; after any other one a typed error is as good as the right answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostile.memory import DTYPES, Argument, Memory, as_kind
from hostile.objects import objects

Rng = np.random.Generator
Arguments = dict[str, Argument]
as_strided = np.lib.stride_tricks.as_strided


@dataclass(frozen=True)
class Change:
    """The place where a transformation works: the argument, the others, and what it draws from."""

    rng: Rng
    memory: Memory
    arguments: Arguments
    name: str

    @property
    def argument(self) -> Argument:
        return self.arguments[self.name]


def replace(argument: Argument, view: np.ndarray, kind: str | None = None) -> str | None:
    """Makes a view the argument's value, of its kind where that library can have it, else NumPy's."""
    wanted = kind or argument.kind.replace("jax", "numpy")
    value = as_kind(view, wanted)
    if value is None:
        if kind:
            return None
        value, wanted = view, "numpy"
    argument.value, argument.view, argument.kind = value, view, wanted
    return wanted


def kind(at: Change) -> str | None:
    argument = at.argument
    wanted = str(at.rng.choice(["torch", "torch", "max", "numpy"]))
    if not argument.view.flags.c_contiguous or not argument.view.flags.writeable:
        return None
    return replace(argument, argument.view, wanted)


def index_dtype(at: Change) -> str | None:
    argument, dtype = at.argument, str(at.rng.choice(["int64", "uint32"]))
    if not argument.is_index or argument.view.dtype != np.int32 or (argument.view < 0).any():
        return None
    replace(argument, at.memory.put(argument.view.astype(dtype)))
    return dtype


def jax(at: Change) -> str | None:
    argument = at.argument
    view = at.memory.put(argument.view)
    value = as_kind(view, "jax")
    if value is None:
        return None
    argument.value, argument.kind = value, "jax"
    argument.view = view
    view.flags.writeable = False
    return "a JAX array"


def dtype(at: Change) -> str | None:
    argument = at.argument
    wanted = str(at.rng.choice([*DTYPES, "complex64", "object", ">f4", ">i4", "i4,f4", "M8[s]", "U3"]))
    with np.errstate(all="ignore"):
        try:
            view = argument.view.astype(DTYPES.get(wanted, wanted))
        except (TypeError, ValueError):
            return None
    if not view.dtype.hasobject:
        view = at.memory.put(view)
    replace(argument, view)
    return f"dtype {wanted}"


def endianness(at: Change) -> str | None:
    argument = at.argument
    if argument.view.dtype.byteorder != "=":
        return None
    replace(argument, at.memory.put(argument.view.astype(argument.view.dtype.newbyteorder())))
    return "the other byte order"


def negative(at: Change) -> str | None:
    argument, axis = at.argument, _axis(at)
    if axis is None:
        return None
    replace(argument, np.flip(at.memory.put(np.flip(argument.view, axis)), axis))
    return f"axis {axis} backwards"


def order(at: Change) -> str | None:
    argument = at.argument
    axes = at.rng.permutation(argument.view.ndim)
    if argument.view.ndim < 2:
        return None
    replace(argument, at.memory.put(argument.view.transpose(axes)).transpose(np.argsort(axes)))
    return f"axes laid out as {axes.tolist()}"


def sliced(at: Change) -> str | None:
    argument, axis = at.argument, _axis(at)
    if axis is None:
        return None
    step, first = int(at.rng.integers(1, 4)), int(at.rng.integers(3))
    shape = list(argument.view.shape)
    shape[axis] = shape[axis] * step + first + 1
    chosen = [slice(None)] * len(shape)
    chosen[axis] = slice(first, first + step * argument.view.shape[axis], step)
    view = at.memory.new(tuple(shape), argument.view.dtype)[tuple(chosen)]
    view[...] = argument.view
    replace(argument, view)
    return f"every {step}th of axis {axis}, from {first}"


def unaligned(at: Change) -> str | None:
    argument, offset = at.argument, int(at.rng.integers(1, 8))
    replace(argument, at.memory.put(argument.view, offset))
    return f"{offset} bytes off"


def expanded(at: Change) -> str | None:
    argument, axis = at.argument, _axis(at)
    if axis is None:
        return None
    replace(argument, _with_stride(argument.view, axis, 0))
    return f"axis {axis} expanded"


def overlapping(at: Change) -> str | None:
    """Windows that slide by less than what they hold, within the array's own memory."""
    argument = at.argument
    if argument.view.ndim < 2 or not argument.view.flags.c_contiguous:
        return None
    axis = int(at.rng.integers(argument.view.ndim - 1))
    steps = argument.view.strides[axis] // argument.view.itemsize
    if steps < 2 or argument.view.shape[axis] < 2:
        return None
    replace(argument, _with_stride(argument.view, axis, int(at.rng.integers(1, steps)) * argument.view.itemsize))
    return f"axis {axis} overlaps"


def huge(at: Change) -> str | None:
    argument, axis = at.argument, _axis(at, 1)
    if axis is None or math.prod(argument.view.shape) == 0:
        return None
    size = int(at.rng.choice([2**31 - 1, 2**31, 2**33, 2**40]))
    others = math.prod(argument.view.shape) // argument.view.shape[axis] * argument.view.itemsize
    if size * others >= 2**62:
        return None
    raw = argument.view.view(f"u{argument.view.itemsize}")  # as_strided does not know float8
    shape, strides = list(raw.shape), list(raw.strides)
    shape[axis], strides[axis] = size, 0
    replace(argument, as_strided(raw, shape, strides).view(argument.view.dtype))
    return f"axis {axis} of size {size}"


def shape(at: Change) -> str | None:
    argument = at.argument
    view, axis = argument.view, _axis(at, 1)
    choice = int(at.rng.integers(7))
    if choice == 0 and axis is not None:
        changed = np.take(view, range(view.shape[axis] - 1), axis)
    elif choice == 1 and axis is not None:
        changed = np.concatenate([view, np.take(view, [0], axis)], axis)
    elif choice == 2:
        changed = view[None]
    elif choice == 3 and view.ndim:
        changed = view[0] if len(view) else view.reshape(view.shape[1:] if view.size else -1)
    elif choice == 4:
        changed = np.zeros((), view.dtype)
    elif choice == 5:
        changed = view.reshape(-1)
    elif choice == 6 and axis is not None:
        changed = np.take(view, [], axis)
    else:
        return None
    replace(argument, at.memory.put(changed))
    return f"shape {changed.shape} instead of {view.shape}"


def swapped(at: Change) -> str | None:
    argument = at.argument
    if argument.view.ndim < 2:
        return None
    a, b = (int(axis) for axis in at.rng.choice(argument.view.ndim, 2, replace=False))
    replace(argument, argument.view.swapaxes(a, b))
    return f"axes {a} and {b} swapped"


def read_only(at: Change) -> str | None:
    argument = at.argument
    view = argument.view.view()
    view.flags.writeable = False
    argument.value, argument.view, argument.kind = view, view, "numpy"
    return "read-only"


def gradient(at: Change) -> str | None:
    """A leaf of torch that requires a gradient: it may be read, and not written."""
    argument = at.argument
    if "float" not in argument.view.dtype.name or not argument.view.flags.writeable:
        return None
    value = as_kind(argument.view, "torch")
    if value is None:
        return None
    argument.value, argument.view, argument.kind = value.requires_grad_(), argument.view.view(), "torch"
    argument.view.flags.writeable = False
    return "requires a gradient"


def alias(at: Change) -> str | None:
    """The memory of another argument, from some place on, as this one's shape and dtype."""
    argument = at.argument
    others = [n for n, other in at.arguments.items() if n != at.name and other.view is not None and other.kind != "jax"]
    if not others or argument.view.dtype.hasobject:
        return None
    other = str(at.rng.choice(others))
    source = at.arguments[other].view
    if not source.flags.c_contiguous or source.nbytes < argument.view.nbytes or not argument.view.nbytes:
        return None
    room = (source.nbytes - argument.view.nbytes) // argument.view.itemsize
    start = int(at.rng.choice([0, at.rng.integers(room + 1)])) * argument.view.itemsize
    memory_of = source.reshape(-1).view(np.uint8)[start : start + argument.view.nbytes]
    view = memory_of.view(argument.view.dtype).reshape(argument.view.shape)
    if at.rng.random() < 0.5 and not argument.is_index and not at.arguments[other].is_index:
        with np.errstate(all="ignore"):
            view[...] = argument.view
    replace(argument, view)
    return f"in the memory of {other}, {start} bytes in"


def elements(at: Change) -> str | None:
    argument = at.argument
    view = argument.view
    if not view.size or not view.flags.writeable or view.dtype.kind not in "iufV":
        return None
    if view.dtype.kind in "iu":
        info = np.iinfo(view.dtype)
        choices = [-1, 0, 1, 2, 7, 100, info.max, info.min, info.max // 2]
        value = int(np.clip(choices[at.rng.integers(len(choices))], info.min, info.max))
    else:
        choices = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e38, 1e-40, 100.0]
        value = choices[at.rng.integers(len(choices))]
    where = tuple(int(at.rng.integers(size)) for size in view.shape)
    with np.errstate(all="ignore"):
        view[where] = value
    return f"{value} at {list(where)}"


def scaled(at: Change) -> str | None:
    view, factor = at.argument.view, float(at.rng.choice([1e-30, 1e-6, 1e6, 1e15, 1e19, 1e25, 1e37]))
    if not view.flags.writeable or "float" not in view.dtype.name or not view.flags.c_contiguous:
        return None
    with np.errstate(all="ignore"):
        view[...] = (view.astype(np.float64) * factor).astype(view.dtype)
    return f"times {factor:g}"


_made: list[list[Callable[[], Any]]] = []


def thing(at: Change) -> str | None:
    """Another value or object altogether."""
    if not _made:
        _made.append(objects())
    argument = at.argument
    number = int(at.rng.integers(len(_made[0])))
    argument.value, argument.view, argument.kind = _made[0][number](), None, "plain"
    if isinstance(argument.value, np.ndarray) and type(argument.value) is np.ndarray:
        argument.view = argument.value
    return f"object {number}"


BENIGN = (kind, index_dtype)
OF_ARRAYS = (
    *(kind, index_dtype, jax, dtype, endianness, negative, order, sliced, unaligned, expanded, overlapping, huge),
    *(shape, swapped, read_only, gradient, alias, alias, alias, elements, elements, elements, scaled, thing, thing),
)


def _axis(at: Change, least: int = 2) -> int | None:
    """An axis of at least that size."""
    axes = [axis for axis, size in enumerate(at.argument.view.shape) if size >= least]
    return int(at.rng.choice(axes)) if axes else None


def _with_stride(view: np.ndarray, axis: int, stride: int) -> np.ndarray:
    strides = list(view.strides)
    strides[axis] = stride
    raw = view.view(f"u{view.itemsize}")
    return as_strided(raw, view.shape, strides).view(view.dtype)
