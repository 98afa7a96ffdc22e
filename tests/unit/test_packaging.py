"""The promises of the distribution: pins, extras, what is shipped, and one set of commands everywhere."""

import re
import shutil
import subprocess
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import paged_kv
from paged_kv.versions import PINNED, VERSION

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest"
DEMO_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/paged-kv demo"
TOP_LEVEL = {
    *("pyproject.toml", "MANIFEST.in", "pixi.toml", "mkdocs.yml", "LICENSE"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("mojo_ops", "python", "graphs", "tests", "benchmarks", "docs", "examples"),
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements}


def test_the_version_stands_in_one_place():
    """Everything that builds, installs or says it reads it from there; so with the versions of MAX and Mojo."""
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "paged_kv.versions.VERSION"}
    code = [path for folder in ("python", "graphs", "benchmarks", ".ci") for path in (ROOT / folder).rglob("*.py")]
    copies = re.compile("|".join(rf'["=]{re.escape(version)}\b' for version in (VERSION, *PINNED.values())))
    written = [path.relative_to(ROOT).as_posix() for path in code if copies.search(path.read_text())]
    assert written == ["python/paged_kv/versions.py"]


def test_every_requirement_of_max_and_mojo_has_the_pinned_version():
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    pins = [re.fullmatch(r"(max|mojo)(?:\[\w+\])?==(.+)", line) for line in lines if names([line]) & {"max", "mojo"}]
    assert len(pins) == 3
    assert all(pin and pin[2] == PINNED[pin[1]] for pin in pins)
    assert "paged-kv[max-serve]" in PROJECT["optional-dependencies"]["test-max-serve"]


def test_torch_and_transformers_are_in_extras_alone():
    assert names(PROJECT["dependencies"]).isdisjoint({"torch", "transformers"})
    extras = PROJECT["optional-dependencies"]
    assert set(extras) >= {"torch", "test", "bench"}
    assert names(extras["torch"]) == {"torch"}
    assert {"torch", "transformers", "hypothesis", "pytest"} <= names(extras["test"])


def test_ranges_end_where_they_are_tested():
    """CI runs the pins of `test`, and by a switch those of `.ci/newest.txt`."""
    extras = PROJECT["optional-dependencies"]
    ranges = {found.name: found.specifier for found in map(Requirement, extras["transformers"])}
    assert extras["torch"][0] in extras["transformers"]
    assert set(ranges) == {"torch", "transformers"}
    oldest, newest = extras["test"], (ROOT / ".ci" / "newest.txt").read_text().splitlines()
    for name, allowed in ranges.items():
        old, new = (pinned(lines, name) for lines in (oldest, newest))
        ends = {f">={old.major}.{old.minor}", f"<{new.major}.{new.minor + 1}"}
        assert set(map(str, allowed)) == ends


def pinned(lines, name):
    """Return the version that one of the lines pins."""
    (found,) = (each for each in map(Requirement, lines) if each.name == name)
    (pin,) = found.specifier
    assert pin.operator == "=="
    return Version(pin.version)


def test_the_installed_distribution_says_the_same():
    assert metadata.version("paged-kv") == paged_kv.__version__ == VERSION
    (entry,) = metadata.entry_points(group="console_scripts", name="paged-kv")
    assert entry.value == "paged_kv.__main__:main"


def test_the_mojo_sources_are_reached_through_the_package():
    folder = Path(str(resources.files("paged_kv.mojo_ops")))
    shipped = {path.relative_to(folder) for path in folder.rglob("*.mojo")}
    assert shipped == {path.relative_to(ROOT / "mojo_ops") for path in (ROOT / "mojo_ops").rglob("*.mojo")}
    assert Path("ops.mojo") in shipped
    assert Path("attention/gpu/hopper/kernel.mojo") in shipped
    assert (folder / "README.md").is_file()


def test_every_source_folder_is_shipped():
    """`packages` and the globs of package data are lists: a new folder must be added to them."""
    settings = PYPROJECT["tool"]["setuptools"]
    roots = {Path(folder): package for package, folder in settings["package-dir"].items()}
    packages, shipped_data = set(), set()
    for root, package in roots.items():
        for file in (ROOT / root).rglob("*"):
            inner = ".".join([package, *file.parent.relative_to(ROOT / root).parts])
            if file.suffix == ".py":
                packages.add(inner)
            for glob in settings["package-data"].get(package, []):
                shipped_data |= set((ROOT / root).glob(glob))
            for glob in settings["package-data"].get(inner, []):
                shipped_data |= set(file.parent.glob(glob))
    assert packages | {"paged_kv.mojo_ops"} == set(settings["packages"])
    assert shipped_data >= {path for root in roots for path in (ROOT / root).rglob("*.mojo")}


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a git checkout")
def test_the_top_level_is_the_house():
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    top = {Path(file).parts[0] for file in files if (ROOT / file).exists()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL
    assert TOP_LEVEL - {"benchmarks", "docs"} <= top


@pytest.mark.parametrize("command", [TEST_COMMAND, DEMO_COMMAND])
def test_the_readme_has_the_commands_on_lines_of_their_own(command):
    assert command in (ROOT / "README.md").read_text().splitlines()


def test_ci_runs_the_readmes_test_command():
    assert f'\ntest_command="{TEST_COMMAND}"\n' in (ROOT / ".ci" / "run").read_text()


def test_every_test_folder_is_run_by_ci():
    """By the README's command, which is `testpaths`, or by a line of its own."""
    folders = {
        f"tests/{path.parent.relative_to(ROOT / 'tests').parts[0]}" for path in ROOT.glob("tests/*/**/test_*.py")
    }
    of_the_readme = set(PYPROJECT["tool"]["pytest"]["ini_options"]["testpaths"])
    lines = re.findall(r"bin/(?:python -m )?pytest (?:-n\d )?(tests/.*)", (ROOT / ".ci" / "run").read_text())
    named = [word for line in lines for word in line.split() if word.startswith("tests/")]
    others = [word for word in named if not word.endswith(".py")]  # more cases of one file are of a folder that is run
    assert of_the_readme.isdisjoint(others)
    assert of_the_readme | set(others) == folders


def test_pixi_runs_the_same_programs():
    pixi = tomllib.loads((ROOT / "pixi.toml").read_text())
    assert pixi["tasks"]["test"] == TEST_COMMAND.split(".venv/bin/")[-1]
    assert pixi["tasks"]["bench"] == "paged-kv bench"
    assert pixi["tasks"]["demo"] == DEMO_COMMAND.split(".venv/bin/")[-1]
    assert pixi["pypi-dependencies"]["paged-kv"]["path"] == "."
    assert set(pixi["pypi-dependencies"]["paged-kv"]["extras"]) <= set(PROJECT["optional-dependencies"])
