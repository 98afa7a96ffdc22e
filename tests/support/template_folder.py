"""Render every chat template of a folder as transformers does, by hand: `python tests/support/template_folder.py DIR`.

It prints the templates whose text or refusal differs, and for each the syntax of its calls and whether a call that the
template writes is read back.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paged_kv.errors import ContractError
from paged_kv.serve.chat import CallArguments, CallStart, ChatFormat, Content, Reasoning
from support.chats import CHATS, NAMES, ours, theirs


def differing(text: str) -> list[str]:
    """The conversations that a template renders otherwise."""
    variables = ({}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True})
    return [
        f"{name}{values or ''}"
        for name, (messages, tools) in CHATS.items()
        for values in variables
        for prompts in (True, False)
        if ours(text, messages, tools, add_generation_prompt=prompts, **values)
        != theirs(text, messages, tools, add_generation_prompt=prompts, **values)
    ]


def read_back(text: str) -> str:
    """The syntax of a template, and what its parser makes of the call that the template writes."""
    chat = ChatFormat({"default": text}, NAMES)
    messages, tools = CHATS["tool results"]
    try:
        prompt = chat.render(messages[:1], tools)
        written = chat.render(messages[:-1], tools, add_generation_prompt=False)
    except ContractError as error:
        return f"{chat.syntax.NAME}: {error}"
    message = written[len(prompt) :] if written.startswith(prompt) else written[len(prompt.rstrip()) - 40 :]
    parser = chat.parser(tools, prompt)
    deltas = parser.push(message) + parser.finish()
    calls = [each.name for each in deltas if isinstance(each, CallStart)]
    arguments = "".join(each.text for each in deltas if isinstance(each, CallArguments))
    shown = "".join(each.text for each in deltas if isinstance(each, Content | Reasoning))
    return f"{chat.syntax.NAME}: {calls} {arguments} {shown[:80]!r}"


def main(folder: Path) -> int:
    """Prints a line a template; 1 where one differs."""
    files = sorted(folder.rglob("*.jinja"))
    different = 0
    for file in files:
        text = file.read_text()
        problems = differing(text)
        different += bool(problems)
        print(f"{file.name}: {problems or 'equal'}; {read_back(text)}")
    print(f"{len(files) - different} of {len(files)} equal")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
