"""The Hopper kernel's PTX, run on a model of the hardware (ptx_machine.py) and compared with float64.

Found here: a wrong box, swizzle, descriptor or place in shared memory; a stage that is read early or filled early; a
missing fence, barrier, commit or wait; a deadlock; a register of a product that is touched while it is under way; a
hand-over between warpgroups that nothing but chance would keep right.
Unused slots and pages are NaN, the page table is shuffled, threads run in random order.
"""

import re

import pytest

from gpu.model import programs
from gpu.model.hopper_calls import HopperCall as Call
from gpu.model.hopper_calls import any_order
from gpu.model.hopper_variants import DTYPES
from gpu.rules import block_threads

pytestmark = pytest.mark.waits_for(programs.hopper)


VARIANTS = [
    Call(dim, columns, dtype, kv_dtype, group=group, length=length)
    for dim, length in [(64, 140), (128, 100), (256, 70)]
    for columns, group in [(8, 5), (16, 12)]
    for dtype, kv_dtype in DTYPES
    # The other variants differ from these in a conversion alone.
    if dim == 64 or (dtype == "bf16" and kv_dtype != "e5m2")
]

TOKEN_RANGES = [
    *(Call(page_size=page_size, length=200) for page_size in (8, 24, 32, 64, 256)),
    *(Call(128, page_size=page_size, length=90, hnd=True) for page_size in (8, 16, 128)),
    *(Call(length=length, group=3) for length in (1, 63, 64, 65, 128, 129)),
    *(Call(begin=begin, length=150, group=1) for begin in (1, 16, 63, 64, 149)),
    Call(page_size=256, begin=250, length=270),
    Call(length=900, group=1),  # which fills stages of the ring a third time
    Call(length=256, begin=17, partial=1),
    Call(length=256, end=128, partial=0),
    Call(begin=0, end=0),
    Call(begin=0, end=-1),
    Call(bad_page=2),
    Call(bad_page=0, length=16),
    *(Call(length=300, listed=False, rows_before=count) for count in (0, 3)),
    Call(kv_dtype="e4m3", page_size=24, begin=29, length=131),
    Call(kv_dtype="e4m3", page_size=64, begin=63, length=130),
]

OPTIONS = [
    Call(soft_cap=2.0),
    Call(alibi=True),
    Call(sinks=True),
    Call(v_scale=0.5),
    Call(soft_cap=3.0, alibi=True, sinks=True, begin=40, v_scale=2),
    Call(dim=128, columns=16, dtype="f16", group=16, alibi=True, sinks=True, soft_cap=2.0, length=90),
]


@pytest.mark.parametrize("call", [*VARIANTS, *TOKEN_RANGES, *OPTIONS], ids=str)
def test_calls(variants, call):
    call.run(variants[call.dim, call.columns, call.dtype, call.kv_dtype])


@pytest.mark.parametrize("kv_dtype", ["", "e4m3"])
def test_any_order_of_threads(variants, kv_dtype):
    any_order(Call(length=400, group=2, kv_dtype=kv_dtype), variants[64, 8, "bf16", kv_dtype], 6)


FAULTS = {
    "the wait for the schedule": (r"griddepcontrol\.wait;", "", "griddepcontrol"),
    "a proxy fence": (r"fence\.proxy\.async\.shared::cta;", "", "without a fence"),
    "the barriers after a fence": (
        r"(fence\.proxy\.async\.shared::cta;)(?:\s|//[^\n]*\n)*bar\.sync\s+1, 128;",
        r"\1",
        None,
    ),
    "the barriers of the consumers": (r"bar\.sync\s+1, 128;", "", None),
    "the release of a stage": (r"mbarrier\.arrive\.shared\.b64[^;]*;", "", "deadlock"),
    "the wait for a stage": (r"mbarrier\.try_wait[^;]*;", "", None),
    "the fence of registers": (r"wgmma\.fence\.sync\.aligned;", "", "without a wgmma.fence"),
    "a sum that is not written after the fence": (
        r"(?s)(wgmma\.fence\.sync\.aligned;)((?:(?!wgmma).)*wgmma\.mma_async\S+ \{)(%\w+)",
        r"\1 mov.b32 \3, \3;\2\3",
        "no wgmma.fence between",
    ),
    "a sum that is not read before the wait": (
        r"(wgmma\.mma_async\S+ \{(%\w+)[^;]*;\s+\}(?:\s|//[^\n]*\n)*wgmma\.commit_group\.sync\.aligned;)",
        r"\1 mov.b32 %r9999, \2;",
        "under way",
    ),
    "a sum that is not written before the wait": (
        r"(wgmma\.mma_async\S+ \{(%\w+)[^;]*;\s+\}(?:\s|//[^\n]*\n)*wgmma\.commit_group\.sync\.aligned;)",
        r"\1 mov.b32 \2, 0;",
        "written before its wgmma.wait",
    ),
    "a commit": (r"wgmma\.commit_group\.sync\.aligned;", "", "under way"),
    "a commit in one lane": (
        r"(wgmma\.commit_group\.sync\.aligned;)",
        r"mov.u32 %r9999, %tid.x; setp.ne.b32 %p9999, %r9999, 77; @%p9999 \1",
        "different instructions, one of them .aligned",
    ),
    "the wait for products": (r"wgmma\.wait_group\.sync\.aligned 0;", "", "under way"),
    "the fence after the sums are rescaled": (
        r"(bar\.sync\s+1, 128;(?:\s|//[^\n]*\n)*)wgmma\.fence\.sync\.aligned;",
        r"\1",
        "no wgmma.fence between",
    ),
    # The release of K's stage, with the barrier of the warp and the branch before it, goes before the wait.
    "the wait before the release of a stage": (
        r"(wgmma\.wait_group\.sync\.aligned 0;)((?:\s+//[^\n]*)*)(\s+bar\.warp\.sync[^;]*;\s+@%p\d+ bra\s+(\S+);[^:]*?"
        r"mbarrier\.arrive\.shared\.b64[^;]*;\s+\4:)",
        r"\3\n\1",
        "overwritten before its wgmma.wait_group",
    ),
}
"""Missing parts: the part of the text, what stands there instead, and what the model says, where that is sure."""
WAIT = r"mbarrier\.try_wait\S* (\w+),[^;]*;"
DONE = r"setp.ne.b32 \2, 1, 0;"
FLOAT8_FAULTS = {
    "the fence of K widened": (
        r"fence\.proxy\.async\.shared::cta;(\s+bar\.sync\s+1, 128;\s[^@]*wgmma)",
        r"\1",
        "fence",
    ),
    "the fence of V widened": (r"fence\.proxy\.async\.shared::cta;(\s+bar\.sync\s+2, 128;)", r"\1", "without a fence"),
    "the fence of the weights": (r"fence\.proxy\.async\.shared::cta;(\s+bar\.warp\.sync)", r"\1", "without a fence"),
    "the barriers of the keys": (r"bar\.sync\s+1, 128;", "", None),
    # The one that does not follow the fence of the widened values.
    "the barrier after the products of V": (r"(?<!shared::cta;\n\t)bar\.sync\s+2, 128;", "", "overwritten before"),
    "the wait for weights": (rf"(?s)(bar\.sync\s+2, 128;(?:(?!wgmma).)*){WAIT}", rf"\1{DONE}", None),
    "the wait for an empty buffer": (rf"(?s)(ex2\.approx(?:(?!bar\.sync|wgmma).)*){WAIT}", rf"\1{DONE}", None),
    "the arrival of weights": (r"(?s)(ex2\.approx(?:(?!wgmma).)*?)mbarrier\.arrive\.shared[^;]*;", r"\1", "deadlock"),
    "the release of a buffer": (r"(wait_group\.sync\.aligned 0;[^:]*?)mbarrier\.arrive[^;]*;", r"\1", "deadlock"),
    "the fence of the rescaled sums": (
        r"(mul\.f32[^;]*;(?:\s+//[^\n]*\n)+\s+)wgmma\.fence\.sync\.aligned;",
        r"\1",
        "without a wgmma.fence",
    ),
    # The release, with the barrier of the warp before it, goes before the wait.
    "the wait before the release of a buffer": (
        r"(wgmma\.wait_group\.sync\.aligned 0;)((?:\s+//[^\n]*)*)(\s+bar\.warp\.sync[^;]*;)\s+@(%p\d+) bra\s+\S+;"
        r"(\s+add[^;]*;\s+)(mbarrier\.arrive\.shared\.b64[^;]*;)(\s+bra\.uni)",
        r"\3\5@!\4 \6\n\1\2\7",
        "overwritten before its wgmma.wait_group",
    ),
}
"""Those of the messages between the two warpgroups for a float8 cache."""


@pytest.mark.parametrize(
    ("kv_dtype", "missing"), [*(("", name) for name in FAULTS), *(("e4m3", name) for name in FLOAT8_FAULTS)]
)
def test_a_kernel_fails_without(variants, kv_dtype, missing):
    """A kernel without one of these fails, so that the tests above can fail."""
    pattern, by, message = (FLOAT8_FAULTS if kv_dtype else FAULTS)[missing]
    ptx, count = re.subn(pattern, by, variants[64, 8, "bf16", kv_dtype])
    assert count > 0
    with pytest.raises(AssertionError, match=message):
        any_order(Call(length=900, group=2, kv_dtype=kv_dtype), ptx, 4)


def test_the_barriers_of_the_ring_are_fenced_before_a_copy(variants):
    """The thread that makes them comes late to its next fence."""
    ptx = variants[64, 8, "bf16", ""]
    faulty, count = re.subn(r"fence\.mbarrier_init[^;]*;\s+fence\.proxy\.async[^;]*;", "", ptx)
    assert count == 1
    with pytest.raises(AssertionError, match="not fenced after its init"):
        any_order(Call(), faulty, 4, slow_warp=0)


def slow_warps(ptx: str) -> None:
    """Each warp of a block over a float8 cache in turn seldom runs."""
    call = Call(length=150, kv_dtype="e4m3")
    for warp in range(block_threads("gpu/hopper", float8=True) // 32):
        call.run(ptx, slow_warp=warp)


def test_a_slow_warp(variants):
    slow_warps(variants[64, 8, "bf16", "e4m3"])


def test_the_sums_of_weights_wait_until_all_have_read_the_exchange(variants):
    """Its memory has the greatest scores of the last tile until then."""
    faulty, count = re.subn(r"(\$L\w+:\s+)bar\.sync\s+1, 128;", r"\1", variants[64, 8, "bf16", "e4m3"])
    assert count == 1
    with pytest.raises(AssertionError, match="Not equal"):
        slow_warps(faulty)
