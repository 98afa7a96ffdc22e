"""The text of one sample as it is streamed: what may become a stop text waits, and a stop text ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Tokens to text, one by one (`tokenizer.StreamDecoder`)."""

    def push(self, token: int) -> str:
        """The text that this token completes."""
        ...

    def flush(self) -> str:
        """The text that still waits."""
        ...


class StopText:
    """Decodes the tokens of one sample; text that it has returned never changes, and has no stop text in it.

    Args:
        decoder: The decoder of the sample alone; without one there is no text.
        stops: Texts that end it.
    """

    def __init__(self, decoder: Decoder | None, stops: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that this token completes, and whether a stop text ends it; none does that begins before a token
        that may not stop.
        """
        if self._decoder is None:
            return "", False
        piece = self._decoder.push(token)
        return self._take(piece) if may_stop else (piece, False)

    def flush(self) -> tuple[str, bool]:
        """All text that still waits, and whether a stop text ends it."""
        if self._decoder is None:
            return "", False
        text, stops = self._take(self._decoder.flush())
        held, self._held = self._held, ""
        return (text, True) if stops else (text + held, False)

    def _take(self, piece: str) -> tuple[str, bool]:
        text = self._held + piece
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
