"""Hooks of `mkdocs build`: the top folder's pages, links into the repository, and modules for mkdocstrings."""

from __future__ import annotations

import posixpath
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
from packages import lay_out  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the top folder, and what the site calls them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^<!-- code: (\S+) -->$", re.MULTILINE)
"""The place where a page wants a file's code; the repository's own view shows nothing there."""
PICTURES = (".png", ".svg")

log = get_plugin_logger("paged-kv")
_installed = tempfile.TemporaryDirectory()


@event_priority(100)  # before mkdocstrings reads it
def on_config(config: Any) -> Any:
    """Gives mkdocstrings the modules as they are installed."""
    lay_out(Path(_installed.name))
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_installed.name]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the top folder, and the pictures outside docs/ that pages show."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for picture in (ROOT / "benchmarks" / "results").rglob("*.png"):
        shown = f"pictures/{picture.name}"
        files.append(File.generated(config, shown, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Links are written for the repository; here they lead to the site's pages, or are words where it has none."""
    names = {on_site: source for source, on_site in PAGES.items()}
    source = names.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(match: re.Match[str]) -> str:
        shows, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match.group()
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / found).exists():
            log.warning(f"{source}: no file {found}, which is linked as {text!r}")
        on_site = PAGES.get(found, found.removeprefix("docs/"))
        if found.endswith(PICTURES):
            on_site = f"pictures/{posixpath.basename(found)}"
        if files.get_file_from_path(on_site) is None:
            return text
        relative = posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or ".")
        return f"{shows}[{text}]({relative}{'#' + anchor if anchor else ''})"

    def code(match: re.Match[str]) -> str:
        file = ROOT / match[1]
        return f"```{file.suffix.replace('.py', '.python')[1:]}\n{file.read_text()}```"

    markdown = CODE.sub(code, markdown)
    # Not inside blocks of code.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))
