"""The Hopper kernel for many rows, compiled for sm_90a without a GPU: its PTX, and what the assembler says of it."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import gpu_programs, many_rows

pytestmark = pytest.mark.waits_for(gpu_programs.many_rows)

DIMS = (64, 128)
DTYPES = ("float16", "bfloat16")


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[int, str], str]:
    """The PTX of each variant of the kernel, by head_dim and dtype."""
    found = {key[1:]: text for key, text in many_rows.kernels().items() if key[0] == "attention"}
    assert set(found) == {(dim, dtype) for dim in DIMS for dtype in DTYPES}
    return found


def test_products_and_copies(kernels):
    for (dim, dtype), ptx in kernels.items():
        assert ".target sm_90a" in ptx
        kind = many_rows.SHORT[dtype]
        product = rf"wgmma\.mma_async\.sync\.aligned\.m64n64k16\.f32\.{kind}\.{kind} \{{[^}}]*\}}, "
        # Q K^T: both operands in shared memory, dims adjacent. P V: P in registers, V with its dims adjacent.
        scores = re.findall(product + r"%rd\d+, %rd\d+, p, 1,  1, 0,  0;", ptx)
        sums = re.findall(product + r"\{[^}]*\}, %rd\d+, p, 1, 1, 1;", ptx)
        assert (len(scores), len(sums)) == (dim // 16, dim // 64 * 4)
        assert ptx.count("wgmma.mma_async") == len(scores) + len(sums)
        # K and V, boxes of whole heads.
        assert ptx.count("cp.async.bulk.tensor.5d.shared::cluster.global") == 2
        # The tensor maps stay among the kernel's constant parameters, nothing is copied to local memory.
        assert "__local_depot" not in ptx
        # 2^score and the rescaling: one instruction each; no call of a library function.
        assert ptx.count("ex2.approx") >= 32 + 2
        assert "call" not in ptx


def test_weights_are_converted_before_the_fence(kernels):
    """A write between the fence and the products would make the assembler wait for each product."""
    for ptx in kernels.values():
        batches = re.findall(r"wgmma\.fence.*?wgmma\.commit_group", ptx, re.DOTALL)
        assert len(batches) == 2
        for batch in batches:
            assert "cvt.rn" not in batch
            assert not re.search(r"\b(mul|add|fma|ex2)\S*\.f32", batch)


def test_ptxas_takes_every_variant_without_a_spill(kernels, tmp_path):
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    ptxas = shutil.which("ptxas", path=search)
    if ptxas is None:
        pytest.skip("no ptxas found: the PTX was not assembled")

    def assemble(variant: tuple[int, str]) -> tuple[int, str]:
        source = tmp_path / f"{variant[0]}-{variant[1]}.ptx"
        source.write_text(kernels[variant])
        command = [ptxas, "-arch=sm_90a", "-v", "-o", source.with_suffix(".cubin"), source]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return result.returncode, result.stdout + result.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(assemble, kernels))
    for variant, (status, said) in zip(kernels, outcomes, strict=True):
        assert status == 0, said
        assert "0 bytes spill stores, 0 bytes spill loads" in said, variant
        # "wgmma.mma_async instructions are serialized", "setmaxnreg ignored", ...
        assert "warning" not in said.lower(), said
        assert "serialized" not in said, said
        assert "ignored" not in said, said
        ptx = kernels[variant]
        at_launch = int(re.search(r"Used (\d+) registers", said).group(1))
        of_producer, of_consumers = (int(re.search(rf"setmaxnreg\.{how}\S* (\d+);", ptx)[1]) for how in ("dec", "inc"))
        # The 65,536 registers of an SM, before and after they are handed over.
        assert at_launch * many_rows.THREADS <= 65536
        assert 128 * (of_producer + 2 * of_consumers) <= 65536
