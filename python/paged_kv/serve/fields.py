"""Typed reading of JSON: each value that is wrong is refused by the name of its field; unknown fields are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from paged_kv.arguments import printable, shown
from paged_kv.errors import ContractError
from paged_kv.serve.ignored import Ignored

Value = TypeVar("Value")
OtherParts: TypeAlias = Literal["refuse", "name", "drop"]
"""What to do with parts that are not text: refuse them, name them in a text, or drop them."""
_MISSING: Any = object()


class FieldError(ContractError):
    """A field is missing, unknown, or has a wrong value; `param` is its name."""

    code: ClassVar[str | None] = None
    """A word by which clients know the error."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


class BodyFields:
    """The fields of one JSON object; null is as if a field were missing.

    Args:
        value: The object.
        name: Its name in errors, as `messages[2]`; empty for the body itself.
        ignored: Collects unknown fields; by default they are refused.

    Raises:
        FieldError: it is no object.
    """

    def __init__(self, value: Any, name: str = "", ignored: Ignored | None = None) -> None:
        if not isinstance(value, dict):
            raise FieldError(name or "the body", f"expected an object, got {shown(value)}")
        self._values = {key: value for key, value in value.items() if value is not None}
        self._name = name
        self._ignored = Ignored() if ignored is None else ignored
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def error(self, name: str, problem: str) -> FieldError:
        """An error that names a field of this object."""
        return FieldError(self.path(name), problem)

    def path(self, name: str) -> str:
        """A field's name from the body on."""
        return f"{self._name}.{name}" if self._name else name

    def any(self, name: str, default: Any = _MISSING) -> Any:
        """A value of whatever type."""
        self._read.add(name)
        if name in self._values:
            return self._values[name]
        if default is _MISSING:
            raise self.error(name, "missing")
        return default

    def text(self, name: str, default: Value | str = _MISSING) -> Value | str:
        """A string of characters: lone surrogates are none."""
        return self._typed(name, default, "a string", _is_text)

    def flag(self, name: str, default: bool = _MISSING) -> bool:
        """True or false."""
        return bool(self._typed(name, default, "true or false", lambda value: isinstance(value, bool)))

    def integer(self, name: str, default: Value | int, minimum: int, maximum: int) -> Value | int:
        """An integer within bounds."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum

        return self._typed(name, default, f"an integer from {minimum} to {maximum}", fits)

    def choice(self, name: str, choices: Collection[str], default: Value | str = _MISSING) -> Value | str:
        """One of some strings."""
        return self._typed(name, default, f"one of {', '.join(choices)}", lambda value: value in tuple(choices))

    def object(self, name: str, default: Any = _MISSING) -> BodyFields:
        """An object; an empty one where it may be missing."""
        return BodyFields(self.any(name, {} if default is None else default), self.path(name), self._ignored)

    def objects(self, name: str) -> list[BodyFields]:
        """A list of objects, empty where it is missing."""
        entries = self._typed(name, [], "a list", lambda value: isinstance(value, list))
        return [BodyFields(each, f"{self.path(name)}[{index}]", self._ignored) for index, each in enumerate(entries)]

    def texts(
        self,
        name: str,
        kinds: Collection[str],
        harmless: Collection[str],
        others: OtherParts = "refuse",
    ) -> str:
        """A text, or the texts of parts of some kinds, a line each.

        Args:
            name: The field.
            kinds: The types of parts that are read.
            harmless: fields of parts that change nothing.
            others: What becomes of parts of other types.
        """
        if not isinstance(self.any(name), list):
            return str(self.text(name))
        texts = []
        for part in self.objects(name):
            kind = str(part.text("type"))
            if kind in kinds:
                texts.append(str(part.text("refusal" if kind == "refusal" else "text")))
                part.ignore(harmless)
                part.end()
                continue
            if others == "refuse":
                part.choice("type", kinds)
            part.leave_out(kinds)
            if others == "name":
                texts.append(f"[{_omitted(kind)} omitted: this model reads text only]")
        return "\n".join(texts)

    def raw(self) -> dict[str, Any]:
        """All of it, whose fields then count as read."""
        self._read |= self._values.keys()
        return self._values

    def ignore(self, names: Iterable[str]) -> None:
        """Takes fields that change no answer."""
        self._read.update(names)

    def refuse(self, name: str, neutral: Collection[Any] = ()) -> None:
        """Refuses a field that would change the answer, unless its value is one that does not."""
        if name in self._values and not any(self._values[name] == each for each in (False, [], {}, "", *neutral)):
            raise self.error(name, "not supported")
        self._read.add(name)

    def end(self) -> None:
        """Ignores what was not read.

        Raises:
            FieldError: there is an unknown field, and the server is strict.
        """
        for name in sorted(self._values.keys() - self._read):
            error = self.error(printable(name), "unknown field")
            self._ignored.add(error.param, error, "unknown field")

    def leave_out(self, kinds: Collection[str], name: str = "type") -> None:
        """Ignores all of it, as its type is none of `kinds`.

        Raises:
            FieldError: the server is strict.
        """
        asked = shown(self._values.get(name))
        error = self.error(name, f"expected one of {', '.join(kinds)}, got {asked}")
        self._ignored.add(self._name, error, f"unknown {name} {asked}")

    def pass_over(self, name: str, problem: str) -> None:
        """Ignores what a field says.

        Raises:
            FieldError: the server is strict.
        """
        self._ignored.add(self.path(name), self.error(name, problem), problem)

    def _typed(self, name: str, default: Any, wording: str, fits: Callable[[Any], bool]) -> Any:
        value = self.any(name, default)
        if value is not default and not fits(value):
            raise self.error(name, f"expected {wording}, got {shown(value)}")
        return value


def _omitted(kind: str) -> str:
    """The word for a part that is not read, by its type: `image_url` is an image."""
    return next((word for word in ("image", "audio", "video", "document", "file") if word in kind), printable(kind))


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def parse(body: bytes, ignored: Ignored | None = None) -> BodyFields:
    """The fields of a body; `ignored` collects unknown ones.

    Raises:
        ContractError: it is not JSON, or not an object.
    """
    try:
        return BodyFields(json.loads(body), ignored=ignored)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FieldError):
            raise
        raise ContractError(f"the body: invalid JSON: {printable(error)}") from None
