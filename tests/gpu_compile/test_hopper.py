"""The Hopper kernel, compiled for sm_90a without a GPU: what its PTX holds, and what the assembler says of it.

tests/mojo/compile_hopper_kernel.mojo launches every variant; tests/mojo/test_hopper_item.mojo checks its memory and
indices on the CPU.
"""

import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from support import gpu_programs
from support.gpu_rules import block_threads
from support.hopper_variants import products, tensor_kernels, variant_of
from support.mojo_programs import run_program

pytestmark = pytest.mark.waits_for(gpu_programs.hopper, gpu_programs.probe)

# Query and cache: bf16, f16; bf16 and f16 with e4m3, bf16 with e5m2. Three head_dims, groups up to 8 and 16.
PAIRS = 5
VARIANTS = PAIRS * 3 * 2


@pytest.fixture(scope="module")
def kernels() -> list[str]:
    """The PTX of each variant of the kernel."""
    found = tensor_kernels(gpu_programs.hopper())
    assert len(found) == VARIANTS
    return found


def test_tma_copies_tiles_for_the_tensor_cores(kernels):
    shapes = set()
    for ptx in kernels:
        assert ".target sm_90a" in ptx
        float8 = re.search(r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2", ptx)
        found = products(ptx)
        columns, dtype = found[0][:2]
        assert columns in (8, 16)
        assert dtype == ("f16" if float8 else dtype)
        # K Q^T: both operands have the dims adjacent. V^T P^T: neither has the tokens adjacent.
        keys = found.count((columns, dtype, 0, 0))
        values = found.count((columns, dtype, 1, 1))
        assert len(found) == ptx.count("wgmma.mma_async") == keys + values
        dim = keys * 16
        assert dim in (64, 128, 256)
        assert values == dim // 64 * 4
        # K and V: a lane starts the copy of a box of whole heads.
        copies = ptx.count("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes")
        assert copies == ptx.count("cp.async.bulk") == 2
        # The tensor maps stay among the kernel's constant parameters, nothing is copied to local memory.
        assert "cvta.param.u64" in ptx
        assert "__local_depot" not in ptx
        shapes.add((dim, columns, dtype, float8 and float8.group(1)))
    assert {shape[:2] for shape in shapes} == {(dim, n) for dim in (64, 128, 256) for n in (8, 16)}
    assert {shape[2:4] for shape in shapes} == {("bf16", None), ("f16", None), ("f16", "e4m3"), ("f16", "e5m2")}


def test_a_wait_and_a_fence_stand_where_they_must(kernels):
    """In the order of the text: each batch of products is fenced before, committed and waited for after."""
    order = re.compile(
        r"wgmma\.(fence|mma_async|commit_group|wait_group)|(fence\.proxy\.async)|(bar\.sync)\s+[12], 128"
    )
    for ptx in kernels:
        steps = ["".join(filter(None, match)) for match in order.findall(ptx)]
        text = " ".join(steps)
        batches = re.findall(r"(\S+ \S+ fence )?((?:mma_async ?)+)(commit_group wait_group)?", text)
        assert len(batches) == 2
        for _, _, after in batches:
            assert after, text
        # The products of weights and values follow stores to shared memory: proxy fence, barrier, wgmma fence.
        assert any(before.split()[:2] == ["fence.proxy.async", "bar.sync"] for before, _, _ in batches), text


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
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    ptxas = shutil.which("ptxas", path=search)
    if ptxas is None:
        pytest.skip("no ptxas found: the PTX was not assembled")

    def assemble(number: int) -> tuple[int, str]:
        source = tmp_path / f"{number}.ptx"
        source.write_text(kernels[number])
        command = [ptxas, "-arch=sm_90a", "-v", "-o", source.with_suffix(".cubin"), source]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return result.returncode, result.stdout + result.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(assemble, range(len(kernels))))
    for ptx, (status, said) in zip(kernels, outcomes, strict=True):
        assert status == 0, said
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


def test_the_probe_multiplies_as_the_kernel_does():
    """8 and 16 heads, with strides as they are and exchanged: the program for a GPU where results are wrong."""
    variants = [products(ptx) for ptx in tensor_kernels(gpu_programs.probe())]
    assert len(variants) == 3 + 4
    for found in variants:
        columns = found[0][0]
        assert found.count((columns, "bf16", 0, 0)) == found.count((columns, "bf16", 1, 1)) == 8 == len(found) // 2


def test_boxes_are_where_numpy_finds_the_tokens():
    """Over shuffled pages: each token of `[begin, end)` is in one box, at its row of a tile, from its page and slot."""
    tokens = 300
    table = np.array(random.Random(0).sample(range(1000), -(-tokens // 8)))
    result = run_program("print_copy_boxes.mojo", str(tokens), *map(str, table))
    assert result.returncode == 0, result.stderr
    lines = np.array([line.split() for line in result.stdout.splitlines()], int)
    assert len(lines) > 1000
    pool = np.arange(1000 * 256).reshape(1000, 256)  # [page, slot], as many slots as the largest page has
    for page_size, begin, end in np.unique(lines[:, :3], axis=0):
        boxes = lines[(lines[:, :3] == (page_size, begin, end)).all(axis=1), 3:]
        first, slots, row, page, slot = boxes.T
        assert (slots % 8 == 0).all()
        assert (page_size % slots == 0).all()
        assert (slot + slots <= page_size).all()
        covered = (first[:, None] + np.arange(slots[0])).ravel()
        found = pool[page[:, None], slot[:, None] + np.arange(slots[0])].ravel()
        expected = pool[table[covered // page_size], covered % page_size]
        np.testing.assert_array_equal(found, expected)
        # The tiles follow each other: rows of 64 tokens from the first box on.
        np.testing.assert_array_equal((first - first[0]) % 64, row)
        np.testing.assert_array_equal(covered, np.arange(first[0], first[0] + covered.size))
        assert first[0] <= begin < first[0] + slots[0]
        assert covered[-1] - slots[0] < end - 1 <= covered[-1]
