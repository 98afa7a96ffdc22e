"""Several blocks at once on the model (ptx_machine.py): atomics, and the order of stores and loads between blocks.

The kernel is the one that split rows need: each block stores a partial result, and the block that comes last, by a
counter, adds them up.
"""

import re
import struct

import numpy as np
import pytest

from support.generic_kernels import DeviceMemory
from support.ptx_machine import Machine

BLOCKS, THREADS = 5, 64
KERNEL = """
.visible .entry k(
    .param .b64 k_param_0, .param .b64 k_param_1, .param .b64 k_param_2
)
{
    .shared .align 4 .b8 is_last[4];
    ld.param::entry.b64 %rd1, [k_param_0];
    ld.param::entry.b64 %rd2, [k_param_1];
    ld.param::entry.b64 %rd3, [k_param_2];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %nctaid.x;
    mad.lo.s32 %r4, %r2, 64, %r1;
    mul.wide.u32 %rd4, %r4, 4;
    add.s64 %rd4, %rd1, %rd4;
    add.s32 %r5, %r4, 1;
    st.global.b32 [%rd4], %r5;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra COUNTED;
    sub.s32 %r6, %r3, 1;
    fence.acq_rel.gpu;
    atom.relaxed.gpu.global.inc.u32 %r7, [%rd2], %r6;
    fence.acq_rel.gpu;
    setp.eq.u32 %p2, %r7, %r6;
    selp.b32 %r8, 1, 0, %p2;
    st.shared.b32 [is_last], %r8;
COUNTED:
    bar.sync 0;
    ld.shared.b32 %r8, [is_last];
    setp.eq.b32 %p2, %r8, 0;
    @%p2 bra END;
    mov.b32 %r9, 0;
    mov.b32 %r10, 0;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd6, %rd1, %rd5;
    add.s64 %rd3, %rd3, %rd5;
NEXT:
    ld.global.b32 %r11, [%rd6];
    add.s32 %r9, %r9, %r11;
    add.s64 %rd6, %rd6, 256;
    add.s32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, %r3;
    @%p3 bra NEXT;
    st.global.b32 [%rd3], %r9;
END:
    ret;
}
"""
FENCE, ATOMIC = r"fence\.acq_rel\.gpu;", r"atom\.relaxed\.gpu\.global\.inc\.u32"
RIGHT = {
    "fences": ("", ""),
    "an atomic that acquires and releases": (
        rf"{FENCE}(\s*)atom\.relaxed(.*;)\s*{FENCE}",
        r"\1atom.acq_rel\2",
    ),
    "membar": (FENCE, "membar.gl;"),
}
WRONG = {
    "no fence before the counter": rf"{FENCE}(\s*atom)",
    "no fence after it": rf"(u32 %r7.*;\s*){FENCE}",
    "no barrier before it": r"(st\.global\.b32 \[%rd4\], %r5;\s*)bar\.sync 0;",
    "no barrier after it": r"(COUNTED:\s*)bar\.sync 0;",
    "fences of the block alone": None,
    "an atomic that releases only": None,
}


def run(text: str, seed: int, at_once: int = BLOCKS, follows: bool = False) -> None:
    memory = DeviceMemory()
    counter, sums = np.zeros(1, np.uint32), np.zeros(THREADS, np.int32)
    pointers = [memory.put(np.full(BLOCKS * THREADS, -(10**6), np.int32)), memory.put(counter), memory.put(sums)]
    parameters = [struct.pack("<Q", pointer) for pointer in pointers]
    Machine(text, seed, memory.bytes).launch((BLOCKS, 1, 1), THREADS, parameters, at_once, follows)
    expected = (np.arange(BLOCKS * THREADS) + 1).reshape(BLOCKS, THREADS).sum(axis=0)
    np.testing.assert_array_equal(memory.get(pointers[2], sums), expected)
    assert memory.get(pointers[1], counter) == 0  # ready for the next launch


@pytest.mark.parametrize("how", RIGHT)
def test_the_last_block_may_read_what_the_others_stored(how):
    pattern, by = RIGHT[how]
    text, count = re.subn(pattern, by, KERNEL) if pattern else (KERNEL, 1)
    assert count
    for seed in range(4):
        run(text, seed)
        run(text, seed, at_once=2)


@pytest.mark.parametrize("fault", WRONG)
def test_a_missing_order_is_seen_at_once(fault):
    """In each order of running, whether or not it would show in the sums."""
    if fault == "fences of the block alone":
        text = KERNEL.replace("fence.acq_rel.gpu", "fence.acq_rel.cta")
    elif fault == "an atomic that releases only":
        text = re.sub(rf"{FENCE}(\s*)atom\.relaxed(.*;)\s*{FENCE}", r"\1atom.release\2", KERNEL)
    else:
        text, count = re.subn(WRONG[fault], r"\1", KERNEL)
        assert count == 1
    for seed in range(4):
        with pytest.raises(AssertionError, match="nothing orders it after the store"):
            run(text, seed)


def test_a_grid_that_follows_another_waits_for_it():
    """Before anything in global memory, and in every thread."""
    run(KERNEL.replace("st.global.b32 [%rd4]", "griddepcontrol.wait; st.global.b32 [%rd4]"), 0, follows=True)
    with pytest.raises(AssertionError, match="global memory before griddepcontrol"):
        run(KERNEL, 0, follows=True)
    late = KERNEL.replace("st.global.b32 [%rd4], %r5;", "st.global.b32 [%rd4], %r5; griddepcontrol.wait;")
    with pytest.raises(AssertionError, match="global memory before griddepcontrol"):
        run(late, 0, follows=True)
    with pytest.raises(AssertionError, match="ends without griddepcontrol"):
        run(".entry k(.param .b64 k_param_0)\n{\nret;", 0, follows=True)


@pytest.mark.parametrize(
    ("instruction", "old", "argument", "new"),
    [
        ("add.u32", 2**32 - 1, 3, 2),
        ("add.s32", 5, -7, 2**32 - 2),
        ("add.u64", 2**40, 1, 2**40 + 1),
        ("inc.u32", 7, 7, 0),
        ("dec.u32", 0, 7, 7),
        ("min.s32", 1, -1, 2**32 - 1),
        ("max.u32", 1, -1, 2**32 - 1),
        ("exch.b32", 1, 9, 9),
        ("and.b32", 12, 10, 8),
        ("or.b32", 12, 10, 14),
        ("xor.b32", 12, 10, 6),
        ("cas.b32", 7, "7, 3", 3),
        ("cas.b32", 8, "7, 3", 8),
        ("add.f32", 0x3F800000, 0x40000000, 0x40400000),
    ],
)
@pytest.mark.parametrize("atomic", [True, False])
def test_atomics(atomic, instruction, old, argument, new):
    size = int(instruction[-2:])
    if not atomic and instruction.split(".")[0] in ("cas", "exch"):
        return
    what = f"atom.global.{instruction} %r9," if atomic else f"red.global.{instruction}"
    text = (
        ".entry k(.param .b64 k_param_0)\n{\nld.param::entry.b64 %rd1, [k_param_0]; setp.ne.b32 %p1, %laneid, 0;"
        f"@%p1 bra END; {what} [%rd1], {argument}; {f'st.global.b{size} [%rd1+8], %r9;' if atomic else ''} END: ret;"
    )
    memory = DeviceMemory()
    words = np.array([old, 0], np.uint64)
    address = memory.put(words)
    Machine(text, 0, memory.bytes).launch((1, 1, 1), 32, [struct.pack("<Q", address)])
    assert memory.get(address, words).tolist() == [new, old if atomic else 0]
