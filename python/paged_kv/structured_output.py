"""Structured output: a request's text follows a JSON schema, a regular expression or a grammar, its structure.

llguidance compiles them and says before each token which ones may come next; it is imported
with the first request that asks. It never raises for what users write: a matcher that fails stays in error, and ends
its sample alone. Sizes are bounded here, the work of a step by the library's own limits. What may take long to compile
is compiled in a process of its own first, which may fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import printable, shown
from paged_kv.errors import ContractError, ContractTypeError, ToolchainError
from paged_kv.gbnf import is_gbnf, lark_of

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLMatcher, LLTokenizer

Tokens: TypeAlias = npt.NDArray[np.int64]

MOST_CHARACTERS = 1 << 18
"""The most characters of a structure: llguidance reads 10 MB, then refuses them, with hundreds of megabytes."""
MOST_DEPTH = 64
"""The deepest nesting of objects and arrays within a schema."""
MOST_PATTERNS = 32
"""The most `patternProperties` of a schema: llguidance proves each pair of them disjoint, 4,000 take minutes."""
SECONDS_TO_COMPILE = 4
"""CPU seconds at most, as the engine has it."""
_SURE_CHARACTERS = 2048
_UNSURE = ('"allOf"', '"multipleOf"', '"pattern')
"""A short schema without these compiles in milliseconds; with one, 200 characters may take minutes."""
_MOST_STATES = 50_000
"""States of a lexer at most, 1 to 2 KB each."""
_SECONDS_TO_LOCATE = 0.5
"""At most, to find the part of a schema that cannot be compiled."""
_OLDEST = (1, 9)
"""The version of llguidance from which `_WHITESPACE` holds."""
_WHITESPACE = "( |\\n[ \\t]{0,20})?"
_END = "<|paged-kv: the end of a structure|>"
"""A token that is added to the vocabulary that llguidance sees: where it may come, the structure may end."""


@dataclass(frozen=True)
class JsonSchema:
    """Texts that are JSON and valid by a schema (JSON Schema 2020-12 and earlier, as far as llguidance has it).

    Properties come in the order of the schema. What cannot be kept (`uniqueItems`, `not`, alternatives of `oneOf` that
    may overlap) is refused when the request is added, not ignored.

    Args:
        schema: The schema, or its JSON.

    Raises:
        ContractTypeError, ContractError: it is no schema, is too large or too deep, or has NaN, infinity, a lone
            surrogate or a key that is no string.
    """

    KIND: ClassVar[str] = "JSON schema"
    schema: Mapping[str, Any] | bool | str
    """Its JSON, once it was checked."""

    def __post_init__(self) -> None:
        given = self.schema
        if not isinstance(given, Mapping | bool | str):
            raise ContractTypeError(
                f"structured_output: a JSON schema must be an object, a truth value or JSON, not {shown(given)}"
            )
        try:
            if isinstance(given, str):
                _check_text(self.KIND, given)
            parsed = json.loads(given) if isinstance(given, str) else given
            _check_tree(parsed)
            text = json.dumps(parsed, allow_nan=False, ensure_ascii=False)
        except RecursionError:
            raise ContractError(f"structured_output: the JSON schema is more than {MOST_DEPTH} deep") from None
        except ContractError:
            raise
        except (TypeError, ValueError) as error:
            raise ContractError(f"structured_output: the JSON schema is no JSON: {printable(error)}") from None
        if not isinstance(parsed, Mapping | bool):
            raise ContractTypeError(
                f"structured_output: a JSON schema must be an object or a truth value, not {shown(parsed)}"
            )
        _check_text(self.KIND, text)
        patterned = [node.get("patternProperties") for _, node in _parts("#", json.loads(text))]
        patterns = sum(len(each) for each in patterned if isinstance(each, dict))
        if patterns > MOST_PATTERNS:
            raise ContractError(
                f"structured_output: the JSON schema has {patterns} patternProperties, at most {MOST_PATTERNS} may be"
            )
        object.__setattr__(self, "schema", text)


@dataclass(frozen=True)
class Regex:
    """Texts that a regular expression matches as a whole, in the syntax of Rust's `regex`: no look-around.

    Raises:
        ContractTypeError, ContractError: it is no string, is too long, or has a lone surrogate.
    """

    KIND: ClassVar[str] = "regular expression"
    pattern: str

    def __post_init__(self) -> None:
        _check_text(self.KIND, self.pattern)


@dataclass(frozen=True)
class Grammar:
    """Texts of a context-free grammar in llguidance's kind of Lark, which begins with its rule `start`.

    Args:
        lark: The grammar; one in GBNF, llama.cpp's notation (`root ::= ...`), becomes Lark.
        marks: Texts that are one token each where the vocabulary has a special token of that text. The grammar may use
            the rules `mark_0` for the first of them and `until_0` for any text up to it and with it, and so on.

    Raises:
        ContractTypeError, ContractError: it is no string, is too long, or has a lone surrogate.
    """

    KIND: ClassVar[str] = "grammar"
    lark: str
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_text(self.KIND, self.lark)
        if is_gbnf(self.lark):
            object.__setattr__(self, "lark", lark_of(self.lark))


_TRIAL = """
import json, os, resource, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
kind, text, states, seconds = json.loads(sys.stdin.read())
for limit, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, 4 << 30), (resource.RLIMIT_STACK, 4 << 20)):
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(10)
grammar = getattr(LLMatcher, "grammar_from_" + kind)(text)
limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).compute_bitmask()
"""
"""Compiles a structure in a process of its own: some overflow llguidance's stack, or take minutes."""

Structure: TypeAlias = JsonSchema | Regex | Grammar


class StructureCompiler:
    """Compiles structures for one vocabulary.

    Args:
        tokenizer: The tokenizer of the model.
        seconds: The CPU time, in seconds, that a structure may take to be compiled, where it is tried out.

    Raises:
        ToolchainError: llguidance is not installed or older than 1.9, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, seconds: int = SECONDS_TO_COMPILE) -> None:
        try:
            installed = version("llguidance")
            import llguidance
        except ImportError:  # which a missing distribution is, too
            installed = ""
        if not installed or tuple(map(int, installed.split(".")[:2])) < _OLDEST:
            found = f"{installed} is" if installed else "none is"
            raise ToolchainError(f"structured_output: it needs llguidance 1.9 or later, and {found} installed")
        self._library, self._seconds = llguidance, seconds
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
        ended = type(tokenizer).from_str(tokenizer.to_str())
        ended.add_special_tokens([_END])
        end = ended.token_to_id(_END)
        self._token_of = ended.token_to_id
        if end is None:
            raise ToolchainError("structured_output: the tokenizer takes no further token")
        self.end = end
        """The token that says where a structure may end; the model has no such token."""
        try:
            self._tokens = llguidance.LLTokenizer(ended.to_str(), eos_token=self.end)
        except ValueError as error:
            raise ToolchainError(
                f"structured_output: llguidance cannot read the tokenizer: {printable(error)}"
            ) from None

    @cached_property
    def _bytes(self) -> LLTokenizer:
        return self._library.LLTokenizer("byte")

    def is_silent(self, token: int) -> bool:
        """Return whether a token has no text: a special one."""
        return token < self._tokens.vocab_size and self._tokens.is_special_token(token)

    def compile(self, structure: Structure) -> CompiledStructure:
        """Compile a structure, which samples can then begin.

        Raises:
            ContractError: it cannot be compiled, or no text has it; the message says where, for a schema as a pointer.
        """
        if refusal := _try_out(*_grammar(structure), self._seconds):
            raise ContractError(refusal)
        matcher = self._matcher(_grammar(structure, self._special(structure)), self._tokens)
        problem = _problem(matcher)
        if not problem:
            compiled = CompiledStructure(self, structure, matcher)
            try:
                compiled.begin().allowed()
            except ContractError as error:
                problem = str(error)
            else:
                return compiled
        raise ContractError(
            f"structured_output: the {structure.KIND} cannot be compiled{self._place(structure, problem)}: {problem}"
        )

    def accepts(self, structure: Structure, text: str) -> bool:
        """Return whether a whole text has a structure, whatever tokens it came in."""
        matcher = self._matcher(_grammar(structure), self._bytes)
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting() and not matcher.is_error()

    def _special(self, structure: Structure) -> dict[str, int]:
        """The special tokens of the vocabulary that a structure's marks are."""
        marks = structure.marks if isinstance(structure, Grammar) else ()
        tokens = {mark: self._token_of(mark) for mark in marks}
        return {mark: token for mark, token in tokens.items() if token is not None and self.is_silent(token)}

    def _matcher(self, grammar: tuple[str, str], tokens: LLTokenizer) -> LLMatcher:
        kind, text = grammar
        compiled = getattr(self._library.LLMatcher, f"grammar_from_{kind}")(text)
        return self._library.LLMatcher(tokens, compiled, log_level=0, limits=self._limits)

    def _place(self, structure: Structure, problem: str) -> str:
        """In words, the smallest part of a schema that has the same problem alone, as far as it is found in time."""
        if not isinstance(structure, JsonSchema):
            return ""
        schema, place = json.loads(str(structure.schema)), "#"
        until, found = time.monotonic() + _SECONDS_TO_LOCATE, True
        # References of a part lead to the whole schema, which lies beside it.
        whole = _moved(schema, "#/$defs/whole")
        while found:
            found = False
            for pointer, _ in _parts(place, _at(schema, place), deep=False):
                if time.monotonic() > until:
                    break
                alone = {"$defs": {"whole": whole}, "$ref": "#/$defs/whole" + pointer[1:]}
                if _problem(self._matcher(("json_schema", json.dumps(alone)), self._bytes)) == problem:
                    place, found = pointer, True
                    break
        return f" at {printable(place)}"


class CompiledStructure:
    """A structure of one vocabulary; any thread may begin samples of it."""

    def __init__(self, compiler: StructureCompiler, structure: Structure, matcher: LLMatcher) -> None:
        self.compiler, self.structure, self._matcher = compiler, structure, matcher

    def begin(self, end_tokens: frozenset[int] = frozenset()) -> StructureState:
        """The state before a sample's first token; `end_tokens` that have no text may come where the structure ends."""
        silent = np.array(sorted(filter(self.compiler.is_silent, end_tokens)), np.int64)
        return StructureState(self, self._matcher.deep_copy(), silent)


class StructureState:
    """The progress of one sample's text in its structure."""

    def __init__(self, compiled: CompiledStructure, matcher: LLMatcher, ends: Tokens) -> None:
        self._compiled, self._matcher, self._ends = compiled, matcher, ends
        self._text = ""
        self._next: Tokens | None = None

    @property
    def ends(self) -> Tokens:
        """The tokens that may come where the structure may end."""
        return self._ends

    def allowed(self) -> Tokens:
        """The tokens that may come next, in ascending order.

        Raises:
            ContractError: there are none, or a limit of the library was reached.
        """
        if self._next is None:
            self._next = self._following()
        if problem := _problem(self._matcher):
            raise ContractError(f"its structure cannot be followed: {problem}")
        if not self._next.size:
            raise ContractError("no token of the vocabulary continues its structure")
        return self._next

    def push(self, token: int) -> bool:
        """Take the next token, and return whether the structure ends with it, since nothing can follow.

        Raises:
            ContractError: the structure does not allow it, or a limit of the library was reached.
        """
        if token in self._ends:
            return True
        if not self._matcher.consume_token(token):
            raise ContractError(f"token {token} breaks its structure: {_problem(self._matcher)}")
        self._next = None if self._matcher.is_stopped() else self._following()
        return self._matcher.is_accepting() and (self._next is None or self._next.size == self._ends.size)

    def _following(self) -> Tokens:
        """The tokens that may come next; none where the matcher has failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").view(bool)
        end = self._compiled.compiler.end
        if allowed[end]:
            allowed[end] = False
            allowed[self._ends] = True
        return np.flatnonzero(allowed)

    def add_text(self, text: str) -> None:
        """Takes what the sample shows of it."""
        self._text += text

    def is_whole(self) -> bool:
        """Return whether the text that was shown has the structure, from beginning to end."""
        return self._compiled.compiler.accepts(self._compiled.structure, self._text)


@lru_cache(64)
def _try_out(kind: str, text: str, seconds: int) -> str:
    """The reason not to compile a structure, in bounded time, memory and stack, or ""; refusals are remembered too."""
    if kind == "json_schema" and len(text) <= _SURE_CHARACTERS and not any(name in text for name in _UNSURE):
        return ""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = json.dumps([kind, text, _MOST_STATES, seconds]).encode()
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _TRIAL], input=given, env=environment, capture_output=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ContractError(
            f"structured_output: it was not tried out within {error.timeout} s: this machine is busy"
        ) from None
    except OSError as error:
        raise ContractError(f"structured_output: it cannot be tried out: {printable(error)}") from None
    if not trial.returncode:
        return ""
    return (
        f"structured_output: it cannot be compiled within {seconds} s, 4 GiB of memory and 4 MiB of stack"
        f" (a process that tried ended with {trial.returncode})"
    )


def _grammar(structure: Structure, special: Mapping[str, int] = MappingProxyType({})) -> tuple[str, str]:
    """A structure's kind in llguidance's words, and its text; marks that are no special tokens are texts."""
    match structure:
        case JsonSchema():
            return "json_schema", with_guidance(str(structure.schema))
        case Regex():
            return "regex", structure.pattern
        case Grammar():
            return "lark", "\n".join([structure.lark, *_mark_rules(structure.marks, special)])


def _mark_rules(marks: Sequence[str], special: Mapping[str, int]) -> Iterator[str]:
    for at, mark in enumerate(marks):
        if mark in special:
            yield f"mark_{at}: <[{special[mark]}]>"
            yield rf"until_{at}: /(.|\n)*/ mark_{at}"
        else:
            # A lazy lexeme ends with the first mark; without that, text would go on past it.
            yield f"mark_{at}[lazy]: {json.dumps(mark)}"
            yield rf"until_{at}[lazy]: /(.|\n)*/ {json.dumps(mark)}"


def with_guidance(schema: str) -> str:
    """A schema's JSON with what llguidance is told of it, in place of what it says itself: it could turn refusals off.

    Between tokens of JSON may be a space, or a line's end and its indentation: some models would go on for ever.
    """
    parsed = json.loads(schema)
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"anyOf": [False]}
    return json.dumps(parsed | {"x-guidance": {"whitespace_pattern": _WHITESPACE}}, ensure_ascii=False)


def _problem(matcher: LLMatcher) -> str:
    """The failure of a matcher, in one line; "" where it has not failed."""
    if matcher.is_error():
        problem = " ".join(matcher.get_error().split())
        return "no token continues it" if problem.startswith("NoExtension") else printable(problem)
    return "no text has this structure" if matcher.is_stopped() and not matcher.is_accepting() else ""


def _check_text(kind: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ContractTypeError(f"structured_output: the {kind} must be a string, not {shown(text)}")
    if len(text) > MOST_CHARACTERS:
        raise ContractError(
            f"structured_output: the {kind} has {len(text)} characters, at most {MOST_CHARACTERS} may be"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ContractError(
            f"structured_output: the {kind} is not valid text: it has {text[error.start]!a} alone"
        ) from None


def _check_tree(node: Any, depth: int = 0) -> None:
    """Refuses what is too deep, and keys that are no strings: JSON would make one key of 1 and "1"."""
    if depth > MOST_DEPTH:
        raise ContractError(f"structured_output: the JSON schema is more than {MOST_DEPTH} deep")
    if isinstance(node, Mapping | list | tuple):
        for each in node.values() if isinstance(node, Mapping) else node:
            _check_tree(each, depth + 1)
    if isinstance(node, Mapping):
        for key in node:
            if not isinstance(key, str):
                raise ContractError(f"structured_output: a key of the JSON schema must be a string, not {shown(key)}")


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")


def _parts(place: str, node: Any, *, deep: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in a schema with their JSON pointers: itself and all below it, or those right below it."""
    if not isinstance(node, dict):
        return
    if deep:
        yield place, node
    below: list[tuple[str, Any]] = []
    for name in _MAPS:
        if isinstance(node.get(name), dict):
            below += [(f"{place}/{name}/{_escaped(key)}", each) for key, each in node[name].items()]
    for name in _LISTS:
        if isinstance(node.get(name), list):
            below += [(f"{place}/{name}/{index}", each) for index, each in enumerate(node[name])]
    below += [(f"{place}/{name}", node[name]) for name in _SINGLE if isinstance(node.get(name), dict)]
    for pointer, each in below:
        if deep:
            yield from _parts(pointer, each)
        elif isinstance(each, dict):
            yield pointer, each


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _at(schema: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    return schema


def _moved(schema: Any, to: str) -> Any:
    """A schema for another place: its references to itself lead there."""
    moved = deepcopy(schema)
    for _, node in _parts("#", moved):
        if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
            node["$ref"] = to + node["$ref"][1:]
    return moved
