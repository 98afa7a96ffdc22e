"""The Hopper kernel as the assembler takes it: what no order of threads on the model shows.

Found here alone: a variant that is missing; a result of a product that is touched inside its fence, for which the
assembler makes products wait for each other; a spill; more registers than the blocks of an SM share; copies of a tensor
map, which the copy engine must find among the parameters.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from gpu.model import programs
from gpu.model.hopper_variants import DTYPES, tensor_kernels, variant_of
from gpu.rules import block_threads

pytestmark = pytest.mark.waits_for(programs.hopper)


@pytest.fixture(scope="module")
def kernels() -> list[str]:
    """The PTX of each variant of the kernel."""
    found = tensor_kernels(programs.hopper())
    variants = [(dim, columns, *pair) for dim in (64, 128, 256) for columns in (8, 16) for pair in DTYPES]
    assert sorted(map(variant_of, found)) == sorted(variants)
    return found


def test_tensor_maps_stay_among_the_parameters(kernels):
    for ptx in kernels:
        assert ".target sm_90a" in ptx
        assert "__local_depot" not in ptx


def test_results_are_pinned_at_their_fence_and_after_the_wait(kernels):
    """Nothing but a product names a result between its pin, right before the fence, and its pin after the wait."""
    for ptx in kernels:
        sections = ptx.split("wgmma.fence.sync.aligned;")
        assert len(sections) == 3
        for before, section in pairwise(sections):
            started, after = section.split("wgmma.commit_group.sync.aligned;")
            results = set(re.findall(r"%\w+", " ".join(re.findall(r"mma_async\S+ \{(.*?)\}", started))))
            pinned = re.findall(r"// pinned (%\w+)", before.rsplit(";", 1)[1])
            assert set(pinned) == results
            assert len(pinned) == len(results) >= 4
            others = "".join(line for line in started.splitlines() if "mma_async" not in line)
            assert results.isdisjoint(re.findall(r"%\w+", others))
            waited = after.split("wgmma.wait_group.sync.aligned 0;", 1)[1]
            for register in results:
                assert re.search(rf".*{register}\b", waited)[0].endswith(f"// pinned {register}")


def test_ptxas_takes_every_variant_without_a_spill(kernels, tmp_path):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(lambda i: programs.assembled(kernels[i], tmp_path / f"{i}.ptx"), range(len(kernels))))
    for ptx, said in zip(kernels, outcomes, strict=True):
        assert "0 bytes spill stores, 0 bytes spill loads" in said
        # "wgmma.mma_async instructions are serialized", "setmaxnreg ignored", ...
        assert "warning" not in said.lower(), said
        assert "serialized" not in said, said
        registers = int(re.search(r"Used (\d+) registers", said).group(1))
        blocks = int(re.search(r"\.minnctapersm (\d)", ptx).group(1))
        threads = int(re.search(r"\.maxntid (\d+)", ptx).group(1))
        assert threads == block_threads("gpu/hopper", float8=variant_of(ptx)[3] != "")
        # A quarter of an SM has 16,384 registers, given out by 8 a thread; a block's warps spread over the quarters.
        warps = blocks * threads // 32
        assert -(-registers // 8) * 8 * 32 * -(-warps // 4) <= 16384
