"""Jinja's filters, tests and operators, and the methods of Python's values, under a `Budget`.

What makes more than it is given (widths, counts, joins, formats) is refused before it is made. What writes or compares
whole values has them measured first: a list that holds another one twice, forty times over, is small and endless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from string import Formatter
from typing import Any

from jinja2 import Environment
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import EscapeFormatter, Markup, SandboxedFormatter
from jinja2.utils import _PassArg, pass_context

from paged_kv.serve.chat.template_compiler import LimitedContext
from paged_kv.serve.chat.template_limits import ENTRY, MOST_BITS, Budget, Lazy, TemplateLimitError

Call = Callable[..., Any]
Guard = Callable[..., Any]
"""Called with the budget, the filter or method itself, and its arguments; returns what it returns."""

_CALL = 4
"""Operations that a call counts as: it takes as long."""
_MOST_NUMBER = 10**6
"""The largest width or precision in a format."""
_MOST_STEPS = 1 << 30
"""Steps of the few methods that take a text's length times that of another."""
_RARE = 1 << 16
"""Characters that filters take which chat templates have no use for: they take more time than their text's length."""
_LONG_CODE = 1000
"""Characters of a text from which it matters that a method takes more time than its length."""
_ENCODINGS = frozenset({"utf-8", "utf8", "ascii", "latin-1", "latin1", "utf-16", "utf-32"})
_SPECIFICATION = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_TEXTS, _SPLIT = (str, bytes), (list, tuple)
_RECEIVERS = (str, bytes, int, float, list, tuple, dict, range, type)


def limited_filters(filters: Mapping[str, Call]) -> dict[str, Call]:
    """Filters as they are, or under a guard."""
    return {name: _limited(call, FILTERS[name]) if name in FILTERS else call for name, call in filters.items()}


def limited_tests(tests: Mapping[str, Call]) -> dict[str, Call]:
    """Tests as they are, or under a guard."""
    return {name: _limited(call, TESTS[name]) if name in TESTS else call for name, call in tests.items()}


def limited_call(
    budget: Budget, context: LimitedContext, call: Call, function: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls what a template calls.

    Args:
        budget: The rendering's.
        context: The template's.
        call: The sandbox's own way to do it, called with the context, the function and the arguments.
        function: Its function: a macro, a method of a value, one of the environment's.
        args: Its arguments.
        kwargs: Its arguments by name.
    """
    budget.tick(_CALL)
    if type(function) is Macro:
        if function.catch_varargs or function.catch_kwargs:
            budget.check_tuple((*args, *kwargs.values()))
        return call(context, function, *args, **kwargs)  # its text was counted when it was joined
    receiver = getattr(function, "__self__", None)
    if isinstance(receiver, _RECEIVERS):
        _drop_scopes(kwargs)
        guard: Guard = METHODS.get(function.__name__, _method)
        return budget.made(guard(budget, partial(call, context, function), receiver, *args, **kwargs))
    if isinstance(receiver, LoopContext):
        budget.size(args)  # `changed` compares them
    wrapped: Any = getattr(function, "__wrapped__", None)
    text = getattr(wrapped, "__self__", None)
    if isinstance(text, str) and getattr(wrapped, "__name__", "") in ("format", "format_map"):
        _drop_scopes(kwargs)
        return budget.made(_formatted(budget, context.environment, text, wrapped.__name__, args, kwargs))
    return budget.made(call(context, function, *args, **kwargs))


def _drop_scopes(kwargs: dict[str, Any]) -> None:
    """Takes out what Jinja adds to each call in a loop or block, for functions that read the template's variables."""
    kwargs.pop("_loop_vars", None)
    kwargs.pop("_block_vars", None)


def limited_operator(budget: Budget, operator: str, call: Call, left: Any, right: Any) -> Any:
    """One of the operators `*`, `**` and `%`."""
    budget.tick()
    if operator == "*":
        _check_product(budget, left, right)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise TemplateLimitError("it makes numbers that are too large")
    else:
        _check_remainder(budget, left, right)
    return budget.made(call(left, right))


def _limited(call: Call, guard: Guard) -> Call:
    pass_arg = _PassArg.from_obj(call)

    def limited(context: LimitedContext, /, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.tick()
        own: Call = call
        if pass_arg is _PassArg.context:
            own = partial(call, context)
        elif pass_arg is not None:
            own = partial(call, context.eval_ctx if pass_arg is _PassArg.eval_context else context.environment)
        return budget.made(guard(budget, own, *args, **kwargs))

    taking_context: Call = pass_context(limited)
    return taking_context


# Guards of filters and tests.


def _text(times: int = 1) -> Guard:
    """The guard of what takes a value's text, and makes so many times its characters at most."""

    def guard(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        value = budget.text(value)
        if times > 1:
            budget.afford(times * len(value))
        return call(value, *args, **kwargs)

    return guard


def _rare(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    if budget.size([value, args, kwargs]) > _RARE:
        raise TemplateLimitError("it gives a filter too much")
    return call(value, *args, **kwargs)


def _whole(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The guard of what compares the values of an iterable."""
    _check_attribute(kwargs.get("attribute"))
    return call(value if isinstance(value, dict) else budget.listed(value), *args, **kwargs)


def _shallow(budget: Budget, call: Call, value: Any, /) -> Any:
    """The guard of what makes a list of what it is given, or turns it round."""
    if isinstance(value, str | list | tuple | range):
        budget.tick(len(value) // 64)
    return call(value)


def _dictionary(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    budget.size(value)
    return call(value, *args, **kwargs)


def _sum(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    _check_attribute(args[0] if args else kwargs.get("attribute"))
    values = budget.listed(value)
    if not isinstance(args[1] if len(args) > 1 else kwargs.get("start", 0), int | float):
        budget.afford(budget.size(values) * len(values))  # lists, each of which is copied for the next
    return call(values, *args, **kwargs)


def _lazy(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The guard of what makes its values as they are asked for."""
    for name in (args[0] if args else None, kwargs.get("attribute")):
        _check_attribute(name)
    return Lazy(budget, call(value, *args, **kwargs), value)


def _unique(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    return Lazy(budget, _whole(budget, call, value, *args, **kwargs), None)


def _batch(budget: Budget, call: Call, value: Any, /, linecount: Any, fill_with: Any = None) -> Any:
    if fill_with is not None and isinstance(linecount, int):
        budget.charge(ENTRY * linecount)
    return Lazy(budget, call(value, linecount, fill_with), value)


def _join(budget: Budget, call: Call, value: Any, /, d: Any = "", attribute: Any = None) -> Any:
    _check_attribute(attribute)
    values = value if isinstance(value, str) else budget.listed(value)
    budget.afford(len(budget.text(d)) * len(values))
    return call(values, d, attribute)


def _replace(budget: Budget, call: Call, value: Any, /, old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
    texts = [str(budget.text(each)) for each in (value, old, new)]
    _check_replacement(budget, *texts)
    return call(value, old, new, *args, **kwargs)


def _center(budget: Budget, call: Call, value: Any, /, width: Any = 80) -> Any:
    _check_width(budget, width)
    return call(budget.text(value), width)


def _indent(budget: Budget, call: Call, s: Any, /, width: Any = 4, *args: Any, **kwargs: Any) -> Any:
    lines = len(s.splitlines()) if isinstance(s, str) else 0
    _check_width(budget, (lines + 1) * (len(width) if isinstance(width, str) else width))
    return call(s, width, *args, **kwargs)


def _trim(budget: Budget, call: Call, value: Any, /, chars: Any = None) -> Any:
    value = budget.text(value)
    _check_steps(value, chars)
    return call(value, chars)


def _format(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    _check_format(budget, str(budget.text(value)), kwargs or args)
    return call(value, *args, **kwargs)


def _int(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    if isinstance(value, str | bytes) and len(value) > MOST_BITS // 8:
        raise TemplateLimitError("it makes numbers that are too large")
    return call(value, *args, **kwargs)


def _round(budget: Budget, call: Call, value: Any, /, precision: Any = 0, method: Any = "common") -> Any:  # noqa: ARG001
    if not isinstance(value, int | float):
        raise TypeError(f"a number is expected, not {type(value).__name__}")
    _check_bits(4 * abs(precision) if isinstance(precision, int) else 0)
    return call(value, precision, method)


def _tojson(budget: Budget, call: Call, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    size = budget.size(value)
    if args or kwargs:  # indents and separators, each of which is written for each entry
        values = [*args, *kwargs.values()]
        wide = 8 * sum(each if isinstance(each, int) else len(each) if isinstance(each, str) else 8 for each in values)
        wide += sum(budget.size(each) for each in values if isinstance(each, _SPLIT))
        if wide > 512:
            budget.afford(wide * size)
    return call(value, *args, **kwargs)


def _compared(budget: Budget, call: Call, value: Any, /, *args: Any) -> Any:
    return call(budget.checked(value), *map(budget.checked, args))


def _number(budget: Budget, call: Call, value: Any, /, *args: Any) -> Any:
    if isinstance(value, _TEXTS):  # `%` is a format of it
        _check_remainder(budget, value, args)
    return call(value, *args)


# Guards of methods; `receiver` is the value.


def _method(budget: Budget, call: Call, receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    if isinstance(result, _SPLIT) and isinstance(receiver, _TEXTS):
        budget.charge(len(receiver) + ENTRY * len(result))
    return result


def _deep_method(budget: Budget, call: Call, receiver: Any, /, *args: Any) -> Any:
    """The guard of what compares the values of a list."""
    if not isinstance(receiver, str | bytes):
        budget.size([receiver, args])
    return call(*args)


def _width_method(budget: Budget, call: Call, receiver: Any, /, width: Any, *args: Any) -> Any:  # noqa: ARG001
    _check_width(budget, width)
    return call(width, *args)


def _steps_method(budget: Budget, call: Call, receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
    if len(receiver) > _LONG_CODE:
        for each in (*args, *kwargs.values()):
            _check_steps(receiver, each)
    return _method(budget, call, receiver, *args, **kwargs)


def _replace_method(budget: Budget, call: Call, receiver: Any, /, old: Any, new: Any, *args: Any) -> Any:
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        _check_replacement(budget, receiver, old, new)
    return call(old, new, *args)


def _join_method(budget: Budget, call: Call, receiver: Any, /, values: Any) -> Any:
    values = budget.listed(values)
    budget.afford(len(receiver) * len(values))
    return call(values)


def _translate_method(budget: Budget, call: Call, receiver: Any, /, table: Any, *args: Any) -> Any:
    longest = max((len(each) for each in table.values() if isinstance(each, str)), default=1) if table else 1
    budget.afford(longest * len(receiver))
    return call(table, *args)


def _tabs_method(budget: Budget, call: Call, receiver: Any, /, tabsize: Any = 8) -> Any:
    if isinstance(tabsize, int):
        budget.afford(len(receiver) + receiver.count("\t" if isinstance(receiver, str) else b"\t") * max(tabsize, 0))
    return call(tabsize)


def _code_method(
    budget: Budget, call: Call, receiver: Any, /, encoding: Any = "utf-8", *args: Any, **kwargs: Any
) -> Any:
    encoding = kwargs.pop("encoding", encoding)
    budget.afford(16 * len(receiver))
    if len(receiver) > _LONG_CODE and str(encoding).lower() not in _ENCODINGS:  # some take the square of the length
        raise TemplateLimitError(f"it encodes too much as {str(encoding)[:40]}")
    return call(encoding, *args, **kwargs)


def _bytes_method(budget: Budget, call: Call, receiver: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    """The guard of integers from bytes, and to them."""
    for each in (*args, *kwargs.values()):
        _check_bits(8 * (len(each) if isinstance(each, str | bytes | list) else each if isinstance(each, int) else 0))
    return call(*args, **kwargs)


def _listed_method(budget: Budget, call: Call, receiver: Any, /, values: Any, *args: Any) -> Any:  # noqa: ARG001
    return call(budget.listed(values), *args)


# What the guards check.


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and len(name) > 1024:
        raise TemplateLimitError("it names too long an attribute")


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateLimitError("it makes numbers that are too large")


def _check_width(budget: Budget, width: Any) -> None:
    if isinstance(width, int):
        budget.afford(width)


def _check_steps(text: Any, other: Any) -> None:
    if isinstance(text, str | bytes) and isinstance(other, str | bytes) and len(text) * len(other) > _MOST_STEPS:
        raise TemplateLimitError("it takes too long")


def _check_replacement(budget: Budget, text: Any, old: Any, new: Any) -> None:
    if len(new) > len(old):
        budget.afford(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            budget.afford(len(value) * max(count, 0) * (1 if isinstance(value, str | bytes) else ENTRY))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_remainder(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, bytes):
        left = left.decode("latin-1")
    if isinstance(left, str):
        _check_format(budget, left, right)


def _check_format(budget: Budget, text: str, args: Any) -> None:
    """Refuses `text % args` where its widths, or arguments that it writes more than once, come to too much."""
    values = list(args.values()) if isinstance(args, Mapping) else list(args) if isinstance(args, tuple) else [args]
    numbers = [abs(value) for value in values if isinstance(value, int)]
    total, longest = len(text), max((budget.size(value) for value in values), default=0)
    for field in _fields(text):
        specification = _SPECIFICATION.match(text, field)
        assert specification is not None
        for width in specification.groups():
            if width == "*":
                total += max(numbers, default=0)
            elif width:
                total += _width(width)
        total += longest
    budget.afford(total)


def _fields(text: str) -> Iterator[int]:
    """The places behind each `%` of a format, and the name behind it."""
    at = text.find("%")
    while at >= 0:
        at += 1
        if text.startswith("(", at):
            depth = 0
            while at < len(text):
                depth += (text[at] == "(") - (text[at] == ")")
                at += 1
                if depth == 0:
                    break
        yield at
        at = text.find("%", at + text.startswith("%", at))


def _width(digits: str) -> int:
    if len(digits) > len(str(_MOST_NUMBER)):
        raise TemplateLimitError("it makes too much text")
    return int(digits)


class _Formatter(SandboxedFormatter):
    """`str.format`, each of whose fields is counted."""

    def __init__(self, environment: Environment, budget: Budget, **options: Any) -> None:
        super().__init__(environment, **options)
        self._budget = budget

    def convert_field(self, value: Any, conversion: Any) -> Any:
        converted = super().convert_field(self._budget.checked(value), conversion)
        if conversion is not None:
            self._budget.charge(len(converted))
        return converted

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in re.findall(r"\d+", format_spec):
            self._budget.afford(_width(digits))
        formatted: str = super().format_field(self._budget.checked(value), format_spec)
        self._budget.tick()
        self._budget.charge(len(formatted))
        return formatted


class _MarkupFormatter(_Formatter, EscapeFormatter):
    """The same of markup, which escapes what it is given."""


def _formatted(
    budget: Budget, environment: Environment, text: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    values: Mapping[str, Any] = kwargs
    if name == "format_map":
        if kwargs or len(args) != 1:
            raise TypeError("format_map() takes exactly one argument")
        (values,), args = args, ()
    is_markup = isinstance(text, Markup)
    formatter: Formatter = (
        _MarkupFormatter(environment, budget, escape=text.escape) if is_markup else _Formatter(environment, budget)
    )
    formatted: str = type(text)(formatter.vformat(text, args, values))
    return formatted


FILTERS: Mapping[str, Guard] = {
    **dict.fromkeys(("capitalize", "lower", "safe", "string", "title", "truncate", "wordcount"), _text()),
    **dict.fromkeys(("e", "escape", "forceescape", "upper"), _text(6)),
    **dict.fromkeys(("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"), _rare),
    **dict.fromkeys(("groupby", "max", "min", "sort"), _whole),
    **dict.fromkeys(("items", "map", "reject", "rejectattr", "select", "selectattr", "slice"), _lazy),
    **dict.fromkeys(("list", "reverse"), _shallow),
    "batch": _batch,
    "center": _center,
    "dictsort": _dictionary,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": _tojson,
    "trim": _trim,
    "unique": _unique,
}
TESTS: Mapping[str, Guard] = {
    **dict.fromkeys(("lower", "upper"), _text()),
    **dict.fromkeys(("divisibleby", "even", "odd"), _number),
    **dict.fromkeys(("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge"), _compared),
    **dict.fromkeys(("<", "lt", "lessthan", "<=", "le", "in"), _compared),
}
METHODS: Mapping[str, Guard] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width_method),
    **dict.fromkeys(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"), _steps_method),
    **dict.fromkeys(("count", "index"), _deep_method),
    **dict.fromkeys(("decode", "encode"), _code_method),
    **dict.fromkeys(("from_bytes", "to_bytes"), _bytes_method),
    **dict.fromkeys(
        ("striptags", "unescape"), lambda budget, call, receiver: _rare(budget, lambda _: call(), receiver)
    ),
    "expandtabs": _tabs_method,
    "fromkeys": _listed_method,
    "join": _join_method,
    "replace": _replace_method,
    "translate": _translate_method,
}
