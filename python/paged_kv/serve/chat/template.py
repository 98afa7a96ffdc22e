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
from jinja2.utils import Namespace, generate_lorem_ipsum

from paged_kv.arguments import printable
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.errors import CheckpointError, ContractError
from paged_kv.serve.chat.template_compiler import LimitedCode, LimitedContext
from paged_kv.serve.chat.template_guards import limited_call, limited_filters, limited_operator, limited_tests
from paged_kv.serve.chat.template_limits import Budget, TemplateLimitError

_MOST_TEXT = 1 << 18
"""Characters of a template; the longest real ones have some 30,000."""
_CHARGED = 1 << 16
"""Characters of a rendered text that are counted at once."""
_MOST_PATTERN, _MOST_WORDS = 1024, 100_000
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
        if len(text) > _MOST_TEXT:
            raise CheckpointError(f"{problem}: expected at most {_MOST_TEXT} characters, got {len(text)}")
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
        present = [{name: value for name, value in message.items() if value is not None} for message in messages]
        values = {"add_generation_prompt": False} | self._names | variables
        values |= {"messages": [_with_thoughts(message) for message in present], "tools": tools}
        context = self._template.new_context({"documents": None} | values)
        assert isinstance(context, LimitedContext)
        context.budget = budget = Budget([present, tools, variables])
        pieces, size = [], 0
        try:
            for piece in self._template.root_render_func(context):
                pieces.append(piece)
                size += len(piece)
                if size > _CHARGED:
                    budget.charge(size)
                    size = 0
            return "".join(pieces)
        except TemplateLimitError as error:
            raise ContractError(f"messages: the chat template cannot be rendered with them: {error}") from error
        except MemoryError:
            raise
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
    if len(pattern) > _MOST_PATTERN:  # the system's function makes 256 times as much of it
        raise TemplateLimitError("it makes too much text")
    return datetime.now().strftime(pattern)


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:  # noqa: A002
    if n * max > _MOST_WORDS:
        raise TemplateLimitError("it makes too much text")
    return generate_lorem_ipsum(n, html, min, max)


_OF_DICTIONARIES = frozenset(dir(dict))
_OF_TEXTS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits."""

    code_generator_class = LimitedCode
    context_class = LimitedContext
    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox does it; by a shorter way for what templates mostly ask for: fields of messages, and methods
        of texts.
        """
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTIONARIES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_TEXTS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: LimitedContext, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        return limited_call(__context.budget, __context, super().call, __obj, *args, **kwargs)

    def call_binop(self, context: LimitedContext, operator: str, left: Any, right: Any) -> Any:
        return limited_operator(context.budget, operator, self.binop_table[operator], left, right)


@cache
def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters = limited_filters(environment.filters | {"tojson": _tojson})
    environment.tests = limited_tests(environment.tests)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _Dict(),
        "lipsum": _lipsum,
        "namespace": _Namespace,
    }
    return environment
