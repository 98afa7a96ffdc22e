"""Structured output: a request's text follows a JSON schema, a regular expression or a grammar, its structure.

llguidance compiles them and says before each token which ones may come next; it is imported
with the first request that asks. It never raises for what users write: a matcher that fails stays in error, and ends
its sample alone. Sizes are bounded here, the work of a step by the library's own limits. What may take long to compile
is compiled in a process of its own first, which may fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from paged_kv.arguments import printable, shown
from paged_kv.errors import ContractError, ContractTypeError, ToolchainError
from paged_kv.gbnf import is_gbnf, lark_of
from paged_kv.json_schemas import parts
from paged_kv.structure_trials import SECONDS, library, limits, problem_of_matcher, refusal, with_guidance

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
        schema = self.schema
        if not isinstance(schema, Mapping | bool | str):
            raise ContractTypeError(
                f"structured_output: a JSON schema: expected an object, a truth value or JSON, got {shown(schema)}"
            )
        try:
            if isinstance(schema, str):
                _check_text(self.KIND, schema)
            parsed = json.loads(schema) if isinstance(schema, str) else schema
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
                f"structured_output: a JSON schema: expected an object or a truth value, got {shown(parsed)}"
            )
        _check_text(self.KIND, text)
        patterned = [node.get("patternProperties") for _, node in parts("#", json.loads(text))]
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


Structure: TypeAlias = JsonSchema | Regex | Grammar


class StructureCompiler:
    """Compiles structures for one vocabulary.

    Args:
        tokenizer: The tokenizer of the model.
        seconds: The CPU time, in seconds, that a structure may take to be compiled, where it is tried out.

    Raises:
        ToolchainError: llguidance is not installed or older than 1.9, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, seconds: int = SECONDS) -> None:
        llguidance = library()
        self._library, self._seconds = llguidance, seconds
        self._limits = limits()
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
        if problem := problem_of(structure, self._seconds):
            raise ContractError(f"structured_output: {problem}")
        matcher = self._matcher(_grammar(structure, self._special(structure)), self._tokens)
        problem = problem_of_matcher(matcher)
        if not problem:
            compiled = CompiledStructure(self, structure, matcher)
            try:
                compiled.begin().allowed()
            except ContractError as error:
                problem = str(error)
            else:
                return compiled
        raise ContractError(f"structured_output: the {structure.KIND} cannot be compiled: {problem}")

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
        if problem := problem_of_matcher(self._matcher):
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
            raise ContractError(f"token {token} breaks its structure: {problem_of_matcher(self._matcher)}")
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


def problem_of(structure: Structure, seconds: int = SECONDS) -> str:
    """The reason why a structure cannot be compiled or followed, whatever the vocabulary; "" where it can. It is found
    within bounds and remembered.

    Raises:
        ContractError: no process can be started to try it.
        ToolchainError: as `StructureCompiler`.
    """
    kind, text = _grammar(structure)
    problem = refusal(kind, str(structure.schema) if isinstance(structure, JsonSchema) else text, seconds)
    return f"the {structure.KIND} cannot be compiled{problem}" if problem else ""


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


def _check_text(kind: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ContractTypeError(f"structured_output: the {kind}: expected a string, got {shown(text)}")
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
                raise ContractError(f"structured_output: a key of the JSON schema: expected a string, got {shown(key)}")
