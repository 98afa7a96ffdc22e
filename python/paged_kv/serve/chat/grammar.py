"""Build the grammar of a message, rule by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.structure_trials import with_guidance
from paged_kv.structured_output import Grammar, JsonSchema, Regex, Structure

TEXT = "TEXT"
"""Any text, of ordinary tokens."""
SPACE = "SPACE?"
"""White space between a thought and what comes after it."""


class Rules:
    """The rules of one grammar, in llguidance's kind of Lark."""

    def __init__(self) -> None:
        self._lines = [r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{1,4}/"]
        self._marks: list[str] = []
        self._count = 0
        self._named: dict[str, str] = {}

    def rule(self, body: str, options: str = "") -> str:
        """A rule; its name."""
        self._count += 1
        self._lines.append(f"rule_{self._count}{options}: {body}")
        return f"rule_{self._count}"

    def once(self, key: str, body: Callable[[], str]) -> str:
        """The one rule of a key, whose body may name itself; its name."""
        if key not in self._named:
            self._count += 1
            name = self._named[key] = f"rule_{self._count}"
            self._lines.append(f"{name}: {body()}")
        return self._named[key]

    def numbered(self, body: Callable[[str], str]) -> str:
        """A rule with a number (llguidance's parametric grammars), whose body may name it; its name."""
        self._count += 1
        name = f"rule_{self._count}"
        self._lines.append(f"{name}::_: {body(name)}")
        return name

    def pattern(self, pattern: str) -> str:
        """The one terminal of a regular expression; its name."""
        key = f"pattern {pattern}"
        if key not in self._named:
            self._named[key] = self.terminal(regex(pattern))
        return self._named[key]

    def terminal(self, body: str) -> str:
        """A terminal; its name."""
        self._count += 1
        self._lines.append(f"TERM_{self._count}: {body}")
        return f"TERM_{self._count}"

    def any(self, bodies: Iterable[str]) -> str:
        """A rule for one of some alternatives; its name.

        Raises:
            ContractError: there is none.
        """
        alternatives = list(bodies)
        if not alternatives:
            raise ContractError("a schema of parameters accepts no value")
        return self.rule(" | ".join(alternatives))

    def mark(self, text: str) -> str:
        """A text that is one token where the vocabulary has a special one; the name of its rule."""
        return f"mark_{self._mark(text)}"

    def until(self, text: str) -> str:
        """Any text that ends with the first such mark; the name of its rule."""
        return f"until_{self._mark(text)}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema; the name of its rule."""
        return self.rule(f"%json {with_guidance(json.dumps(schema))}")

    def structure(self, structure: Structure) -> str:
        """A text of a structure; the name of its rule."""
        match structure:
            case JsonSchema():
                return self.rule(f"%json {with_guidance(str(structure.schema))}")
            case Regex():
                return self.rule(regex(structure.pattern))
            case Grammar():
                return self.rule(f"%lark {{\n{structure.lark}\n}}")

    def grammar(self, start: str) -> Grammar:
        """The whole grammar.

        Raises:
            ContractError: it is too long.
        """
        return Grammar("\n".join([f"start: {start}", *self._lines, ""]), tuple(self._marks))

    def _mark(self, text: str) -> int:
        if text not in self._marks:
            self._marks.append(text)
        return self._marks.index(text)


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text)


def regex(pattern: str) -> str:
    """A regular expression in a grammar."""
    escaped, after_backslash = [], False
    for character in pattern:
        escaped.append("\\/" if character == "/" and not after_backslash else character)
        after_backslash = character == "\\" and not after_backslash
    return f"/{''.join(escaped)}/".replace("\n", "\\n")
