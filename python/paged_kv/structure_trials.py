"""Try structures out before they are used: whether llguidance compiles them, and whether it can follow their texts.

It never raises for what users write, but may overflow its stack, take minutes, or fail in the middle of a text. So
what is not surely small is tried in a process of its own with bounds, where texts by chance are followed too.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from paged_kv.arguments import printable
from paged_kv.errors import ContractError, ToolchainError
from paged_kv.json_schemas import SchemaProblem, by_itself, parts, relax, without

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS = 4
"""CPU seconds at most to try a structure out, as the engine has it."""
_SURE_CHARACTERS = 2048
_UNSURE = ('"allOf"', '"multipleOf"', '"pattern')
"""A short schema without these compiles in milliseconds; with one, 200 characters may take minutes."""
_MOST_STATES = 50_000
"""States of a lexer at most, 1 to 2 KB each."""
_MOST_ITEMS = 20_000
"""Items in a row of the parser at most: an optional property that may come next has four."""
_SECONDS_TO_RELAX = 1.0
"""At most, to find the parts of a schema that cannot be enforced."""
_STEPS, _WALKS = 256, 3
"""Bytes at most of a text by chance, and texts of a structure."""
_WIDE = 64
"""Properties or alternatives from which on a part of a schema is tried alone."""
_MOST_TRIED = 32
"""Parts of a schema at most that are tried alone."""
_OLDEST = (1, 9)
"""The version of llguidance from which `WHITESPACE` holds."""
WHITESPACE = "( |\\n[ \\t]{0,20})?"
"""The white space that may stand between two tokens of JSON."""
_MOST_PATTERN = 1024
"""Characters at most of a pattern that values are checked against."""
_MOST_VERDICTS = 1024
_MOST_TRIALS = 3
"""All schemas of a call may take so many times the seconds of one."""
_LIMITS = "not within {seconds} s, 4 GiB of memory and 4 MiB of stack (a process that tried ended with {status})"


@dataclass(frozen=True)
class Verdict:
    """The part of a schema that can be enforced."""

    schema: str
    """The schema, or one that accepts more."""
    problems: tuple[SchemaProblem, ...] = ()
    """The parts that were taken from it; none where all of it can be enforced."""


def library() -> Any:
    """The module llguidance.

    Raises:
        ToolchainError: it is not installed, or older than 1.9.
    """
    try:
        installed = version("llguidance")
        import llguidance
    except ImportError:  # which a missing distribution is, too
        installed = ""
    if not installed or tuple(map(int, installed.split(".")[:2])) < _OLDEST:
        state = f"{installed} is" if installed else "none is"
        raise ToolchainError(f"structured_output: it needs llguidance 1.9 or later, and {state} installed")
    return llguidance


def limits() -> LLParserLimits:
    """The bounds of llguidance's work."""
    bounds: LLParserLimits = library().LLParserLimits(
        max_lexer_states=_MOST_STATES, max_items_in_row=_MOST_ITEMS, verbose_errors=False
    )
    return bounds


def with_guidance(schema: str) -> str:
    """A schema's JSON with what llguidance is told of it, in place of what it says itself: it could turn refusals off.

    Between tokens of JSON may be a space, or a line's end and its indentation: some models would go on for ever. Any
    character may be written by its escape, but for strings with a `pattern` or a `format`.
    """
    parsed = json.loads(schema)
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"anyOf": [False]}
    guidance = {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    return json.dumps(parsed | {"x-guidance": guidance}, ensure_ascii=False)


def problem_of_matcher(matcher: LLMatcher) -> str:
    """The failure of a matcher, in one line; "" where it has not failed."""
    if matcher.is_error():
        problem = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        problem = problem.partition(" while processing json-schema:")[0]
        return "no token continues it" if problem.startswith("NoExtension") else printable(problem)
    return "no text has this structure" if matcher.is_stopped() and not matcher.is_accepting() else ""


def refusal(kind: str, text: str, seconds: int) -> str:
    """The reason not to use a structure with its place, found in bounded time, memory and stack, or "". Both are
    remembered.

    Args:
        kind: "json_schema", "regex" or "lark".
        text: The structure in llguidance's words.
        seconds: CPU seconds at most.

    Raises:
        ContractError: no process can be started to try it.
        ToolchainError: as `library`.
    """
    library()
    if kind != "json_schema":
        return _refusal(kind, text, seconds)
    verdict = examine([text], seconds)[0]
    return f" at {printable(verdict.problems[0].pointer)}: {verdict.problems[0].words}" if verdict.problems else ""


@lru_cache(64)
def _refusal(kind: str, text: str, seconds: int) -> str:
    answers, status = _try([[kind, text]], seconds)
    if not answers:
        return f": {_LIMITS.format(seconds=seconds, status=status)}"
    return f": {answers[0]}" if answers[0] else ""


_verdicts: dict[tuple[str, int], Verdict] = {}
_lock = threading.Lock()


def examine(schemas: Sequence[str], seconds: int = SECONDS) -> list[Verdict]:
    """Return what of each schema can be enforced, found in bounded time, memory and stack. Verdicts are remembered.

    Args:
        schemas: JSON of schemas, each of which `JsonSchema` has checked.
        seconds: CPU seconds at most for each, and a few times that for all.

    Raises:
        ContractError: no process can be started to try them.
        ToolchainError: as `library`.
    """
    library()
    with _lock:
        verdicts = {text: _verdicts[text, seconds] for text in schemas if (text, seconds) in _verdicts}
    new = dict.fromkeys(text for text in schemas if text not in verdicts)
    sure = [text for text in new if len(text) <= _SURE_CHARACTERS and not any(name in text for name in _UNSURE)]
    verdicts |= {text: _examined(text) for text in sure}
    verdicts |= _examine_in_process([text for text in new if text not in verdicts], seconds)
    with _lock:
        for text in new:
            while len(_verdicts) >= _MOST_VERDICTS:
                del _verdicts[next(iter(_verdicts))]
            _verdicts[text, seconds] = verdicts[text]
    return [verdicts[text] for text in schemas]


def _examine_in_process(schemas: Iterable[str], seconds: int) -> dict[str, Verdict]:
    """The verdicts of a process of its own. A schema that ends it is tried again without what is hard to compile."""
    verdicts: dict[str, Verdict] = {}
    left: list[tuple[str, str, tuple[SchemaProblem, ...]]] = [(text, text, ()) for text in schemas]
    until = time.monotonic() + _MOST_TRIALS * seconds
    while left:
        answers, status = _try([["json_schema", text] for _, text, _ in left], seconds)
        for (whole, _, ended), (schema, problems) in zip(left, answers, strict=False):
            parsed = tuple(SchemaProblem(*each) for each in problems)
            verdicts[whole] = Verdict(schema, (*ended, *parsed))
        left = left[len(answers) :]
        if not left:
            break
        whole, text, _ = left.pop(0)
        if time.monotonic() > until:
            verdicts |= {
                each: Verdict("{}", (SchemaProblem("#", "there was no time to try it"),)) for each, _, _ in left
            }
            left = []
        ended = (SchemaProblem("#", _LIMITS.format(seconds=seconds, status=status)),)
        simple = json.dumps(without(json.loads(text), _HARD), ensure_ascii=False)
        if simple == text or text != whole or time.monotonic() > until:
            verdicts[whole] = Verdict("{}", ended)
        else:
            left.append((whole, simple, ended))
    return verdicts


_HARD = (
    *("pattern", "patternProperties", "allOf", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)


def _try(questions: list[list[str]], seconds: int) -> tuple[list[Any], int]:
    """The answers of a process of its own, as many as it gave, and its exit status."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = "from paged_kv.structure_trials import answer; answer()"
    try:
        trial = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps([seconds, questions]).encode(),
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ContractError(
            f"structured_output: it was not tried out within {error.timeout} s: this machine is busy"
        ) from None
    except OSError as error:
        raise ContractError(f"structured_output: it cannot be tried out: {printable(error)}") from None
    return [json.loads(line) for line in (trial.stdout or b"").splitlines()], trial.returncode


def answer() -> None:
    """Answers the questions on stdin, each with a line on stdout, within bounds: for a process of its own."""
    import resource

    seconds, questions = json.loads(sys.stdin.read())
    for limit, most in ((resource.RLIMIT_AS, 4 << 30), (resource.RLIMIT_STACK, 4 << 20), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))
    os.nice(10)
    for kind, text in questions:
        most = min(int(sum(os.times()[:2])) + seconds, _MOST_TRIALS * seconds)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (most if hard < 0 else min(most, hard), hard))
        if kind == "json_schema":
            verdict = _examined(text)
            reply: Any = [verdict.schema, [list(each) for each in verdict.problems]]
        else:
            reply = _problem_of(kind, text, random.Random(0))
        print(json.dumps(reply), flush=True)


def _examined(text: str) -> Verdict:
    """The verdict on a schema, in this process."""
    schema = json.loads(text)
    relaxed, problems = relax(schema, _problem_of_schema, _SECONDS_TO_RELAX)
    if not problems:
        return Verdict(text)
    if relaxed == {} and not _problem_of_schema(simple := without(schema, _HARD)):
        relaxed = simple
    return Verdict(json.dumps(relaxed, ensure_ascii=False), tuple(problems))


def _problem_of_schema(schema: Any) -> str:
    """The reason why a schema cannot be enforced: parts that are wide or have patterns are tried alone too."""
    chance = random.Random(0)
    if problem := _problem_of("json_schema", with_guidance(json.dumps(schema)), chance):
        return problem
    tried = 0
    for pointer, node in parts("#", schema):
        if pointer == "#" or tried >= _MOST_TRIED or not _is_hard(node):
            continue
        tried += 1
        alone = with_guidance(json.dumps(by_itself(schema, pointer)))
        # A part of which there is no text may be one that is left out.
        if (problem := _problem_of("json_schema", alone, chance)) and not problem.startswith("no "):
            return problem
    return ""


def _is_hard(node: dict[str, Any]) -> bool:
    wide = (node.get(name) for name in ("properties", "anyOf", "oneOf", "allOf"))
    return "pattern" in node or any(isinstance(each, dict | list) and len(each) >= _WIDE for each in wide)


def _problem_of(kind: str, text: str, chance: random.Random) -> str:
    """The reason why a structure cannot be used: it does not compile, or some texts of it cannot be followed."""
    import llguidance

    grammar = getattr(llguidance.LLMatcher, f"grammar_from_{kind}")(text)
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    if not (problem := problem_of_matcher(matcher)):
        problem = _first_problem(matcher.deep_copy())
    for walk in range(_WALKS if not problem and _is_walked(kind, text) else 0):
        problem = problem or _walk(matcher.deep_copy(), chance, is_plain=walk == 0)
    return problem


def _is_walked(kind: str, text: str) -> bool:
    return kind != "json_schema" or len(text) > _SURE_CHARACTERS or any(name in text for name in _UNSURE)


def _first_problem(matcher: LLMatcher) -> str:
    mask = matcher.compute_bitmask()
    problem = problem_of_matcher(matcher)
    return problem or ("" if any(mask) or matcher.is_accepting() else "no text has this structure")


def _walk(matcher: LLMatcher, chance: random.Random, *, is_plain: bool) -> str:
    """Follows a text by chance, or the plainest; the matcher's failure, or ""."""
    for step in range(_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return problem_of_matcher(matcher)
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        # White space and the ends of strings and values come by no choice: long texts are the hard ones.
        longer = [byte for byte in allowed if chr(byte) not in ' \n\t"\\]},'] or allowed
        if not step and ord('"') in allowed:
            longer = [ord('"')]  # of what may be a string or not, the string is the hard one
        if not longer or matcher.is_stopped():
            return ""
        matcher.consume_token(longer[-1] if is_plain else chance.choice(longer))
    return ""


@lru_cache(1)
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def matches(pattern: str, text: str) -> bool | None:
    """Return whether a pattern of a schema is in a text; None where llguidance cannot compile it."""
    matcher = _matcher_of_pattern(pattern)
    if matcher is None:
        return None
    copy = matcher.deep_copy()
    accepted = copy.consume_tokens(list(json.dumps(text, ensure_ascii=False).encode(errors="replace")))
    return None if copy.get_error().startswith("lexer") else bool(accepted and copy.is_accepting())


@lru_cache(256)
def _matcher_of_pattern(pattern: str) -> LLMatcher | None:
    import llguidance

    schema = json.dumps({"type": "string", "pattern": pattern})
    if len(pattern) > _MOST_PATTERN or examine([schema])[0].problems:
        return None
    grammar = llguidance.LLMatcher.grammar_from_json_schema(with_guidance(schema))
    return llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
