"""Every GPU variant of the API compiles, without a GPU: by MAX for sm_90a, and by the Mojo compiler for others.

Nothing here is run: what the kernels compute is checked by tests/gpu, where there is a GPU.
"""

import pytest

from paged_kv.graphs.ops import BITS, DTYPES
from paged_kv.runtime.kernel_choice import HOPPER_HEAD_DIMS, PAIRS, Call, choose
from support import gpu_programs
from support.cubins import Kernel

pytestmark = pytest.mark.waits_for(gpu_programs.api, *gpu_programs.plain.values())

HOPPER_THREADS = 160  # a producer warp and four consumer warps
SHARED_BYTES = 227 * 1024

# Shapes that `launch_for_group` in decode_gpu.mojo compiles: (head_dim up to, query heads).
PLAIN_SHAPES = [(dim, heads) for dim in (64, 128, 256, 512) for heads in (1, 4, 8) if (dim, heads) != (512, 8)]


@pytest.fixture(scope="module")
def sm90() -> list[Kernel]:
    """All kernels of the API as MAX compiles them for sm_90a."""
    printed, found = gpu_programs.api()
    assert printed.strip() == f"{len(PAIRS) + 2 * len(BITS) + len(DTYPES) + 2} graphs"
    return found


def test_every_kernel_of_the_api_is_there(sm90):
    """As many as the sources instantiate: none is dropped, none falls back to the host."""
    hopper_pairs = [pair for pair in PAIRS if choose(Call(*pair, 128, 4, 16), "sm_90a").kernel == "decode_hopper"]
    hopper = len(hopper_pairs) * len(HOPPER_HEAD_DIMS) * 2  # 8 or 16 heads
    plain = len(PAIRS) * (len(PLAIN_SHAPES) + 2)  # the last two with rotary keys
    schedule_and_combine = 2 * len({q_dtype for q_dtype, _ in PAIRS})
    moves = 2 * 2 * len(BITS)  # append and gather, 16 bytes or an element at once
    assert sum(kernel.max_threads == HOPPER_THREADS for kernel in sm90) == hopper
    copies = 2  # 16 bytes or an element at once
    assert len(sm90) == hopper + plain + schedule_and_combine + moves + copies + len(DTYPES) + 1  # merges, ragged_rows


def test_no_kernel_spills(sm90):
    assert [kernel for kernel in sm90 if kernel.stack_bytes] == []


def test_kernels_fit_an_sm(sm90):
    assert max(kernel.registers for kernel in sm90) <= 255
    assert max(kernel.shared_bytes for kernel in sm90) <= SHARED_BYTES


COUNTS = {"attend_ite": 6, "schedule_": 3, "combine_": 3, "append_": 2, "gather_": 2, "copy_p": 2, "merge_k": 2}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100a", "gfx942"])
def test_plain_kernels_compile_for(architecture):
    texts = gpu_programs.plain[architecture]()
    for name, count in COUNTS.items():
        assert sum(name in found for found in texts) == count, sorted(texts)
    for name, text in texts.items():
        assert architecture in text, name
    attention = [text for name, text in texts.items() if "attend_ite" in name]
    if architecture == "gfx942":
        assert all("global_load_dwordx" in text for text in attention)
        assert all(".vgpr_spill_count: 0" in text for text in texts.values())
    else:
        assert all("ld.global.v" in text or "ld.global.nc.v" in text for text in attention)
        assert all("shfl.sync.bfly" in text for text in attention)
        assert not any(".local" in text for text in texts.values())
