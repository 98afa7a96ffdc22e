"""The pages of the documentation and the blocks of code that they show.

A block that cannot run where the tests do has `<!-- not run: REASON -->` on the line before it, which no reader sees.
A block that installs is not run either: `.ci/run` installs what the README says, in a clean checkout.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("mojo_ops", "python/paged_kv", "benchmarks")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(page for folder in _FOLDERS for page in (ROOT / folder).rglob("README.md")),
    ]
)
_BLOCK = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: its page, its language as the page names it, and why no test runs it, if none does."""

    page: str
    language: str
    code: str
    reason: str | None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of one language, in order."""
    found = _BLOCK.findall(page.read_text())
    return [Block(name(page), kind, code, reason or None) for reason, kind, code in found if kind == language]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", page.read_text())


def commands(code: str) -> list[list[str]]:
    """The commands of a block of shell, each as its words: a line's end, pipes, `&&` and `;` divide them."""
    found: list[list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        found.append([])
        for word in lexer:
            if set(word) <= set("|&;"):
                found.append([])
            else:
                found[-1].append(word)
    return [words for words in found if words]
