"""Hold calls to the schemas of their tools as far as they can be enforced."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from paged_kv.errors import ContractError
from paged_kv.serve.chat.syntaxes import Syntax
from paged_kv.serve.chat.tools import Tool, ToolSchemaError
from paged_kv.structure_trials import examine
from paged_kv.structured_output import Grammar, problem_of

logger = logging.getLogger("paged_kv.serve")


def hold(tools: tuple[Tool, ...], syntax: Syntax) -> tuple[Tool, ...]:
    """The tools with schemas to which a model's calls can be held: what cannot be enforced is taken from those that
    are not strict. Each that changes is named in the log, once.

    Raises:
        ToolSchemaError: a tool is strict, and its schema cannot be enforced.
        ContractError: no process can be started to try a schema.
    """
    verdicts = examine([_text(tool.parameters) for tool in tools])
    # That its objects were closed may be the problem of one.
    failed = [
        at for at, verdict in enumerate(verdicts) if verdict.problems and tools[at].schema != tools[at].parameters
    ]
    for at, opened in zip(failed, examine([_text(tools[at].schema) for at in failed]), strict=True):
        verdicts[at] = verdicts[at] if opened.problems else opened
    held = []
    for tool, verdict in zip(tools, verdicts, strict=True):
        enforced = tool.held_by(json.loads(verdict.schema))
        problem = verdict.problems[0] if verdict.problems else syntax.problem(enforced.parameters)
        if problem and tool.is_strict:
            raise ToolSchemaError(tool, str(problem))
        if problem:
            _log_once(tool.name, str(problem), len(verdict.problems) or 1)
            enforced = tool.loosened() if tool.is_text else tool.held_by(syntax.relaxed(enforced.parameters))
        held.append(enforced)
    return tuple(held)


def held_together(tools: tuple[Tool, ...], grammar: Callable[[Sequence[Tool]], Grammar]) -> Grammar:
    """The grammar of a message that may call tools. Where it cannot be compiled or followed, all arguments come in the
    order of their schemas; where it still cannot, those of the tools that are at fault, else of all that are not
    strict, are held to be an object alone.

    Args:
        tools: The tools, each of which can be held by itself.
        grammar: Builds the grammar for some tools.

    Raises:
        ToolSchemaError: a tool is strict and at fault.
        ContractError: there is no such grammar for the tools.
    """
    with suppress(ContractError):  # it may be too long
        whole = grammar(tools)
        if not problem_of(whole):
            return whole
    tools = tuple(replace(tool, is_ordered=True) for tool in tools)
    whole = grammar(tools)
    if not (problem := problem_of(whole)):
        return whole
    loose = list(tools)
    for at, tool in enumerate(tools):
        if its := problem_of(grammar([tool])):
            if tool.is_strict:
                raise ToolSchemaError(tool, its)
            _log_once(tool.name, its, 1)
            loose[at] = tool.loosened()
    if loose == list(tools) or problem_of(grammar(loose)):
        _log_once(", ".join(tool.name for tool in tools), problem, 1)
        loose = [tool if tool.is_strict else tool.loosened() for tool in tools]
    if problem := problem_of(whole := grammar(loose)):
        raise ContractError(f"tools: the calls of {len(tools)} tools cannot be enforced: {problem}")
    return whole


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


@lru_cache(1024)
def _log_once(name: str, problem: str, count: int) -> None:
    further = f", and {count - 1} further parts" if count > 1 else ""
    logger.warning(
        "tool %r: its schema is not enforced at %s%s; its calls are checked when they are read", name, problem, further
    )
