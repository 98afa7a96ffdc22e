"""The instructions of the PTX model that only compute, against NumPy's numbers of the same width."""

import numpy as np
import pytest

from support.ptx_numbers import HELPERS, conversion, expression

SPECIAL = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x7F7FFFFF, 0x3F800000], np.uint32)
RANDOM = np.random.default_rng(0).integers(0, 2**32, 400, np.uint32)
# Small floats as well: most random bits are too far apart to be added.
NEAR = np.random.default_rng(1).standard_normal(400).astype(np.float32).view(np.uint32)
BITS = np.concatenate([SPECIAL, RANDOM, NEAR])
A, B, C = BITS, np.roll(BITS, 3), np.roll(BITS[::-1], 11)


def results(opcode, *operands):
    """Of the model, for each place in the operands' arrays."""
    names = "abc"[: len(operands)]
    function = eval(f"lambda {', '.join(names)}: {expression(opcode.split('.'), list(names))}", dict(HELPERS))
    return [function(*map(int, values)) for values in zip(*operands, strict=True)]


def same(found, expected):
    """To the bit, but for which NaN it is."""
    found = np.array(found, np.uint32).view(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(found[there].view(np.uint32), expected[there].view(np.uint32))


@pytest.mark.parametrize(
    ("opcode", "function"),
    [("add.f32", np.add), ("sub.f32", np.subtract), ("mul.f32", np.multiply), ("div.rn.f32", np.divide)],
)
def test_float32_arithmetic(opcode, function):
    with np.errstate(all="ignore"):
        same(results(opcode, A, B), function(A.view(np.float32), B.view(np.float32)))


def test_other_functions_of_float32():
    x, y = A.view(np.float32), B.view(np.float32)
    with np.errstate(all="ignore"):
        same(results("ex2.approx.ftz.f32", A), np.exp2(x.astype(np.float64)).astype(np.float32))
        same(results("lg2.approx.ftz.f32", A), np.log2(x.astype(np.float64)).astype(np.float32))
        found = np.array(results("max.f32", A, B), np.uint32).view(np.float32)
        np.testing.assert_array_equal(found, np.fmax(x, y))
        found = np.array(results("min.f32", A, B), np.uint32).view(np.float32)
        np.testing.assert_array_equal(found, np.fmin(x, y))
        assert results("neg.f32", A) == (-x).view(np.uint32).tolist()
        same(results("rcp.rn.f32", A), np.float32(1) / x)
        assert results("abs.f32", A) == np.abs(x).view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("test", "function"),
    [
        ("eq", lambda x, y: x == y),
        ("lt", lambda x, y: x < y),
        ("ge", lambda x, y: x >= y),
        ("ne", lambda x, y: (x < y) | (x > y)),
        ("neu", lambda x, y: ~(x == y)),
        ("leu", lambda x, y: ~(x > y)),
        ("geu", lambda x, y: ~(x < y)),
        ("num", lambda x, y: ~np.isnan(x) & ~np.isnan(y)),
    ],
)
def test_comparisons_of_float32(test, function):
    again = np.concatenate([A, A]), np.concatenate([B, A])  # equal ones too
    x, y = (bits.view(np.float32) for bits in again)
    assert results(f"setp.{test}.f32", *again) == function(x, y).tolist()


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.s32", lambda x, y: x + y),
        ("sub.s32", lambda x, y: x - y),
        ("mul.lo.s32", lambda x, y: x * y),
        ("mul.hi.u32", lambda x, y: x * y >> np.uint64(32)),
        ("xor.b32", lambda x, y: x ^ y),
        ("max.u32", np.maximum),
        ("min.s32", lambda x, y: np.minimum(x.astype(np.uint32).view(np.int32), y.astype(np.uint32).view(np.int32))),
        ("shl.b32", lambda x, y: np.where(y < 32, x << np.minimum(y, np.uint64(32)), 0)),
        ("shr.s32", lambda x, y: x.astype(np.uint32).view(np.int32).astype(np.int64) >> np.minimum(y, 32).astype(int)),
    ],
)
def test_integers(opcode, function):
    second = B % 40 if opcode.startswith("sh") else B
    with np.errstate(over="ignore"):
        expected = function(A.astype(np.uint64), second.astype(np.uint64))
    assert results(opcode, A, second) == expected.astype(np.uint32).tolist()


@pytest.mark.parametrize(("kind", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_halves(kind, dtype):
    import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)

    finite = A[~np.isnan(A.view(np.float32))]
    narrow = conversion(["cvt", "rn", kind, "f32"])
    with np.errstate(over="ignore"):
        expected = finite.view(np.float32).astype(dtype)
    found = [narrow(int(bits)) for bits in finite]
    assert found == expected.view(np.uint16).tolist()
    wide = conversion(["cvt", "f32", kind])
    same([wide(bits) for bits in found], expected.astype(np.float32))


def test_float64_and_float32():
    x = A.view(np.float32)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    widen, narrow = conversion(["cvt", "f64", "f32"]), conversion(["cvt", "rn", "f32", "f64"])
    there = ~np.isnan(x)
    assert np.array([widen(int(bits)) for bits in A[there]], np.uint64).tolist() == wide[there].view(np.uint64).tolist()
    third = wide[there] / 3
    same([narrow(int(bits)) for bits in third.view(np.uint64)], third.astype(np.float32))


def test_whole_numbers_of_float32():
    """Ties go to even; an integer is as near as its width allows, and 0 for NaN."""
    with np.errstate(all="ignore"):
        x = np.concatenate([A.view(np.float32), np.array([0.5, 1.5, 2.5, -0.5, -3.5, 7.5, -127.5], np.float32)])
        same([conversion(["cvt", "rni", "f32", "f32"])(int(bits)) for bits in x.view(np.uint32)], np.rint(x))
        wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    for kind, info in (("s32", np.iinfo(np.int32)), ("u32", np.iinfo(np.uint32))):
        for rounding, function in (("rni", np.rint), ("rzi", np.trunc)):
            found = [conversion(["cvt", rounding, kind, "f32"])(int(bits)) for bits in x.view(np.uint32)]
            expected = np.clip(function(wide), info.min, info.max).astype(np.int64) & 0xFFFFFFFF
            assert found == expected.tolist()


@pytest.mark.parametrize(("kind", "fill"), [("s32", True), ("u32", False)])
def test_bit_fields(kind, fill):
    first, count = B % 40, C % 40
    found = results(f"bfe.{kind}", A, first, count)
    for x, p, n, field in zip(A.tolist(), first.tolist(), count.tolist(), found, strict=True):
        bits = [x >> i & 1 for i in range(32)]
        sign = bits[min(p + n - 1, 31)] if fill and n else 0
        wanted = [bits[p + i] if i < n and p + i < 32 else sign for i in range(32)]
        assert field == sum(bit << i for i, bit in enumerate(wanted)), (hex(x), p, n)
    function = eval(f"lambda a, b, c, d: {expression(['bfi', 'b32'], list('abcd'))}", dict(HELPERS))
    for x, into, p, n in zip(A.tolist(), B.tolist(), first.tolist(), count.tolist(), strict=True):
        wanted = [x >> i - p & 1 if p <= i < p + n else into >> i & 1 for i in range(32)]
        assert function(x, into, p, n) == sum(bit << i for i, bit in enumerate(wanted)), (hex(x), hex(into), p, n)
