"""Calls of tools in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

MAX renders tools by the model's chat template, asks a parser for the calls in a text, and, where calls are asked for,
for the grammar that the text must have: ours is llguidance's, which `forms.py` keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from max.pipelines.lib.tool_parsing import StructuralTagToolParser, generate_call_id, register
from max.pipelines.modeling.types import ParsedToolCall

from paged_kv.forms import with_guidance
from paged_kv.serve.launch import chat_template

NAME = "hermes"
"""Of the parser, for MAX's `--tool-parser`."""
_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*')


def parser_of(repository: Any) -> str | None:
    """The name of the parser for a model; None where its chat template, if it has one, calls tools in another form."""
    return NAME if _BEGIN in chat_template(Path(repository.repo_id)) else None


def grammar_of(tools: Sequence[Mapping[str, Any]], is_one: bool, schema: Mapping[str, Any] | None = None) -> str:
    """A grammar of calls of tools; with `is_one` of a single call, with a schema also of its JSON instead."""
    rules, tail = [], json.dumps(f"}}\n{_END}")
    for at, tool in enumerate(tools):
        function = tool["function"]
        head = f'{_BEGIN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        rules.append(f"call_{at}: {json.dumps(head)} arguments_{at} {tail}")
        parameters = json.dumps({"type": "object"} | function["parameters"])
        rules.append(f"arguments_{at}: %json {with_guidance(parameters)}")
    if schema is not None:
        rules.append(f"json: %json {with_guidance(json.dumps(schema))}")
    calls = " | ".join(f"call_{at}" for at in range(len(tools)))
    more = "" if is_one else ' ("\\n" call)*'
    return "\n".join([f"start: call{more}{'' if schema is None else ' | json'}", f"call: {calls}", *rules, ""])


@register(NAME)
class HermesParser(StructuralTagToolParser):
    """Finds calls of tools in a text, whole or as it comes."""

    CALL_BEGIN, CALL_END = _BEGIN, _END

    @staticmethod
    def generate_tool_call_grammar(
        response_format_schema: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Any = None,
        **_: Any,
    ) -> str:
        """What MAX asks for where a request has tools. It is kept from the first token on, or not at all."""
        return grammar_of(tools, isinstance(tool_choice, dict), response_format_schema)

    def _parse_complete_section(self, tool_section: str) -> list[ParsedToolCall]:
        found = (_parsed(body) for body in _CALL.findall(tool_section))
        return [ParsedToolCall(generate_call_id(), *call) for call in found if call]

    def _split_tool_call_body(self, body: str, is_complete: bool) -> tuple[str | None, str | None]:
        """The name and the text of the arguments, which only grows: braces at its end may be those of the call."""
        head = _HEAD.match(body)
        if head is None:
            call = _parsed(body) if is_complete else None
            return call or (None, None)
        arguments = body[head.end() :].rstrip()
        return head[1], arguments.removesuffix("}").rstrip() if is_complete else arguments.rstrip("} \t\r\n")


def _parsed(body: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a whole call; None where it is none."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], json.dumps(call.get("arguments", {}))
