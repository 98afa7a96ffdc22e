"""The wheels with kernels: complete, right by their own record, the same bytes twice."""

import base64
import csv
import hashlib
import json
import lzma
import zipfile
from pathlib import Path

import pytest

from paged_kv.build_kernels import kernel_bundles
from paged_kv.runtime.compile_key import Sources
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS
from paged_kv.runtime.kernel_build import KernelFile, _write_index
from paged_kv.runtime.store import seal
from paged_kv.versions import PINNED, VERSION
from support.ci_modules import ci_module

SOURCES = Sources.installed()
BUNDLES = kernel_bundles()
PLATFORM = "manylinux_2_34_x86_64"
EPOCH = 1_700_000_001
MISSING = "is missing, damaged or of other sources"
PURE = {
    "paged_kv/__init__.py": b"print()\n",
    "paged_kv/mojo_ops/ops.mojo": b"# op\n",
    "paged_kv-1.dist-info/METADATA": b"Name: paged-kv\n",
    "paged_kv-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: setuptools (1)\nRoot-Is-Purelib: true\n"
    b"Tag: py3-none-any\n\n",
    "paged_kv-1.dist-info/RECORD": b"stale\n",
}


@pytest.fixture(scope="module")
def wheels():
    return ci_module("wheels")


@pytest.fixture
def kernels(tmp_path):
    """A folder as build_kernels leaves it, but for what the files hold."""
    for target in ("haswell", "znver5"):
        (tmp_path / "kernels" / target).mkdir(parents=True)
        pieces = [KernelFile(tmp_path / "kernels", target, name, bundle) for name, bundle in BUNDLES.items()]
        for piece in pieces:
            piece.path.write_bytes(lzma.compress(f"{piece.name} {target}".encode(), preset=0))
            seal(piece.path, list(piece.digests(SOURCES).values()))
        _write_index(pieces, SOURCES)
    return tmp_path / "kernels"


def entries(path):
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def assert_record(files):
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    rows = list(csv.reader(files[record].decode().splitlines()))
    assert [row[0] for row in rows] == list(files)
    assert rows[-1] == [record, "", ""]
    for name, digest, size in rows[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={expected}", len(files[name]))


def test_a_wheel_with_kernels(wheels, kernels, tmp_path):
    files = wheels.with_kernels(PURE, wheels.read_kernels(kernels, SOURCES), PLATFORM)
    wheels.write_wheel(tmp_path / "some.whl", files, EPOCH)
    written = entries(tmp_path / "some.whl")
    assert_record(written)
    assert set(PURE) < set(written)
    for target in ("haswell", "znver5"):
        for bundle in BUNDLES:
            name = f"{target}/{path_of(bundle).name}"
            assert written[f"paged_kv/kernels/{name}"] == (kernels / name).read_bytes()
        assert written[f"paged_kv/kernels/{target}/index.json"] == (kernels / target / "index.json").read_bytes()
    assert written["paged_kv-1.dist-info/WHEEL"].decode().splitlines() == [
        "Wheel-Version: 1.0",
        "Generator: setuptools (1)",
        "Root-Is-Purelib: false",
        f"Tag: py3-none-{PLATFORM}",
    ]


def test_the_same_files_are_the_same_bytes(wheels, tmp_path):
    wheels.write_wheel(tmp_path / "one.whl", PURE, EPOCH)
    wheels.write_wheel(tmp_path / "two.whl", dict(reversed(PURE.items())), EPOCH)
    assert (tmp_path / "one.whl").read_bytes() == (tmp_path / "two.whl").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.whl") as wheel:
        for entry in wheel.infolist():
            assert entry.external_attr >> 16 == 0o100644
            assert entry.date_time == (2023, 11, 14, 22, 13, 20)  # zip files count in steps of two seconds
    wheels.write_wheel(tmp_path / "two.whl", PURE, 0)
    assert entries(tmp_path / "two.whl") == entries(tmp_path / "one.whl")


def test_kernels_alone(wheels, kernels, tmp_path):
    files = wheels.kernels_alone(wheels.read_kernels(kernels, SOURCES), PLATFORM)
    wheels.write_wheel(tmp_path / "some.whl", files, EPOCH)
    written = entries(tmp_path / "some.whl")
    assert_record(written)
    info = f"paged_kv_kernels-{VERSION}.dist-info"
    assert {name.partition("/")[0] for name in written} == {"paged_kv_kernels", info}
    metadata = written[f"{info}/METADATA"].decode().splitlines()
    assert {"Name: paged-kv-kernels", f"Version: {VERSION}", f"Requires-Dist: paged-kv=={VERSION}"} <= set(metadata)
    assert f"{info}/licenses/LICENSE" in written


def test_provenance_says_what_the_kernels_are_made_of(wheels, kernels, monkeypatch):
    monkeypatch.setattr(wheels, "_git", lambda *words: "" if words[0] == "status" else "0123abc")
    files = wheels.read_kernels(kernels, SOURCES)
    content = json.loads(wheels.provenance(files))
    assert content["commit"] == "0123abc"
    assert content["modified"] is False
    assert content["versions"] == {"paged-kv": VERSION, **PINNED}
    assert content["targets"] == {name: sorted(REQUIRED_FLAGS[name]) for name in ("haswell", "znver5")}
    assert content["sha256"] == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert len(files) == 2 * (len(BUNDLES) + 1)


@pytest.mark.parametrize(
    ("bundle", "damage", "said"),
    [
        ("merge_float32", lambda path: path.unlink(), MISSING),
        ("layers_float32", lambda path: path.unlink(), MISSING),
        ("merge_float32", lambda path: path.write_bytes(path.read_bytes()[:-1]), MISSING),
        ("merge_float32", lambda path: seal_of_others(path), MISSING),
        ("merge_float32", lambda path: rewrite(path), "is not the file of"),
    ],
)
def test_kernels_that_are_not_whole_make_no_wheel(wheels, kernels, bundle, damage, said):
    damage(kernels / "znver5" / path_of(bundle).name)
    with pytest.raises(SystemExit, match=said):
        wheels.read_kernels(kernels, SOURCES)


def path_of(bundle):
    return KernelFile(Path(), "", bundle, BUNDLES[bundle]).path


def seal_of_others(path):
    path.write_bytes(lzma.compress(b"older"))
    seal(path, ["0" * 32])


def rewrite(path):
    """As another build leaves it: whole, but not what the index lists."""
    name = path.name.partition(".")[0]
    piece = KernelFile(path.parents[1], path.parent.name, name, BUNDLES[name])
    path.write_bytes(lzma.compress(b"another build"))
    seal(path, list(piece.digests(SOURCES).values()))


def test_a_folder_without_kernels_makes_no_wheel(wheels, tmp_path):
    with pytest.raises(SystemExit, match=r"has no kernels: make them by python -m paged_kv.build_kernels"):
        wheels.read_kernels(tmp_path, SOURCES)


def test_the_platform_is_that_of_max(wheels, monkeypatch):
    assert wheels.platform_of_max().startswith("manylinux_")
    monkeypatch.setattr(wheels, "_field", lambda *_: "cp311-cp311-manylinux_2_34_aarch64")
    with pytest.raises(SystemExit, match="x86-64"):
        wheels.platform_of_max()
