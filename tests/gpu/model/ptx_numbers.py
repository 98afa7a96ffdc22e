"""Numbers as PTX registers hold them, and the instructions that only compute: for ptx_program.py.

Registers are bit patterns, Python integers without a sign.
"""

import math
import re
import struct
from collections.abc import Callable
from functools import cache

import numpy as np

MASK = {32: (1 << 32) - 1, 64: (1 << 64) - 1, 16: (1 << 16) - 1}

_HALF, _FLOAT, _DOUBLE = (struct.Struct(f"<{kind}") for kind in "efd")
_HALF_BITS, _BITS, _DOUBLE_BITS = (struct.Struct(f"<{kind}") for kind in "HIQ")


def to_float(bits: int) -> float:
    """A float32, exactly."""
    return _FLOAT.unpack(_BITS.pack(bits & 0xFFFFFFFF))[0]


def from_float(x: float) -> int:
    """Return the bits of the nearest float32.

    Rounding a float64 sum, product or quotient of two float32 once more changes nothing.
    """
    try:
        return _BITS.unpack(_FLOAT.pack(x))[0]
    except OverflowError:
        return 0x7F800000 if x > 0 else 0xFF800000


def to_double(bits: int) -> float:
    return _DOUBLE.unpack(_DOUBLE_BITS.pack(bits & MASK[64]))[0]


def from_double(x: float) -> int:
    return _DOUBLE_BITS.unpack(_DOUBLE.pack(x))[0]


def signed(x: int, width: int) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def to_half(x: float, kind: str) -> int:
    """The 16 bits of the nearest bfloat16 or float16, ties to even; x is a float32."""
    if x != x:
        return 0x7FFF
    if kind == "f16":
        try:
            return _HALF_BITS.unpack(_HALF.pack(x))[0]
        except OverflowError:
            return 0x7C00 if x > 0 else 0xFC00
    bits = from_float(x)
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


@cache
def float8_halves(kind: str) -> list[int]:
    """The 16 bits of the float16 that each byte stands for."""
    return [int(float8(byte, kind).view(np.uint16)) for byte in range(256)]


def expression(parts: list[str], operands: list[str]) -> str:
    """Python source of an instruction's result, a bit pattern, over sources of its operands; `HELPERS` is in scope."""
    name, kind = parts[0], parts[-1]
    width = {"pred": 1, "b16": 16}.get(kind) or int(re.sub(r"\D", "", kind) or 32)
    mask = hex((1 << width) - 1)
    if name == "selp":
        return f"{operands[0]} if {operands[2]} else {operands[1]}"
    if kind in ("f32", "f64") and name != "mov":
        return _float_expression(parts, operands)

    def read(x: str) -> str:
        return f"signed({x}, {width})" if kind[0] == "s" else f"({x} & {mask})"

    a, b, c = (operands + [""] * 3)[:3]
    if name == "setp":
        sign = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[parts[1]]
        return f"{read(a)} {sign} {read(b)}"
    if name == "mul" and parts[1] == "wide":
        return f"{read(a)} * {read(b)} & {hex((1 << 2 * width) - 1)}"
    if name == "mul" and parts[1] == "hi":
        return f"{read(a)} * {read(b)} >> {width} & {mask}"
    if name == "prmt":
        return f"permute({a}, {b}, {c})"
    result = {
        "add": f"{a} + {b}",
        "sub": f"{a} - {b}",
        "mul": f"{a} * {b}",
        "mad": f"{a} * {b} + {c}",
        "div": f"quotient({read(a)}, {read(b)})",
        "and": f"{a} & {b}",
        "or": f"{a} | {b}",
        "xor": f"{a} ^ {b}",
        "not": f"{a} ^ {mask}",
        "shl": f"({a} & {mask}) << min({b} & 0xFFFFFFFF, {width})",
        "shr": f"{read(a)} >> min({b} & 0xFFFFFFFF, {width})",
        "min": f"min({read(a)}, {read(b)})",
        "max": f"max({read(a)}, {read(b)})",
        "mov": a,
        "cvta": a,
        "neg": f"-{a}",
    }[name]
    return f"({result}) & {mask}"


def _float_expression(parts: list[str], operands: list[str]) -> str:
    name, wide = parts[0], parts[-1] == "f64"
    values = [f"to_double({operand})" if wide else _float_source(operand) for operand in operands]
    a, b, c = (values + [""] * 3)[:3]
    if name == "setp":
        test = parts[1]
        ordered = {"eq": "==", "lt": "<", "gt": ">"}
        if test in ordered:
            return f"{a} {ordered[test]} {b}"
        if test == "ne":  # false of NaN
            return f"({a} < {b} or {a} > {b})"
        if test == "num":
            return f"({a} == {a} and {b} == {b})"
        # What is true of NaN as well: the opposite is false of it.
        opposite = {"neu": "==", "geu": "<", "leu": ">"}[test]
        return f"not {a} {opposite} {b}"
    if name == "neg":
        return f"{operands[0]} ^ {hex(1 << 63 if wide else 1 << 31)}"
    if name == "abs":
        return f"{operands[0]} & {hex((1 << (63 if wide else 31)) - 1)}"
    assert "NaN" not in parts, parts
    result = {
        "add": f"{a} + {b}",
        "sub": f"{a} - {b}",
        "mul": f"{a} * {b}",
        "div": f"float_quotient({a}, {b})",
        "rcp": f"float_quotient(1.0, {a})",
        "fma": f"{a} * {b} + {c}",
        "max": f"greater({a}, {b})",
        "min": f"-greater(-({a}), -({b}))",
        "ex2": f"power_of_2({a})",
        "lg2": f"logarithm({a})",
        "sin": f"sin({a})",
        "cos": f"cos({a})",
    }[name]
    return f"from_double({result})" if wide else f"from_float({result})"


def _float_source(operand: str) -> str:
    """A literal's value is worked out once."""
    if not re.fullmatch(r"0x[0-9a-fA-F]+|\d+", operand):
        return f"to_float({operand})"
    value = to_float(int(operand, 0))
    return repr(value) if math.isfinite(value) else f"to_float({operand})"


def conversion(parts: list[str]) -> Callable[..., int]:
    """Return what a `cvt` makes of its operands."""
    to, source = parts[-2:]
    if source == "f64":
        if to == "f64":
            assert "rmi" in parts, parts
            return lambda x: from_double(math.floor(to_double(x)))
        if to == "f32":
            return lambda x: from_float(to_double(x))
        assert "rzi" in parts, parts
        return lambda x: int(to_double(x)) & MASK[int(to[1:])]
    if source in ("e4m3x2", "e5m2x2"):
        table = float8_halves(source[:4])
        return lambda x: table[x & 255] | table[x >> 8 & 255] << 16
    if to in ("bf16x2", "f16x2"):
        half = to[:-2]
        return lambda x, y: to_half(to_float(y), half) | to_half(to_float(x), half) << 16
    if to in ("bf16", "f16"):
        return lambda x: to_half(to_float(x), to)
    if (to, source) == ("f64", "f32"):
        return lambda x: from_double(to_float(x))
    if (to, source) == ("f64", "bf16"):
        return lambda x: from_double(to_float((x & MASK[16]) << 16))
    if to == "f32" and source == "bf16":
        return lambda x: (x & MASK[16]) << 16
    if to == "f32" and source == "f16":
        return lambda x: from_float(_HALF.unpack(_HALF_BITS.pack(x & MASK[16]))[0])
    if (to, source) == ("f32", "f32"):
        assert "rni" in parts, parts
        return lambda x: from_float(nearest_whole(to_float(x)))
    if (to, source) == ("s32", "f32"):
        assert "rzi" in parts, parts
        return lambda x: saturated(to_float(x)) & MASK[32]
    width = int(source[1:])
    if to == "s8":  # in a register of 16 bits, with its sign
        return lambda x: signed(x, 8) & MASK[16]
    if to == "f32":
        return lambda x: from_float(signed(x, width) if source[0] == "s" else x & MASK[width])
    mask = MASK[int(to[1:])]
    if source[0] == "s":
        return lambda x: signed(x, width) & mask
    return lambda x: x & MASK[width] & mask


def quotient(x: int, y: int) -> int:
    """Towards 0."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def float_quotient(x: float, y: float) -> float:
    if y != 0:
        return x / y
    return math.nan if x == 0 or x != x else math.copysign(math.inf, x) * math.copysign(1, y)


def greater(x: float, y: float) -> float:
    """The one that is no NaN, where one is."""
    return x if y != y or x >= y else y


def power_of_2(x: float) -> float:
    try:
        return 2.0**x
    except OverflowError:
        return math.inf


def logarithm(x: float) -> float:
    if x > 0:
        return math.log2(x)
    return -math.inf if x == 0 else math.nan


def nearest_whole(x: float) -> float:
    """Ties to even."""
    return math.copysign(float(round(x)), x) if math.isfinite(x) else x


def saturated(x: float) -> int:
    """The nearest int32 towards 0; 0 for NaN."""
    if x != x:
        return 0
    return math.trunc(max(-(2.0**31), min(x, 2.0**31 - 1)))


def permute(low: int, high: int, selector: int) -> int:
    """`prmt`: each nibble picks a byte, or the sign of one for all eight bits."""
    source = (low & MASK[32] | (high & MASK[32]) << 32).to_bytes(8, "little")
    picked = bytearray()
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = source[nibble & 7]
        picked.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(picked, "little")


HELPERS = {
    function.__name__: function
    for function in (
        math.sin,
        math.cos,
        to_float,
        from_float,
        to_double,
        from_double,
        signed,
        quotient,
        float_quotient,
        greater,
        power_of_2,
        logarithm,
        permute,
    )
}
"""The functions that the source of `expression` calls."""
