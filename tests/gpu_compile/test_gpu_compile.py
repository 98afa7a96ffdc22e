"""Every GPU variant of the API compiles, without a GPU: by MAX for sm_90a, and by the Mojo compiler for others.

Nothing here is run: what the kernels compute is checked by tests/gpu, where there is a GPU.
"""

from collections import Counter

import pytest

from paged_kv.graphs.ops import BITS, CODES, DTYPES
from paged_kv.runtime.launches import kernel_of
from support import gpu_programs
from support.cubins import Kernel
from support.dtype_pairs import PAIRS
from support.gpu_rules import block_threads

pytestmark = pytest.mark.waits_for(gpu_programs.api, *gpu_programs.generic.values())

HOPPER_THREADS = block_threads("gpu/hopper", float8=False)
FLOAT8_THREADS = block_threads("gpu/hopper", float8=True)
SHARED_BYTES = 227 * 1024

# Sizes that `launch_generic_for_group` in generic.mojo compiles: (head_dim up to, query heads).
GENERIC_SIZES = [(dim, heads) for dim in (64, 128, 256, 512) for heads in (1, 4, 8) if (dim, heads) != (512, 8)]
MASKED_SIZES = [(128, 1), (128, 8), (512, 4)]
LATENT_SIZES = 2  # rotary parts up to 128, and wider ones
ROTARY_SIZES = [(128, 4), (512, 2)]
PAIRS_OF_CODES = len(DTYPES) * len(CODES)  # which have no rotary keys and no latents
HOPPER_SIZES = [(dim, heads) for dim in (64, 128, 256) for heads in (8, 16)]


@pytest.fixture(scope="module")
def sm90() -> list[Kernel]:
    """All kernels of the API as MAX compiles them for sm_90a."""
    printed, found = gpu_programs.api()
    of_codes = len(CODES) * (2 * len(DTYPES) + len(DTYPES) + 1)  # attention without and with masks; append and gather
    assert printed.strip() == f"{3 * (len(PAIRS) + 1) + of_codes + 2 * len(BITS) + len(DTYPES) + 4} graphs"
    return found


def test_every_kernel_of_the_api_is_there(sm90):
    """As many as the sources instantiate: none is dropped, none falls back to the host."""
    pairs = len(PAIRS) + 1  # the last one with o of another dtype
    hopper = (sum(q_dtype != "float32" for q_dtype, _ in PAIRS) + 1) * len(HOPPER_SIZES)
    float8 = sum(q_dtype != "float32" and kv_dtype != q_dtype for q_dtype, kv_dtype in PAIRS) * len(HOPPER_SIZES)
    generic = pairs * (len(GENERIC_SIZES) + len(MASKED_SIZES) + 2 * len(ROTARY_SIZES) + LATENT_SIZES)
    generic += PAIRS_OF_CODES * (len(GENERIC_SIZES) + len(MASKED_SIZES))
    schedule_and_combine = 2 * 2 * (len({q_dtype for q_dtype, _ in PAIRS}) + 1)  # with masks and without
    row_copies = 2 * 2 * len(BITS)  # append and gather, 16 bytes or an element at once
    row_copies += 2 * len(CODES) * (len(DTYPES) + 1)  # of codes, aligned or not
    assert sum(kernel.max_threads == HOPPER_THREADS for kernel in sm90) == hopper - float8
    assert sum(kernel.max_threads == FLOAT8_THREADS for kernel in sm90) == float8
    page_copies = 2  # 16 bytes or an element at once
    trees = 3  # moves as page copies, and the rows
    others = len(DTYPES) + 1  # merges, ragged_rows
    assert len(sm90) == hopper + generic + schedule_and_combine + row_copies + page_copies + trees + others


def test_a_trace_of_launches_tells_the_kernels_apart(sm90):
    """As MAX names them: the Hopper kernels are known by their name, and no other kernel has it."""
    hopper = [kernel_of(kernel.name) for kernel in sm90 if kernel.max_threads in (HOPPER_THREADS, FLOAT8_THREADS)]
    assert set(hopper) == {"gpu/hopper"}
    found = Counter(kernel_of(kernel.name) for kernel in sm90)
    assert found["gpu/hopper"] == len(hopper)
    pairs = len(PAIRS) + 1
    of_codes = PAIRS_OF_CODES * (len(GENERIC_SIZES) + len(MASKED_SIZES))
    of_others = pairs * (len(GENERIC_SIZES) + len(MASKED_SIZES) + 2 * len(ROTARY_SIZES))
    assert found["gpu/generic"] == of_others + of_codes
    assert found["gpu/latent"] == pairs * LATENT_SIZES
    assert found["gpu/schedule"] == found["gpu/combine"] > 0


SPILLS_OVER_CODES = 3
"""Attention over codes with q of each dtype: for 80 registers, six CTAs an SM, ptxas spills two words."""


def test_no_kernel_spills(sm90):
    """But for those over codes, which are known."""
    spilled = [(kernel.registers, kernel.stack_bytes) for kernel in sm90 if kernel.stack_bytes]
    assert spilled == [(80, 8)] * SPILLS_OVER_CODES


def test_kernels_fit_an_sm(sm90):
    assert max(kernel.registers for kernel in sm90) <= 255
    assert max(kernel.shared_bytes for kernel in sm90) <= SHARED_BYTES


ATTENTION_OVER_CODES = 8
COUNTS = {
    "attention": 11 + ATTENTION_OVER_CODES,
    "latent": 5,
    "schedule": 9,
    "combine": 9,
    "append": 6,
    "gather": 6,
    "ragged_rows": 1,
    "copy_pages": 2,
    "move_tokens": 2,
    "tree_rows": 1,
    "merge": 2,
}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100a", "gfx942"])
def test_generic_kernels_compile_for(architecture):
    texts = gpu_programs.generic[architecture]()
    assert Counter(map(gpu_programs.kind_of, texts)) == COUNTS, sorted(texts)
    for name, text in texts.items():
        assert architecture in text, name
    attention = [text for name, text in texts.items() if gpu_programs.kind_of(name) == "attention"]
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
