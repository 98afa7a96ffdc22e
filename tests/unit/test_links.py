"""Every link of a page leads to a file of the checkout; pages and tasks are found from the README in two hops."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "mojo_ops").rglob("README.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> set[Path]:
    """What a page links to in the checkout."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = {target.partition("#")[0] for target in LINK.findall(text) if "://" not in target}
    return {(page.parent / target).resolve() for target in targets if target}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    assert sorted(target for target in links(page) if not target.exists()) == []


def test_every_page_of_the_documentation_is_two_hops_from_the_readme():
    near = links(ROOT / "README.md")
    near |= {target for page in near if page.suffix == ".md" for target in links(page)}
    pages = {*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "notes" / "new-max.md"}
    assert pages <= near


def test_every_room_has_a_task():
    """The table of docs/architecture.md says where to change what."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## I want to change") :]
    linked = {(ROOT / "docs" / target).resolve().relative_to(ROOT) for target in LINK.findall(table)}
    rooms = [
        *("mojo_ops/cache", "mojo_ops/transfer", "mojo_ops/attention/cpu", "mojo_ops/attention/gpu", "mojo_ops/linear"),
        *("graphs/models", "python/paged_kv/arrays", "python/paged_kv/calls", "python/paged_kv/runtime"),
        *("python/paged_kv/engine", "benchmarks"),
    ]
    assert [room for room in rooms if not any(path.is_relative_to(room) for path in linked)] == []
    assert len(re.findall(r"^\| (?!\.\.\.|-)", table, re.MULTILINE)) >= 12
