"""The model itself, where no kernel would show its fault: numbers against NumPy's, and stores that nothing orders.

A wrong rounding, or a comparison of NaN that is the other way round, could hide the same fault of a kernel.
"""

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np
import pytest

from gpu.model.generic_kernels import DeviceMemory
from gpu.model.ptx_machine import Machine
from gpu.model.ptx_numbers import HELPERS, conversion, expression

SPECIAL = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x7F7FFFFF, 0x3F800000], np.uint32)
RANDOM = np.random.default_rng(0).integers(0, 2**32, 400, np.uint32)
# Small floats as well: most random bits are too far apart to be added.
NEAR = np.random.default_rng(1).standard_normal(400).astype(np.float32).view(np.uint32)
BITS = np.concatenate([SPECIAL, RANDOM, NEAR])
A, B = BITS, np.roll(BITS, 3)


def results(opcode, *operands):
    """Return the values of the model, for each place in the operands' arrays."""
    names = "abc"[: len(operands)]
    function = eval(f"lambda {', '.join(names)}: {expression(opcode.split('.'), list(names))}", dict(HELPERS))
    return [function(*map(int, values)) for values in zip(*operands, strict=True)]


def same(found, expected):
    """To the bit, but for which NaN it is."""
    found = np.array(found, np.uint32).view(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(found[there].view(np.uint32), expected[there].view(np.uint32))


def test_functions_of_float32():
    x, y = A.view(np.float32), B.view(np.float32)
    with np.errstate(all="ignore"):
        for opcode, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)):
            same(results(f"{opcode}.f32", A, B), function(x, y))
        same(results("ex2.approx.ftz.f32", A), np.exp2(x.astype(np.float64)).astype(np.float32))
        same(results("lg2.approx.ftz.f32", A), np.log2(x.astype(np.float64)).astype(np.float32))
        same(results("rcp.rn.f32", A), np.float32(1) / x)
        for opcode, function in (("max.f32", np.fmax), ("min.f32", np.fmin)):
            np.testing.assert_array_equal(np.array(results(opcode, A, B), np.uint32).view(np.float32), function(x, y))
        assert results("neg.f32", A) == (-x).view(np.uint32).tolist()
        assert results("abs.f32", A) == np.abs(x).view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("test", "function"),
    [
        ("eq", lambda x, y: x == y),
        ("lt", lambda x, y: x < y),
        ("gt", lambda x, y: x > y),
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


@pytest.mark.parametrize(("kind", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_halves(kind, dtype):
    finite = A[~np.isnan(A.view(np.float32))]
    narrow = conversion(["cvt", "rn", kind, "f32"])
    with np.errstate(over="ignore"):
        expected = finite.view(np.float32).astype(dtype)
    found = [narrow(int(bits)) for bits in finite]
    assert found == expected.view(np.uint16).tolist()
    wide = conversion(["cvt", "f32", kind])
    same([wide(bits) for bits in found], expected.astype(np.float32))


def test_whole_numbers_of_float32():
    """Ties go to even; an integer is as near as its width allows, and 0 for NaN."""
    with np.errstate(all="ignore"):
        x = np.concatenate([A.view(np.float32), np.array([0.5, 1.5, 2.5, -0.5, -3.5, 7.5, -127.5], np.float32)])
        same([conversion(["cvt", "rni", "f32", "f32"])(int(bits)) for bits in x.view(np.uint32)], np.rint(x))
        wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    found = [conversion(["cvt", "rzi", "s32", "f32"])(int(bits)) for bits in x.view(np.uint32)]
    expected = np.clip(np.trunc(wide), -(2.0**31), 2.0**31 - 1).astype(np.int64) & 0xFFFFFFFF
    assert found == expected.tolist()


SHARED_WORD = """
.visible .entry k(.param .b64 k_param_0)
{
    ld.param::entry.b64 %rd1, [k_param_0];
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd2, %rd1, %rd2;
    st.global.b32 [%rd2], %r1;
    ld.global.b32 %r2, [READ];
    ret;
}
"""


def test_a_load_of_what_another_block_stored_is_a_fault():
    memory = DeviceMemory()
    at = memory.put(np.zeros(2, np.int32))
    for read in ("%rd2", "%rd1"):
        machine = Machine(SHARED_WORD.replace("READ", read), 0, memory.bytes)
        if read == "%rd2":  # its own
            machine.launch((2, 1, 1), 32, [at.to_bytes(8, "little")])
            continue
        with pytest.raises(AssertionError, match="what another block stored"):
            machine.launch((2, 1, 1), 32, [at.to_bytes(8, "little")], at_once=2)
