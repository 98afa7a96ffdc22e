"""The recipe of the Mojo community channel: rattler-build reads it, and it says what pyproject.toml says."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import rattler_build

from paged_kv.versions import PINNED, VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".ci" / "recipe"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    (variant,) = rattler_build.Stage0Recipe.from_file(str(FOLDER / "recipe.yaml")).render()
    return dict(variant.recipe.to_dict())


def test_the_versions_are_this_package_s(recipe: dict[str, Any]) -> None:
    assert recipe["package"]["version"] == VERSION
    run = recipe["requirements"]["run"]
    assert {name: f"{name} =={pinned}" for name, pinned in PINNED.items()} == {
        name: one for one in run for name in PINNED if one.startswith(f"{name} ")
    }


def test_it_requires_what_pyproject_requires(recipe: dict[str, Any]) -> None:
    wanted = [re.sub(r"(?=[<>=])", " ", one, count=1) for one in PROJECT["dependencies"]]
    python = f"python {PROJECT['requires-python']}"
    assert sorted(recipe["requirements"]["run"]) == sorted([python, *wanted])
    assert python in recipe["requirements"]["host"]


def test_it_installs_the_command_and_the_licence(recipe: dict[str, Any]) -> None:
    ((name, function),) = PROJECT["scripts"].items()
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == f"{name} = {function}"
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]


def test_its_files_exist(recipe: dict[str, Any]) -> None:
    scripts = [one for one in recipe["tests"] if "files" in one]
    assert [(FOLDER / name).is_file() for one in scripts for name in one["files"]["recipe"]] == [True]
    assert (ROOT / "LICENSE").is_file()
