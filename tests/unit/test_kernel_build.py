"""Building kernels ahead, with a compiler that only writes files: what is made, made again, and refused."""

import hashlib
import json
import lzma
import pickle
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from paged_kv import build_kernels
from paged_kv.build_kernels import kernel_bundles
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.runtime import kernel_build
from paged_kv.runtime.compile_key import Sources
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo
from paged_kv.runtime.installed import INDEX, Index, InstalledStore
from paged_kv.runtime.kernel_build import TARGETS, KernelFile, build
from paged_kv.runtime.store import seal
from paged_kv.versions import PINNED, VERSION

BUNDLES = kernel_bundles()
FEW = ("merge_float32", "pages_uint8_uint8")


@pytest.fixture
def compiles(monkeypatch):
    """The pieces that were compiled, as (target, name)."""
    done: list[tuple[str, str]] = []
    sources = Sources.installed()

    def write(piece, cache):  # noqa: ARG001
        piece.path.write_bytes(lzma.compress(f"{piece.name} for {piece.target}".encode(), preset=0))
        seal(piece.path, list(piece.digests(sources).values()))
        done.append((piece.target, piece.name))

    monkeypatch.setattr(kernel_build, "_compile_in_a_process", write)
    return done


@pytest.mark.slow
def test_every_bundle_of_every_target_is_compiled_and_found(tmp_path, compiles):
    assert build(BUNDLES, tmp_path) == []
    assert sorted(compiles) == sorted((target, name) for target in TARGETS for name in BUNDLES)
    sources = Sources.installed()
    for target in TARGETS:
        cpu = CpuInfo("x86_64", "", REQUIRED_FLAGS[target])
        digests = [d for item in BUNDLES.items() for d in KernelFile(tmp_path, target, *item).digests(sources).values()]
        found = InstalledStore(tmp_path / target, cpu).find(digests)
        assert {artefact.content.decode() for artefact in found} == {f"{name} for {target}" for name in BUNDLES}
        assert set().union(*(artefact.digests for artefact in found)) == set(digests)


def test_another_process_gets_the_whole_piece():
    """By pickle."""
    sources = Sources.installed()
    for name, bundle in BUNDLES.items():
        piece = KernelFile(Path("folder"), "haswell", name, bundle)
        sent = pickle.loads(pickle.dumps(piece))
        assert (sent.path, sent.digests(sources)) == (piece.path, piece.digests(sources))


def test_no_compile_sees_the_cache_of_another(tmp_path, monkeypatch):
    """MAX takes functions of other graphs from one; the Mojo package is shared."""
    seen = []

    def run(_, env, **__):
        (folder := Path(env["MODULAR_CACHE_DIR"])).joinpath("left").touch()
        seen.append((folder, len(list(folder.iterdir())), env["XDG_CACHE_HOME"]))
        return subprocess.CompletedProcess("", 0)

    monkeypatch.setattr(subprocess, "run", run)
    for name in FEW:
        assert (
            kernel_build._compile_in_a_process(KernelFile(tmp_path, "haswell", name, BUNDLES[name]), str(tmp_path))
            is None
        )
    folders, files, caches = zip(*seen, strict=True)
    assert (len(set(folders)), files, set(caches)) == (2, (1, 1), {str(tmp_path)})
    assert not any(folder.exists() for folder in folders)


def test_an_index_says_what_the_files_are(tmp_path, compiles):  # noqa: ARG001
    build(BUNDLES, tmp_path, ["znver4"], only=FEW)
    index = Index.read(tmp_path / "znver4" / INDEX)
    assert (index.target, index.requires) == ("znver4", REQUIRED_FLAGS["znver4"])
    assert index.versions == {"paged-kv": VERSION, **PINNED}
    for name, facts in index.files.items():
        content = (tmp_path / "znver4" / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {graph["name"] for graph in index.graphs.values()} == {key for name in FEW for key in [name]}


def test_what_is_whole_is_not_made_again(tmp_path, compiles):
    build(BUNDLES, tmp_path, ["haswell"], only=["merge_float32"])
    build(BUNDLES, tmp_path, ["haswell", "znver5"], only=FEW)
    assert len(compiles) == 4
    assert set(compiles[1:]) == {("haswell", "pages_uint8_uint8"), *(("znver5", name) for name in FEW)}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    build(BUNDLES, tmp_path, ["haswell", "znver5"], only=FEW)
    assert len(compiles) == 4
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def of_other_sources(path):
    path.write_bytes(lzma.compress(b"older"))
    seal(path, ["0" * 32])


@pytest.mark.parametrize(
    "damage",
    [
        *(
            (lambda path, cut=cut: path.write_bytes(cut(path.read_bytes())))
            for cut in (lambda data: data[:-1], lambda _: b"")
        ),
        of_other_sources,
    ],
)
def test_what_is_damaged_or_of_other_sources_is_made_again(tmp_path, compiles, damage):
    build(BUNDLES, tmp_path, ["haswell"], only=FEW)
    path = tmp_path / "haswell" / "merge_float32.library.xz"
    whole = path.read_bytes()
    damage(path)
    build(BUNDLES, tmp_path, ["haswell"], only=FEW)
    assert compiles[2:] == [("haswell", "merge_float32")]
    assert path.read_bytes() == whole


def test_a_compile_that_fails_is_said_and_the_others_are_kept(tmp_path, compiles, monkeypatch):
    write = kernel_build._compile_in_a_process
    monkeypatch.setattr(
        kernel_build,
        "_compile_in_a_process",
        lambda piece, cache: "no memory" if piece.name == "pages_uint8_uint8" else write(piece, cache),
    )
    assert build(BUNDLES, tmp_path, ["haswell"], only=FEW) == ["haswell pages_uint8_uint8: no memory"]
    index = json.loads((tmp_path / "haswell" / INDEX).read_text())
    assert list(index["files"]) == ["merge_float32.library.xz"]
    assert compiles == [("haswell", "merge_float32")]


def test_sources_that_are_edited_meanwhile_leave_no_file(tmp_path, monkeypatch):
    piece, digests = KernelFile(tmp_path, "", "merge_float32", BUNDLES["merge_float32"]), iter("ab")
    monkeypatch.setattr(kernel_build, "build_libraries", lambda _, path, __: path.write_bytes(b"code"))
    monkeypatch.setattr(kernel_build, "digests_of", lambda *_: {"": next(digests) * 32})
    with pytest.raises(ToolchainError, match="edited while it was compiled"):
        kernel_build.compile_file(piece)
    assert list(tmp_path.iterdir()) == []


def test_another_architecture_is_refused(tmp_path, compiles, monkeypatch):
    monkeypatch.setattr(kernel_build.platform, "machine", lambda: "aarch64")
    with pytest.raises(ToolchainError, match=r"^kernels are compiled ahead on a machine of x86-64, got aarch64$"):
        build(BUNDLES, tmp_path, ["haswell"])
    assert compiles == []
    assert not list(tmp_path.iterdir())


def test_unknown_names_and_places_are_refused(tmp_path, compiles):
    with pytest.raises(ContractError, match=r"^target: expected one of graniterapids, .*, got 'pentium'$"):
        build(BUNDLES, tmp_path, ["haswell", "pentium"])
    with pytest.raises(ContractError, match=r"^bundle: expected one of pages_uint8_uint8, .*, got 'all'$"):
        build(BUNDLES, tmp_path, only=["all"])
    (tmp_path / "file").touch()
    with pytest.raises(ToolchainError, match=r"file: (File exists|Not a directory)$"):
        build(BUNDLES, tmp_path / "file", ["haswell"])
    assert compiles == []


def test_the_command(tmp_path, compiles):
    def run(*arguments):
        return CliRunner().invoke(build_kernels.build_kernels, [*arguments, "--out", str(tmp_path)])

    result = run("--targets", "haswell,znver5", "--bundles", "merge_float32", "--jobs", "1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.splitlines()[0] == "0 of 2 files are there"
    assert sorted(compiles) == [("haswell", "merge_float32"), ("znver5", "merge_float32")]
    result = run("--targets", "haswell,pentium")
    assert result.exit_code == 1
    assert "target: expected one of " in result.stderr
    assert run("--jobs", "0").exit_code == 2
