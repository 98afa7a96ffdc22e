"""Grammars in GBNF, llama.cpp's notation, written as Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paged_kv.arguments import printable
from paged_kv.errors import ContractError

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<rule>[A-Za-z0-9_-]+)\s*::=|(?P<name>[A-Za-z0-9_-]+)|(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<any>\.)|(?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<open>\()|(?P<close>\))
    |(?P<or>\|)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = r"/[\x{0}-\x{10FFFF}]/"


@dataclass
class _Rule:
    """A rule as it is read: pieces of Lark, and names of other rules."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """Each with True where it is the name of a rule."""
    needs_part: bool = True
    """True if an alternative has begun, and is empty so far."""
    depth: int = 0

    def add(self, piece: str, *, is_name: bool = False) -> None:
        self.pieces.append((piece, is_name))
        self.needs_part = False

    def next(self, piece: str, *, begins: bool) -> None:
        """Add a parenthesis or a bar; an alternative that it ends may be empty."""
        if self.needs_part and piece != "(":
            self.add('""')
        self.pieces.append((piece, False))
        self.needs_part = begins

    @property
    def names(self) -> set[str]:
        return {piece for piece, is_name in self.pieces if is_name}


def is_gbnf(text: str) -> bool:
    """Return whether a text has rules as GBNF writes them, `name ::= ...`."""
    return _RULE.search(text) is not None


def lark_of(text: str) -> str:
    """A grammar in GBNF as one in llguidance's kind of Lark. Rules that are regular become its terminals.

    Raises:
        ContractError: it is none, has no rule `root`, or names a rule that it has not.
    """
    rules = _read(text)
    names = {name: rule.names for name, rule in rules.items()}
    for name, named in names.items():
        if unknown := {each for each in named if each not in rules}:
            raise _error(f"rule {printable(repr(name))} names {printable(repr(min(unknown)))}, which is no rule")
    if "root" not in rules:
        raise _error("it has no rule 'root'")
    terminals = _regular(names) - {"root"}
    written = {name: f"{'T' if name in terminals else 'r'}{at}" for at, name in enumerate(rules)} | {"root": "start"}
    return "".join(f"{written[name]}: {_written(rule, written)}\n" for name, rule in rules.items())


def _regular(names: Mapping[str, set[str]]) -> set[str]:
    """The rules that name no other ones but such, so that none leads back to itself; `names` are those of each."""
    users: dict[str, list[str]] = {}
    for name, named in names.items():
        for each in named:
            users.setdefault(each, []).append(name)
    missing = {name: len(named) for name, named in names.items()}
    regular, ready = set[str](), [name for name, count in missing.items() if not count]
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users.get(name, ()):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return regular


def _read(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule, at = None, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        kind = match and match.lastgroup
        if match is None or (rule is None and kind not in ("space", "rule")):
            line = text.count("\n", 0, at) + 1
            raise _error(f"line {line}: cannot read {printable(repr(text[at : at + 20]))}")
        at = match.end()
        if kind == "rule":
            _end(rule)
            rule = rules[match["rule"]] = _Rule()
        elif rule is not None and kind != "space":
            _add(rule, str(kind), match[0])
    _end(rule)
    return rules


def _add(rule: _Rule, kind: str, token: str) -> None:
    if kind == "name":
        rule.add(token, is_name=True)
    elif kind == "text":
        rule.add(json.dumps("".join(_characters(token[1:-1]))))
    elif kind == "set":
        rule.add(_set(token))
    elif kind == "any":
        rule.add(_ANY)
    elif kind == "times":
        if rule.needs_part:
            raise _error(f"nothing is before {token!r}")
        rule.add("".join(token.split()))
    else:
        rule.depth += {"open": 1, "close": -1, "or": 0}[kind]
        if rule.depth < 0:
            raise _error("a parenthesis is closed that was not opened")
        rule.next(token, begins=kind != "close")


def _end(rule: _Rule | None) -> None:
    if rule is None:
        return
    if rule.depth:
        raise _error("a parenthesis is not closed")
    if rule.needs_part:
        rule.add('""')


def _written(rule: _Rule, written: Mapping[str, str]) -> str:
    """The text of a rule, whose pieces are parted by spaces, but for a number of times behind what it counts."""
    text = ""
    for piece, is_name in rule.pieces:
        text += ("" if piece[0] in "*+?{" else " ") + (written[piece] if is_name else piece)
    return text.lstrip()


def _characters(text: str) -> list[str]:
    characters = []
    for *codes, escaped, plain in _CHARACTER.findall(text):
        code = next((int(each, 16) for each in codes if each), None)
        if code is None:
            characters.append(_ESCAPED.get(escaped, escaped) or plain)
        elif code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _error(f"U+{code:04X} is no character")
        else:
            characters.append(chr(code))
    return characters


def _set(token: str) -> str:
    """A set of characters as a regular expression, each by its number."""
    inside = token[1:-1]
    is_negated = inside.startswith("^")
    items = [match[0] for match in _CHARACTER.finditer(inside[is_negated:])]
    written, at = "", 0
    while at < len(items):
        (first,) = _characters(items[at])
        is_range = at + 2 < len(items) and items[at + 1] == "-"
        (last,) = _characters(items[at + 2]) if is_range else (first,)
        if last < first:
            raise _error(f"{token!r} has a range that ends before it begins")
        written += f"\\x{{{ord(first):X}}}" + (f"-\\x{{{ord(last):X}}}" if is_range else "")
        at += 3 if is_range else 1
    if not written:
        raise _error(f"{token!r} is an empty set of characters")
    return f"/[{'^' if is_negated else ''}{written}]/"


def _error(problem: str) -> ContractError:
    return ContractError(
        f"structured_output: the grammar is no GBNF: {printable(problem)}; in Lark a rule is 'start: ...'"
    )
