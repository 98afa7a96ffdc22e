"""Packs the GPU tests and benchmark, this package, MAX and what they need into a folder for a host without a network.

    python benchmarks/gpu_bundle.py OUT_DIR [--python 3.12] [--no-max]

There, with an NVIDIA driver, Python of that version and torch (with CUDA) installed:

    bash OUT_DIR/run.sh           everything; or one of: hello, test, sanitize, bench

The wheels are unpacked, not installed: nothing on the host changes. OUT_DIR has some 550 MB, of which MAX is most;
`--pieces` writes it once more as archives of 29 MB. `--no-max` leaves out all that is downloaded, to
renew only the rest of an older bundle.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paged_kv.versions import PINNED, VERSION

ROOT = Path(__file__).parents[1]
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MAX = tuple(f"{name}=={PINNED['max']}" for name in ("max", "max-core", "max-mojo-libs"))
MOJO = tuple(f"{name}=={PINNED['mojo']}" for name in ("mojo-compiler", "mojo-compiler-mojo-libs"))
MAX_NEEDS = ("msgspec", "taskgroup", "exceptiongroup", "typing_extensions", "numpy>=2", "psutil")
OURS_NEED = ("click", "ml_dtypes", "rich", "markdown-it-py", "mdurl", "pygments", "safetensors", "tokenizers")
TESTS_NEED = (
    *("pytest>=9,<10", "pluggy", "iniconfig", "packaging", "pytest-xdist", "execnet"),
    *("hypothesis", "sortedcontainers", "attrs"),
)
NOT_NEEDED = ("*/bin/lld*", "*/bin/mojo-lsp-server", "*/lib/*lldb*", "*/lib/*LLDB*", "*/lib/libMojoJupyter.so")
SOURCES = ("tests", "benchmarks", "pyproject.toml", "README.md")

RUN = """\
#!/usr/bin/env bash
# Runs what is here on the GPU of this host: run.sh [hello | test | sanitize | bench]..., all of them by default.
set -uo pipefail
cd "$(dirname "$0")"
here=$PWD
export PYTHONPATH="$here/site:$here/tests" XDG_CACHE_HOME="$here/cache" PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}
mkdir -p results cache

hello() { $python hello.py; }
test() { $python -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tee results/tests.txt; }
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on this host"; return 0; }
    compute-sanitizer --error-exitcode 9 $python -m pytest -q -x -p no:cacheprovider tests/gpu/test_gpu_ops.py \\
        -k "nothing or wrong or permuting" 2>&1 | tee results/sanitizer.txt
}
bench() { $python benchmarks/decode_gpu.py --csv 2>&1 | tee results/bench.txt; }

failed=()
for part in "${@:-hello}" $([[ $# -gt 0 ]] || echo test sanitize bench); do
    echo "=== $part"
    "$part" || failed+=("$part")
done
((${#failed[@]})) && { echo "failed: ${failed[*]}"; exit 1; }
echo "all parts passed; see results/ and benchmarks/results/"
"""

HELLO = '''\
"""MAX on this GPU: x + 1, then one call of attention against torch."""

import numpy as np
import torch
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

device = Accelerator()
print(torch.cuda.get_device_name(), device.api, device.architecture_name, "torch", torch.__version__)
with Graph("hello", input_types=[TensorType(DType.float32, ["n"], DeviceRef.GPU(0))]) as graph:
    graph.output(graph.inputs[0].tensor + 1)
model = InferenceSession(devices=[CPU(), device]).load(graph)
result = model.execute(Buffer.from_numpy(np.arange(5, dtype=np.float32)).to(device))[0].to(CPU()).to_numpy()
assert result.tolist() == [1, 2, 3, 4, 5], result
print("MAX adds")

from paged_kv import single_decode_with_kv_cache  # noqa: E402

q, k, v = (torch.randn(shape, device="cuda").bfloat16() for shape in ((8, 128), (1000, 2, 128), (1000, 2, 128)))
o = single_decode_with_kv_cache(q, k, v).float()
scores = torch.einsum("hgd,lhd->hgl", q.float().reshape(2, 4, 128), k.float()) / 128**0.5
expected = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v.float()).reshape(8, 128)
off = ((o - expected).abs().max() / expected.abs().max()).item()
assert off < 1e-2, off
print(f"attention is off by {off:.1e}")
'''


def download(packages: tuple[str, ...], python: str, target: Path) -> None:
    """Wheels of some packages for the host's Python, unpacked as an installer would lay them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", "--dest", folder]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        subprocess.run([*command, *packages], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
    for data in target.glob("*.data"):
        for kind in ("platlib", "purelib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, target, dirs_exist_ok=True)
        shutil.rmtree(data)
    for pattern in NOT_NEEDED:
        for path in target.glob(pattern):
            path.unlink()
    for program in target.glob("*/bin/*"):
        program.chmod(0o755)  # a zip extracted here has lost its modes


def own_package(site: Path) -> None:
    """This package, laid out as the wheel has it."""
    package = site / "paged_kv"
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "python" / "paged_kv", package, ignore=ignored)
    for folder in ("graphs", "mojo_ops", "benchmarks"):
        shutil.copytree(ROOT / folder, package / folder, ignore=ignored)
    # The `mojo` command is not needed there (the compiler is in mojo-compiler), but its version is asked for.
    for name, version in (("paged_kv", VERSION), ("mojo", PINNED["mojo"])):
        facts = site / f"{name}-{version}.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def sources(out: Path) -> None:
    """Tests, benchmarks and what starts them."""
    for name in SOURCES:
        source, target = ROOT / name, out / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, target)
    (out / "run.sh").write_text(RUN)
    (out / "run.sh").chmod(0o755)
    (out / "hello.py").write_text(HELLO)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    (out / "benchmarks" / "COMMIT").write_text(f"{commit}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="of the host")
    parser.add_argument("--no-max", action="store_true", help="leave out what is downloaded")
    parser.add_argument("--pieces", action="store_true", help="also write the folder site as site.xz.00, .01, ...")
    arguments = parser.parse_args()
    out, site = arguments.out, arguments.out / "site"
    site.mkdir(parents=True, exist_ok=True)
    if not arguments.no_max:
        download((*MAX, *MOJO, *MAX_NEEDS, *OURS_NEED, *TESTS_NEED), arguments.python, site)
    own_package(site)
    sources(out)
    if arguments.pieces:
        # On the host: cat site.xz.* | xz -dc | tar x
        pack = f"tar c -C '{out}' site | xz -T0 -6 | split -b 29m -d - '{out / 'site.xz.'}'"
        subprocess.run(["bash", "-o", "pipefail", "-c", pack], check=True)
    megabytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) >> 20
    print(f"{out}: {megabytes} MB; on the GPU host: bash {out.name}/run.sh")


if __name__ == "__main__":
    main()
