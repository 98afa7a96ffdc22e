"""GPU variants of the API compile, without a GPU: by MAX for sm_90a, and by the Mojo compiler for others.

Found here: a variant that is dropped or falls back to the host, a kernel that a trace of launches would not know, one
that spills or does not fit; what another architecture's compiler refuses. Nothing here is run.
"""

from collections import Counter

import pytest

from gpu.model import programs
from gpu.model.cubins import Kernel
from gpu.rules import block_threads
from paged_kv.graphs.ops import BITS, CODES
from paged_kv.runtime.kernel_launches import kernel_label
from support.dtype_pairs import GPU_CODE_PAIRS, GPU_DTYPES, GPU_PAIRS

pytestmark = pytest.mark.waits_for(programs.api, *programs.generic.values())

HOPPER_THREADS = block_threads("gpu/hopper", float8=False)
FLOAT8_THREADS = block_threads("gpu/hopper", float8=True)
SHARED_BYTES = 227 * 1024

# Sizes that `launch_generic_for_group` in generic.mojo compiles: (head_dim up to, query heads).
GENERIC_SIZES = [(dim, heads) for dim in (64, 128, 256, 512) for heads in (1, 4, 8) if (dim, heads) != (512, 8)]
MASKED_SIZES = [(128, 1), (128, 8), (512, 4)]
LATENT_SIZES = 2  # rotary parts up to 128, and wider ones
ROTARY_SIZES = [(128, 4), (512, 2)]
PAIRS_OF_CODES = len(GPU_CODE_PAIRS)  # which have no rotary keys and no latents
HOPPER_SIZES = [(dim, heads) for dim in (64, 128, 256) for heads in (8, 16)]


@pytest.fixture(scope="module")
def sm90() -> list[Kernel]:
    """All kernels of the API as MAX compiles them for sm_90a."""
    printed, found = programs.api()
    # Attention without and with masks, append; and gather.
    of_codes = 3 * len(GPU_CODE_PAIRS) + len(CODES)
    assert printed.strip() == f"{3 * (len(GPU_PAIRS) + 1) + of_codes + 2 * len(BITS) + len(GPU_DTYPES) + 2} graphs"
    return found


def test_every_kernel_of_the_api_is_there(sm90):
    """As many of each kind as the sources instantiate, by the names that a trace of launches shows."""
    pairs = len(GPU_PAIRS) + 1  # the last one with o of another dtype
    hopper = (sum(q_dtype != "float32" for q_dtype, _ in GPU_PAIRS) + 1) * len(HOPPER_SIZES)
    float8 = sum(q_dtype != "float32" and kv_dtype != q_dtype for q_dtype, kv_dtype in GPU_PAIRS) * len(HOPPER_SIZES)
    generic = pairs * (len(GENERIC_SIZES) + len(MASKED_SIZES) + 2 * len(ROTARY_SIZES))
    generic += PAIRS_OF_CODES * (len(GENERIC_SIZES) + len(MASKED_SIZES))
    schedules = 2 * (len({q_dtype for q_dtype, _ in GPU_PAIRS}) + 1)  # with masks and without
    row_copies = 2 * 2 * len(BITS)  # append and gather, 16 bytes or an element at once
    row_copies += 2 * (len(GPU_CODE_PAIRS) + len(CODES))  # of codes, aligned or not
    page_copies = 2  # 16 bytes or an element at once
    found = Counter(kernel_label(kernel.name) for kernel in sm90)
    attention = {"gpu/hopper": hopper, "gpu/generic": generic, "gpu/latent": pairs * LATENT_SIZES}
    around = {"gpu/schedule": schedules, "gpu/combine": schedules, "merge_states": len(GPU_DTYPES)}
    for kernel, count in (attention | around).items():
        assert found.pop(kernel) == count, kernel
    assert found.total() == row_copies + page_copies + 1  # ragged_rows
    threads = Counter(kernel.max_threads for kernel in sm90 if kernel_label(kernel.name) == "gpu/hopper")
    assert threads == {HOPPER_THREADS: hopper - float8, FLOAT8_THREADS: float8}


SPILLS_OVER_CODES = 1
"""Attention over codes of one of the kinds: for 80 registers, six CTAs an SM, ptxas spills two words."""


def test_no_kernel_spills(sm90):
    """But for those over codes, which are known."""
    spilled = [(kernel.registers, kernel.stack_bytes) for kernel in sm90 if kernel.stack_bytes]
    assert spilled == [(80, 8)] * SPILLS_OVER_CODES


def test_kernels_fit_an_sm(sm90):
    assert max(kernel.registers for kernel in sm90) <= 255
    assert max(kernel.shared_bytes for kernel in sm90) <= SHARED_BYTES


ATTENTION_OVER_CODES = 2
COUNTS = {
    "attention": 4 + ATTENTION_OVER_CODES,
    "latent": 2,
    "schedule": 5,
    "combine": 5,
    "append": 6,
    "gather": 6,
    "ragged_rows": 1,
    "copy_pages": 2,
    "merge": 2,
}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100a", "gfx942"])
def test_generic_kernels_compile_for(architecture):
    texts = programs.generic[architecture]()
    assert Counter(map(programs.kind_of, texts)) == COUNTS, sorted(texts)
    for name, text in texts.items():
        assert architecture in text, name
    attention = [text for name, text in texts.items() if programs.kind_of(name) == "attention"]
    # Codes are read 4 bytes at a time, all other caches 8 or 16.
    if architecture == "gfx942":
        assert sum("global_load_dwordx" in text for text in attention) >= COUNTS["attention"] - ATTENTION_OVER_CODES
        assert all("global_load_dword" in text for text in attention)
        assert all(".vgpr_spill_count: 0" in text for text in texts.values())
    else:
        wide = ["ld.global.v" in text or "ld.global.nc.v" in text for text in attention]
        assert wide.count(False) == ATTENTION_OVER_CODES
        assert all("ld.global.b32" in text for text in attention)
        assert all("shfl.sync.bfly" in text for text in attention)
        assert not any(".local" in text for text in texts.values())
