"""Grammars of texts, made grammars of the same texts inside JSON's quotes.

In JSON a quote, a backslash and a control character are written by escapes. A terminal of several characters would hold
the beginning of an escape to be its own, so expressions become rules of single characters here. They are read by
Python's parser; a grammar with what it does not know, or with what acts on whole terminals, is not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

_parser: Any = import_module("re._parser")
_kinds: Any = import_module("re._constants")
_ESCAPES = {character: json.dumps(character) for character in '"\\\n\r\t\b\f'}
_PLAIN = r'[^"\\\x00-\x1F]'
"""A character that JSON writes as it is."""
_TOKEN = re.compile(
    r'(?P<comment>//[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)'
    r"|%import\s+common\.(?P<common>\w+)[ \t]*(?=\n|$)|(?P<terminal>\b_?[A-Z][A-Z0-9_]*\b)"
    r"|(?P<odd>[%<~&@\[]|\.\.)|(?P<other>\w+|.)",
    re.DOTALL,
)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
}
"""Terminals that Lark brings."""
_CATEGORIES = {
    _kinds.CATEGORY_DIGIT: r"\d",
    _kinds.CATEGORY_NOT_DIGIT: r"\D",
    _kinds.CATEGORY_SPACE: r"\s",
    _kinds.CATEGORY_NOT_SPACE: r"\S",
    _kinds.CATEGORY_WORD: r"\w",
    _kinds.CATEGORY_NOT_WORD: r"\W",
}


class _UnknownError(Exception):
    """A part of a grammar is not written here."""


def in_json(lark: str) -> str | None:
    """A grammar of the insides of JSON strings whose values a grammar has; None where it is not written here.

    Args:
        lark: A grammar in Lark, which begins with its rule `start`.
    """
    try:
        return "".join(_token(token) for token in _TOKEN.finditer(lark))
    except (_UnknownError, ValueError, re.error, RecursionError, OverflowError):
        return None


def _token(token: re.Match[str]) -> str:
    text = token[0]
    match token.lastgroup:
        case "comment":
            return ""
        case "string":
            return _string(text)
        case "regex":
            body, _, flags = text[1:].rpartition("/")
            return _regex(body, flags)
        case "common" if token["common"] in _COMMON:
            return f"{_rule(token['common'])}: {_regex(_COMMON[token['common']], '')}"
        case "terminal":
            return _rule(text)
        case "other":
            return text
    raise _UnknownError


def _rule(terminal: str) -> str:
    """The rule that a terminal becomes."""
    return f"terminal_{terminal.lower()}"


def _string(text: str) -> str:
    flag = "i" if text.endswith("i") else ""
    inner = json.dumps(json.loads(text.removesuffix("i")), ensure_ascii=False)[1:-1]
    if flag and "\\" in inner:
        raise _UnknownError  # escapes are in lower case
    return json.dumps(inner, ensure_ascii=False) + flag


def _regex(body: str, flags: str) -> str:
    """The rule of an expression."""
    if not set(flags) <= set("is"):
        raise _UnknownError
    return _sequence(_parser.parse(body.replace("\\/", "/")), flags)


def _sequence(parts: Iterable[tuple[Any, Any]], flags: str) -> str:
    written = [_part(kind, value, flags) for kind, value in parts]
    return f"({' '.join(written)})" if written else '""'


def _part(kind: Any, value: Any, flags: str) -> str:
    if kind is _kinds.LITERAL:
        return _one_of(_character(value), flags)
    if kind is _kinds.NOT_LITERAL:
        return _one_of(f"^{_character(value)}", flags)
    if kind is _kinds.ANY:
        return _one_of(r"\s\S" if "s" in flags else r"^\n", flags)
    if kind is _kinds.IN:
        return _one_of("".join(_member(*each) for each in value), flags)
    if kind is _kinds.BRANCH:
        return f"({' | '.join(_sequence(each, flags) for each in value[1])})"
    if kind is _kinds.SUBPATTERN and not value[1] and not value[2]:
        return _sequence(value[3], flags)
    if kind in (_kinds.MAX_REPEAT, _kinds.MIN_REPEAT):
        least, most, inner = value
        short = {(0, _kinds.MAXREPEAT): "*", (1, _kinds.MAXREPEAT): "+", (0, 1): "?"}
        ends = short.get((least, most)) or f"{{{least},{'' if most is _kinds.MAXREPEAT else most}}}"
        return f"{_sequence(inner, flags)}{ends}"
    raise _UnknownError


def _member(kind: Any, value: Any) -> str:
    """A member of a class of characters."""
    if kind is _kinds.NEGATE:
        return "^"
    if kind is _kinds.LITERAL:
        return _character(value)
    if kind is _kinds.RANGE:
        return f"{_character(value[0])}-{_character(value[1])}"
    if kind is _kinds.CATEGORY and value in _CATEGORIES:
        return _CATEGORIES[value]
    raise _UnknownError


def _character(code: int) -> str:
    """A character in a class, of Python's expressions and of Rust's."""
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _one_of(members: str, flags: str) -> str:
    """One of some characters, as it is or by its escape."""
    of_class = re.compile(f"[{members}]", re.IGNORECASE if "i" in flags else 0)
    written = [json.dumps(escape[1:-1]) for character, escape in _ESCAPES.items() if of_class.fullmatch(character)]
    if members not in map(_character, map(ord, _ESCAPES)):
        plain = f"[[{members}]&&{_PLAIN}]"
        written.append(f"/(?i:{plain})/" if "i" in flags else f"/{plain}/")
    return f"({' | '.join(written)})" if len(written) > 1 else written[0]
