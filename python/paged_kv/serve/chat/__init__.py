"""Chats as models speak them: prompts by a model's own template, its thoughts, and its calls of tools.

It knows neither HTTP nor engines: `ChatFormat` makes a prompt and the structure of the answer, `MessageParser` reads
the text that comes back.
"""

from __future__ import annotations

from paged_kv.serve.chat.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from paged_kv.serve.chat.format import ChatFormat, MessageParser

__all__ = ["CallArguments", "CallStart", "ChatFormat", "Content", "Delta", "MessageParser", "Reasoning"]
