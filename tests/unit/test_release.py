"""The path from a tag to files: what is refused, the same bytes twice, an sdist that has all that the wheel needs."""

import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from paged_kv.versions import PINNED, VERSION
from support.ci_modules import ci_module

ROOT = Path(__file__).parents[2]
TODAY = datetime.date(2026, 1, 2)
EPOCH = 1_700_000_000
CHANGES = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.0.1] - 2025-01-01\n\n- Older.\n"


@pytest.fixture(scope="module")
def tools():
    """The modules of .ci that make a release."""
    return {name: ci_module(name) for name in ("changelog", "release")}


@pytest.fixture
def repository(tmp_path):
    """A commit that could be released."""
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.replace("[Unreleased]", "[1.2.3] - 2026-01-02"))
    versions = tmp_path / "python" / "paged_kv" / "versions.py"
    versions.parent.mkdir(parents=True)
    versions.write_text('VERSION = "1.2.3"\nPINNED = {"max": "1"}\n')
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m c", "tag v1.2.3"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, timeout=300)
    return tmp_path


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="no git")


@needs_git
def test_a_tagged_clean_commit_is_released(tools, repository):
    assert tools["release"].refusals(repository, "1.2.3") == []


@needs_git
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo x >> CHANGELOG.md", "CHANGELOG.md first"),
        ("echo x > new", "new first"),
        ("git tag -d v1.2.3", "the commit has no tag: v1.2.3 is needed"),
        ("git tag -d v1.2.3; git tag v1.2.4", "has v1.2.4"),
        ("git tag v1.2.4", "has v1.2.3, v1.2.4"),
        ("sed -i s/1.2.3/1.2.2/ CHANGELOG.md", "has no section for 1.2.3"),
        ("sed -i 's/ - 2026-01-02//' CHANGELOG.md", "no date"),
        ("sed -i 's/- A thing.//' CHANGELOG.md", "says nothing of 1.2.3"),
    ],
)
def test_what_is_refused(tools, repository, command, words):
    subprocess.run(["bash", "-c", command], cwd=repository, check=True, stdout=subprocess.DEVNULL, timeout=300)
    found = tools["release"].refusals(repository, "1.2.3")
    assert any(words in line for line in found), found


def test_the_unreleased_changes_become_a_version(tools):
    changelog = tools["changelog"]
    after = changelog.cut(CHANGES, "0.1.0", TODAY)
    assert "## [Unreleased]\n\n## [0.1.0] - 2026-01-02\n\n### Added\n\n- A thing.\n\n## [0.0.1]" in after
    assert changelog.section(after, "0.1.0") == "### Added\n\n- A thing."
    assert changelog.section(after, "0.0.1") == "- Older."


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (CHANGES, "0.0.1", "already"),
        (CHANGES.replace("- A thing.", ""), "0.1.0", "says nothing"),
        (CHANGES.replace("[Unreleased]", "[Soon]"), "0.1.0", "needs one line"),
    ],
)
def test_a_cut_that_is_refused(tools, text, version, words):
    with pytest.raises(ValueError, match=words):
        tools["changelog"].cut(text, version, TODAY)


def test_this_changelog_can_be_cut(tools):
    text = (ROOT / "CHANGELOG.md").read_text()
    if f"## [{VERSION}]" not in text:
        text = tools["changelog"].cut(text, VERSION, TODAY)
    assert tools["changelog"].section(text, VERSION)


@pytest.fixture(scope="module")
def builds(tools, tmp_path_factory):
    """The sdist and the wheel of two copies of the checkout, which differ in all that must not matter."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    found = []
    for name, umask, when in (("one", 0o022, 1_000_000_000), ("other/below", 0o077, 1_600_000_000)):
        folder = tmp_path_factory.mktemp("build") / name
        (folder / "out").mkdir(parents=True)
        before = os.umask(umask)
        try:
            tools["release"].copy_sources(ROOT, folder / "source")
            for file in (folder / "source").rglob("*"):
                os.utime(file, (when, when))
                file.chmod(file.stat().st_mode & ~umask)
            found.append(tools["release"].build_once(folder / "source", folder / "out", EPOCH))
        finally:
            os.umask(before)
    return found


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(builds):
    for one, other in zip(*builds, strict=True):
        assert one.name == other.name
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest(), one.name


@pytest.mark.slow
def test_the_checkout_makes_the_wheel_of_the_sdist(tools, builds, tmp_path):
    sdist, wheel = builds[0]
    tools["release"].copy_sources(ROOT, tmp_path / "source")
    (tmp_path / "out").mkdir()
    name = tools["release"].setuptools_build(
        sys.executable, "build_wheel", tmp_path / "source", tmp_path / "out", EPOCH
    )
    with zipfile.ZipFile(tmp_path / "out" / name) as direct, zipfile.ZipFile(wheel) as built:
        assert sorted(direct.namelist()) == sorted(built.namelist())
        assert [entry for entry in direct.namelist() if direct.read(entry) != built.read(entry)] == []
    assert sdist.name == f"paged_kv-{VERSION}.tar.gz"


@pytest.mark.slow
def test_the_archives_have_what_they_need(builds):
    sdist, wheel = builds[0]
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    mojo = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mojo_ops").rglob("*.mojo")}
    assert {f"paged_kv/{name}" for name in mojo} <= installed
    assert {
        *("paged_kv/py.typed", "paged_kv/commands/inspect.html"),
        *("paged_kv/runtime/explain_kernels.mojo", "paged_kv/runtime/library.mojo"),
        *("paged_kv/bench/bandwidth_op/ops.mojo", "paged_kv/mojo_ops/README.md"),
        *(f"paged_kv/engine/demo_model/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
        *(f"paged_kv-{VERSION}.dist-info/{name}" for name in ("licenses/LICENSE", "METADATA", "entry_points.txt")),
    } <= installed
    assert mojo <= sources
    assert {
        *("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "MANIFEST.in", "PKG-INFO"),
        *("python/paged_kv/py.typed", "python/paged_kv/commands/inspect.html", "tests/conftest.py", ".ci/run"),
    } <= sources
    assert not {name for name in installed | sources if "__pycache__" in name or name.endswith((".pyc", ".mojoc"))}


def test_provenance_is_of_the_commit(tools, repository, tmp_path):
    if not shutil.which("git"):
        pytest.skip("no git")
    file = tmp_path / "a.whl"
    file.write_bytes(b"abc")
    facts = json.loads(tools["release"].provenance(repository, [file], ["znver5"], rehearsed=False))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, timeout=300)
    assert (facts["version"], facts["commit"], facts["needs"]) == ("1.2.3", commit.stdout.strip(), {"max": "1"})
    assert facts["files"] == {"a.whl": {"sha256": hashlib.sha256(b"abc").hexdigest(), "bytes": 3}}
    assert facts["kernel_targets"] == ["znver5"]
    assert tools["release"].versions()["PINNED"] == PINNED


def test_a_rehearsal_takes_a_copy_without_git(tools, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("python/a.py", "build/b.py", ".venv/c.py", "python/a.egg-info/d", "python/__pycache__/e"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    assert tools["release"].commit(source) == ("unknown", tools["release"].EARLIEST)
    assert tools["release"].refusals(source, "1.2.3") == ["git finds no commit here"]
    tools["release"].copy_sources(source, target)
    assert [path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()] == ["python/a.py"]


FAKE = """#!/bin/sh
echo "$SOURCE_DATE_EPOCH $*" >> {log}
case "$*" in
*wheels.py*)
    for kind in paged_kv-1-py3-none-any paged_kv-1-py3-none-linux paged_kv_kernels-1-py3-none-linux; do
        touch "$5/$kind.whl"
    done ;;
esac
"""


def test_the_wheels_of_kernels_are_those_of_their_own_tools(tools, tmp_path):
    """The wheel without kernels is not taken: the release has its own, which was built twice."""
    python, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out"
    python.write_text(FAKE.format(log=log))
    python.chmod(0o755)
    out.mkdir()
    built = tools["release"].build_kernels(python, tmp_path / "kernels", "haswell,znver5", out, EPOCH)
    assert [path.name for path in built] == ["paged_kv-1-py3-none-linux.whl", "paged_kv_kernels-1-py3-none-linux.whl"]
    assert all(path.parent == out and path.is_file() for path in built)
    compiled, packed = log.read_text().splitlines()
    assert compiled.split()[-6:] == [
        *("-m", "paged_kv.build_kernels", "--out", str(tmp_path / "kernels"), "--targets", "haswell,znver5")
    ]
    assert packed.startswith(f"{EPOCH} {ROOT / '.ci' / 'wheels.py'} --kernels {tmp_path / 'kernels'} --out ")


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "x").touch()
    command, env = [ROOT / ".ci" / "release", tmp_path], os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "is not empty" in done.stderr
