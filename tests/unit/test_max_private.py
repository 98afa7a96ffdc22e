"""The names of MAX that MAX does not document are there, and docs/notes/new-max.md has every one that is used."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest

from support.max_private import (
    FOLDERS,
    PAGE,
    ROOT,
    SERVER,
    Use,
    find,
    parsed,
    private_names,
    takes,
    titles,
    uses,
    variables,
)

PYTHON = ("Private names", "Public names without documentation")
KNOWN = {each.name for title in (*PYTHON, *SERVER) for each in private_names(title)}
OVERRIDDEN = ("_create_model_config", "_load_state_dict")
"""Defined by us, so not seen as another's; tests/max_serve looks for them."""

OF_OTHERS = ("_FinalizeInfo", "_Namespace__attrs", "_compiled_call_impl", "_set_vocab_none")
"""Private names of Jinja, torch and llama.cpp's converter, which by an attribute alone cannot be told from MAX's."""


def lacks(name: str, parameters: tuple[str, ...]) -> str:
    """The parts of a private name that are not there, in words; empty where all is."""
    try:
        signature = takes(find(name))
    except (ImportError, AttributeError) as error:
        return f"{name} is gone: {error}"
    missing = [parameter for parameter in parameters if not re.search(rf"\b{parameter}\b", signature)]
    return f"{name}{signature} has no {', '.join(missing)}" if missing else ""


# When this file is collected: later, tests replace some of them.
LACKING = {each.name: lacks(each.name, each.parameters) for title in PYTHON for each in private_names(title)}


@cache
def checkout() -> dict[Path, ast.Module]:
    return {file: tree for file, tree in parsed().items() if file != Path(__file__)}


@cache
def used() -> list[Use]:
    return uses(checkout())


def is_known(use: Use) -> bool:
    """A dotted name is a row's, or a module of one; of an attribute alone, some row ends with it."""
    if "." in use.name:
        return any(f"{name}.".startswith(f"{use.name}.") for name in KNOWN)
    return any(name.rpartition(".")[2] == use.name for name in KNOWN)


@pytest.mark.parametrize("name", LACKING)
def test_it_is_there_and_takes_what_it_is_given(name):
    assert LACKING[name] == ""


def test_the_environment_variables_are_there():
    (folder,) = map(Path, find_spec("max").submodule_search_locations)
    wanted = {each.name.encode() for each in private_names("Environment variables")}
    libraries = (folder.parent / "modular" / "lib").glob("lib*.so")
    for file in (*(folder / "serve").rglob("*.py"), *(folder / "pipelines").rglob("*.py"), *libraries):
        if wanted and file.stat().st_size:
            with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
                wanted = {name for name in wanted if content.find(name) < 0}
    assert wanted == set()


def test_every_table_has_rows():
    assert titles() == [*PYTHON, "Mojo", *SERVER, "Environment variables", "Behaviour"]
    assert all(private_names(title) for title in titles()[:-1])


@pytest.mark.parametrize("title", [title for title in titles() if title != "Behaviour"])
def test_the_users_of_a_row_use_it(title):
    wrong = []
    for each in private_names(title):
        words = [name.rpartition(".")[2] for name in each.row]
        others = [file for file in each.users if file.is_file() and not any(w in file.read_text() for w in words)]
        wrong += [f"{each.name}: {file.relative_to(ROOT)}" for file in others]
        assert each.users
    assert wrong == []


@pytest.mark.slow
def test_no_other_private_name_of_max_is_used():
    unknown = [
        f"{use.file.relative_to(ROOT)}:{use.line}: {use.name}"
        for use in used()
        if not is_known(use) and use.name.rpartition(".")[2] not in OF_OTHERS
    ]
    assert unknown == [], f"write it into a table of {PAGE.relative_to(ROOT)}, with what it is for"


@pytest.mark.slow
def test_every_private_name_of_a_table_is_used():
    ends = {use.name.rpartition(".")[2] for use in used()}.union(OVERRIDDEN)
    named = {each.name for title in ("Private names", "Private names of MAX Serve") for each in private_names(title)}
    assert {name for name in named if name.rpartition(".")[2] not in ends} == set()


@pytest.mark.slow
def test_no_other_environment_variable_of_max_is_used():
    assert variables(checkout()) == {each.name for each in private_names("Environment variables")}


def test_no_other_private_name_of_mojo_is_imported():
    found = set()
    for folder in (*FOLDERS, "mojo_ops"):
        for file in (ROOT / folder).rglob("*.mojo"):
            for module, names in re.findall(r"^\s*from ([a-z][\w.]*) import ([^\n#]+)", file.read_text(), re.MULTILINE):
                found |= {f"{module}.{name}" for name in re.findall(r"(?<!as )\b_[A-Za-z]\w*", names)}
    assert found == {each.name for each in private_names("Mojo")}
