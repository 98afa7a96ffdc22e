"""The flags that a CPU target requires, held against the features that the Mojo compiler's LLVM gives it."""

import pytest
from mojo.run import subprocess_run_mojo

from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

# LLVM's names of features that Linux calls otherwise; the rest differ by `-` and `.` alone, or not at all.
LINUX_NAME = {
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni",
    "bmi": "bmi1",
    "crc32": "sse4_2",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "prfchw": "3dnowprefetch",
    "sahf": "lahf_lm",
    "sha": "sha_ni",
    "sse3": "pni",
    "x87": "fpu",
}
# Instructions that LLVM emits only for the intrinsic of that name: system, cache-line, entropy and ordering
# instructions. A target may claim them on a CPU without, because nothing that we compile uses them.
BY_NAME_ONLY = set(
    """cldemote clflushopt clwb clzero enqcmd fsgsbase invpcid movdir64b movdiri mwaitx pconfig pku prefetchi ptwrite
    rdpid rdpru rdrnd rdseed serialize sgx shstk tsxldtrk uintr waitpkg wbnoinvd xsavec xsaveopt xsaves
    """.split()
)


@pytest.mark.parametrize("target", REQUIRED_FLAGS)
def test_the_table_covers_every_feature_that_llvm_gives_a_target(target, tmp_path):
    source = tmp_path / "any.mojo"
    source.touch()
    args = ["build", "--print-effective-target", "--target-cpu", target, str(source)]
    output = subprocess_run_mojo(args, capture_output=True, text=True, check=True).stdout
    features = {
        feature[1:] for feature in output.split("--target-features ")[1].split()[0].split(",") if feature[0] == "+"
    }
    needed = {LINUX_NAME.get(name, name.replace("-", "_").replace(".", "_")) for name in features - BY_NAME_ONLY}
    assert "avx2" in needed
    assert needed <= REQUIRED_FLAGS[target]
