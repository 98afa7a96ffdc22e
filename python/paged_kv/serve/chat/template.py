"""Render chat templates as transformers renders them.

The environment has what `transformers.utils.chat_template_utils` (5.23) has: loop controls, the `generation` tag,
`tojson` without sorting and escaping, `raise_exception`, `strftime_now`, `dict` and `namespace`. A template comes with
the model and is not trusted, so it runs in Jinja's sandbox and sees JSON values alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from paged_kv.arguments import printable
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.errors import CheckpointError, ContractError

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's thoughts; templates read the first, gpt-oss's the second."""


class Template:
    """One chat template.

    Args:
        text: In Jinja's language.
        names: The special tokens that the template may name, such as `bos_token`.

    Raises:
        CheckpointError: the text is no template.
    """

    def __init__(self, text: str, names: Mapping[str, str]) -> None:
        self.text, self._names = text, dict(names)
        problem = "the chat template cannot be read"
        with file_errors(problem):
            try:
                self._template = _environment().from_string(text)
            except TemplateError as error:
                raise CheckpointError(f"{problem}: {printable(error)}") from error
            except MemoryError as error:  # what Python's parser says of code that is nested too deep
                raise CheckpointError(f"{problem}: it is nested too deep") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as transformers' `apply_chat_template` writes it.

        Raises:
            ContractError: the template refuses the conversation, or fails on it.
        """
        # transformers drops what is None: many templates would write "None".
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        values = {"add_generation_prompt": False} | self._names | variables
        values |= {"messages": [_with_thoughts(message) for message in given], "tools": tools}
        try:
            return self._template.render({"documents": None} | values)
        except RecursionError:
            raise ContractError("messages: the chat template fails on them: they are too deep") from None
        except Exception as error:  # a template may do anything that the sandbox lets it
            raise ContractError(f"messages: the chat template refuses them: {printable(error)}") from None


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thoughts is None:
        return dict(message)
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """Jinja's `namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` as a function alone: the type itself would lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name that begins with an underscore: {name!r}")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@cache
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
