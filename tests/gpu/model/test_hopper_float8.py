"""Messages between the two warpgroups of the Hopper kernel for a float8 cache: each part, where it is missing.

Found here: a hand-over that nothing but chance would keep right. That the whole kernel is right: test_hopper_kernel.py.
"""

import re

import pytest

from gpu.model import programs
from gpu.model.hopper_calls import HopperCall, any_order
from gpu.rules import block_threads

pytestmark = pytest.mark.waits_for(programs.hopper)

CALL = HopperCall(length=900, group=2, kv_dtype="e4m3")
SHORT = HopperCall(length=150, kv_dtype="e4m3")


@pytest.fixture
def ptx(variants) -> str:
    """The text of the variant that takes `CALL`."""
    return variants[CALL.dim, CALL.columns, CALL.dtype, CALL.kv_dtype]


WAIT = r"mbarrier\.try_wait\S* (\w+),[^;]*;"
DONE = r"setp.ne.b32 \2, 1, 0;"
FAULTS = {
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
"""Missing parts: the part of the text, what stands there instead, and what the model says, where that is sure."""


@pytest.mark.parametrize("missing", FAULTS)
def test_a_kernel_fails_without(ptx, missing):
    pattern, by, message = FAULTS[missing]
    faulty, count = re.subn(pattern, by, ptx)
    assert count > 0
    with pytest.raises(AssertionError, match=message):
        any_order(CALL, faulty, 4)


def slow_warps(ptx: str) -> None:
    """Each warp of the block in turn seldom runs."""
    for warp in range(block_threads("gpu/hopper", float8=True) // 32):
        SHORT.run(ptx, slow_warp=warp)


def test_a_slow_warp(ptx):
    slow_warps(ptx)


def test_the_sums_of_weights_wait_until_all_have_read_the_exchange(ptx):
    """Its memory has the greatest scores of the last tile until then."""
    faulty, count = re.subn(r"(\$L\w+:\s+)bar\.sync\s+1, 128;", r"\1", ptx)
    assert count == 1
    with pytest.raises(AssertionError, match="Not equal"):
        slow_warps(faulty)
