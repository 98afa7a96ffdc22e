"""The marks between which models think."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Thought:
    """A model's marks around its thoughts.

    Args:
        opening: The text before a thought.
        closing: The text after it.
        title: The text that a thought begins with, which is not shown.
        dropped: Marks around the answer, which are not shown.
    """

    opening: str
    closing: str
    title: str = ""
    dropped: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside a thought."""
        return prompt.rstrip().endswith(self.opening + self.title)

    def is_closed(self, prompt: str) -> bool:
        """Return whether it ends after one, so that the answer comes next."""
        return prompt.rstrip().endswith(self.closing)


_RESPONSE = ("<response>", "</response>")
_KNOWN = (
    Thought("[THINK]", "[/THINK]"),  # Mistral's
    Thought("<|channel>", "<channel|>", "thought"),  # Gemma 4's
    Thought("Here is my thought process:", "Here is my response:"),  # Granite 3.2's
    Thought("<seed:think>", "</seed:think>"),
    Thought("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere's
    Thought("<think>", "</think>"),  # Qwen's, DeepSeek's and most others'
)


def read_thought(template: str) -> Thought | None:
    """The marks of thoughts that a template has; None where it has none."""
    for known in _KNOWN:
        if known.opening + known.title in template and known.closing in template:
            return replace(known, dropped=_RESPONSE if all(mark in template for mark in _RESPONSE) else ())
    return None
