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

    def before(self, prompt: str) -> str:
        """A rendered prompt up to the marks of a thought that it ends with."""
        for mark in (self.closing, self.opening + self.title):
            if prompt.rstrip().endswith(mark):
                prompt = prompt.rstrip().removesuffix(mark)
        return prompt

    def is_within(self, begun: str) -> bool:
        """Return whether the beginning of a message ends inside a thought, wherever that began."""
        return begun.rfind(self.opening + self.title) > begun.rfind(self.closing)

    def last_part(self, begun: str) -> str:
        """The part of the beginning of a message after the last mark of a thought."""
        marks = (self.opening + self.title, self.closing)
        return begun[max(begun.rfind(mark) + len(mark) if mark in begun else 0 for mark in marks) :]


_RESPONSE = ("<response>", "</response>")
_THOUGHTS = (
    Thought("[THINK]", "[/THINK]"),  # Mistral's
    Thought("<|channel>", "<channel|>", "thought"),  # Gemma 4's
    Thought("Here is my thought process:", "Here is my response:"),  # Granite 3.2's
    Thought("<seed:think>", "</seed:think>"),
    Thought("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere's
    Thought("<think>", "</think>"),  # Qwen's, DeepSeek's and most others'
)


def read_thought(template: str) -> Thought | None:
    """The marks of thoughts that a template has; None where it has none."""
    for thought in _THOUGHTS:
        if thought.opening + thought.title in template and thought.closing in template:
            return replace(thought, dropped=_RESPONSE if all(mark in template for mark in _RESPONSE) else ())
    return None
