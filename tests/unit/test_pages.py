"""The statements of the checkout: links, commands and options are there; a page has one word for each thing.

tests/api/test_pages.py runs their blocks of code.
"""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from paged_kv.cli import commands as paged_kv
from support.pages import PAGES, ROOT, blocks, commands, name, prose

LINK = re.compile(r"\]\(([^)\s]+)\)")
METAPHORS = re.compile(r"\b(?:rooms?(?! for)|doors?|seams?|roads?|houses?)\b", re.IGNORECASE)
"""Words that stood for folders, modules and interfaces, where those have names of their own."""
INLINE = re.compile(r"`([^`\n]+)`")
OPTION = re.compile(r"--[a-z][a-zA-Z-]*")
FOREIGN = {"--interleave", "--continuous-batching", "--pdb", "--ignore", "--disallowedTools"}
"""Options of numactl, transformers, pytest and Claude Code."""
ELSEWHERE = {"CHANGELOG.md", "docs/max-serve.md", "docs/vllm.md", "docs/notes/arm.md", "docs/notes/new-max.md"}
"""Pages with options of other projects' commands, and with those that were once here."""


def links(page: Path) -> set[Path]:
    """Return what a page links to in the checkout."""
    targets = {target.partition("#")[0] for target in LINK.findall(prose(page)) if "://" not in target}
    return {(page.parent / target).resolve() for target in targets if target}


def options_of_the_commands() -> set[str]:
    """Every option that a command of this checkout takes."""
    parameters = [parameter for command in paged_kv.commands.values() for parameter in command.params]
    ours = {option for parameter in parameters for option in [*parameter.opts, *parameter.secondary_opts]}
    programs = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / ".ci").iterdir(), *(ROOT / "tests").rglob("*.py")]
    texts = [path.read_text() for path in [*programs, *(ROOT / "python/paged_kv").glob("*.py")] if path.is_file()]
    return ours | {option for text in texts for option in OPTION.findall(text)}


def check_command(words: list[str]) -> None:
    """Parses a command of `paged-kv`; of another program, holds its modules, extras and paths against the checkout."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, arguments = Path(words[0]).name, words[1:]
    if program == "paged-kv":
        paged_kv.commands[arguments[0]].make_context(arguments[0], arguments[1:])
    elif program == "python" and arguments[0] == "-m":
        assert find_spec(arguments[1]), words
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {extra for word in arguments for group in re.findall(r"\[(.+)\]", word) for extra in group.split(",")}
        assert asked <= extras.keys(), words
    tops = ("benchmarks/", "docs/", "examples/", "graphs/", "mojo_ops/", "python/", "tests/", ".ci/")
    assert [word for word in arguments if word.startswith(tops) and not (ROOT / word).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    for block in blocks(page, "sh"):
        for words in commands(block.code):
            check_command(words)
    if name(page) in ELSEWHERE:
        return
    inline = INLINE.findall(prose(page))
    for text in inline:
        if re.match(r"paged-kv [a-z]", text) and "..." not in text:
            try:
                check_command(commands(text)[0])
            except click.NoSuchOption:
                raise
            except click.UsageError:
                pass  # a page may name an option without its value, or a value by a letter
    known = options_of_the_commands() | FOREIGN
    assert [option for text in inline for option in OPTION.findall(text) if option not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_metaphors(page: Path) -> None:
    assert METAPHORS.findall(re.sub(r"\]\([^)]*\)", "]", prose(page))) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page):
    assert sorted(target for target in links(page) if not target.exists()) == []
    missing = []
    for target, _, anchor in (target.partition("#") for target in LINK.findall(prose(page)) if "://" not in target):
        file = (page.parent / target).resolve() if target else page
        if anchor and file.suffix == ".md" and anchor not in headings(file):
            missing.append(f"{target}#{anchor}")
    assert missing == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def test_every_page_of_the_documentation_is_two_hops_from_the_readme():
    near = links(ROOT / "README.md")
    near |= {target for page in near if page.suffix == ".md" for target in links(page)}
    pages = {*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "notes" / "new-max.md"}
    assert pages <= near


def test_every_module_has_a_task():
    """The table of docs/architecture.md says where to change what."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## I want to change") :]
    linked = {(ROOT / "docs" / target).resolve().relative_to(ROOT) for target in LINK.findall(table)}
    modules = [
        *("mojo_ops/cache", "mojo_ops/transfer", "mojo_ops/attention/cpu", "mojo_ops/attention/gpu", "mojo_ops/linear"),
        *("graphs/models", "python/paged_kv/arrays", "python/paged_kv/calls", "python/paged_kv/runtime"),
        *("python/paged_kv/engine", "benchmarks"),
    ]
    assert [module for module in modules if not any(path.is_relative_to(module) for path in linked)] == []
    assert len(re.findall(r"^\| (?!\.\.\.|-)", table, re.MULTILINE)) >= 12
