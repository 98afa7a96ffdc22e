"""Numbers as PTX registers hold them, and the instructions that only compute: for ptx_machine.py.

Registers are bit patterns, Python integers without a sign.
"""

import re
import struct
from collections.abc import Callable

import numpy as np

MASK = {32: (1 << 32) - 1, 64: (1 << 64) - 1, 16: (1 << 16) - 1}


def to_float(bits: int) -> np.float32:
    return np.frombuffer(struct.pack("<I", bits & MASK[32]), np.float32)[0]


def from_float(x: float | np.floating) -> int:
    return int(np.float32(x).view(np.uint32))


def signed(x: int, width: int) -> int:
    x &= MASK[width]
    return x - (1 << width) if x >> (width - 1) else x


def to_half(x: np.float32, kind: str) -> int:
    """The 16 bits of the nearest bfloat16 or float16, ties to even."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            return int(np.float16(x).view(np.uint16))
    bits = from_float(x)
    if np.isnan(x):
        return 0x7FFF
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & MASK[16]


def halves(raw: np.ndarray, kind: str) -> np.ndarray:
    """Float32 of 16-bit elements, given as uint16."""
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def float8(byte: int, kind: str) -> np.float16:
    if kind == "e5m2":
        return np.uint16(byte << 8).view(np.float16)
    if byte & 0x7F == 0x7F:
        return np.float16(np.nan)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.float16(-value if byte & 0x80 else value)


def arithmetic(name: str, parts: list[str]) -> Callable[..., int]:
    """An instruction without side effects, on bit patterns."""
    kind = parts[-1]
    width = {"pred": 1, "b16": 16}.get(kind) or int(re.sub(r"\D", "", kind) or 32)
    mask = (1 << width) - 1
    if kind == "f32" and name != "selp":
        return float_arithmetic(name, parts)

    def read(x: int) -> int:
        return signed(x, width) if kind[0] == "s" else x & mask

    def quotient(x: int, y: int) -> int:
        x, y = read(x), read(y)
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    compare = {
        "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y,
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
    }
    if name == "setp":
        test = compare[parts[1]]
        return lambda x, y: int(test(read(x), read(y)))
    if name == "mul" and parts[1] == "wide":
        return lambda x, y: read(x) * read(y) & ((1 << 2 * width) - 1)
    if name == "mul" and parts[1] == "hi":
        return lambda x, y: read(x) * read(y) >> width & mask
    simple: dict[str, Callable[..., int]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "mad": lambda x, y, z: x * y + z,
        "div": quotient,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "not": lambda x: ~x,
        "shl": lambda x, y: x << (y & 0xFF) if y & 0xFF < width else 0,
        "shr": lambda x, y: read(x) >> min(y & 0xFF, width),
        "min": lambda x, y: min(read(x), read(y)),
        "max": lambda x, y: max(read(x), read(y)),
        "mov": lambda x: x,
        "cvta": lambda x: x,
        "neg": lambda x: -x,
        "selp": lambda x, y, p: x if p else y,
    }
    function = simple[name]
    return lambda *x: function(*x) & mask if name != "selp" else function(*x)


def float_arithmetic(name: str, parts: list[str]) -> Callable[..., int]:
    def maximum(x: np.float32, y: np.float32) -> np.float32:
        return np.fmax(x, y)

    functions: dict[str, Callable] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "fma": lambda x, y, z: np.float64(x) * np.float64(y) + np.float64(z),
        "max": maximum,
        "neg": lambda x: -x,
        "ex2": lambda x: np.exp2(np.float64(x)),
        "lg2": lambda x: np.log2(np.float64(x)),
    }
    tests = {
        "eq": lambda x, y: x == y,
        "neu": lambda x, y: x != y,
        "leu": lambda x, y: not x > y,
        "gt": lambda x, y: x > y,
        "lt": lambda x, y: x < y,
    }

    def apply(*x: int) -> int:
        with np.errstate(all="ignore"):
            floats = [to_float(v) for v in x]
            if name == "setp":
                return int(bool(tests[parts[1]](*floats)))
            return from_float(functions[name](*floats))

    return apply
