"""The terminal's side of a conversation: what the user types, and answers as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from paged_kv.arguments import printable
from paged_kv.commands.chat_session import ChatSession
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.files import write_regular
from paged_kv.output import say
from paged_kv.serve.chat import CallArguments, CallStart, Content, Reasoning
from paged_kv.serve.client_tools import ToolCall

_QUOTES = '"""'
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Characters by which a text could move the cursor, or more."""
_HELP = """/clear        forget the conversation
/system TEXT  set the system message; without TEXT show it
/model NAME   go on with the model or an adapter of that name; without NAME list them
/save FILE    write the conversation, as a request to /v1/chat/completions
/stats        tokens and times of the last answer, and pages
/help         this
/exit         leave, as Ctrl-D does
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a text of several lines.
Ctrl-C ends an answer."""


class ChatTerminal:
    """Reads turns from stdin, and writes answers to stdout; all else goes to stderr.

    Args:
        session: The conversation.
        verbose: Whether each answer is followed by its counts.
    """

    def __init__(self, session: ChatSession, *, verbose: bool) -> None:
        self._session, self._verbose = session, verbose
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._failed = False
        self._num_left_out = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": lambda _: session.clear(),
            "/system": self._system,
            "/model": self._model,
            "/save": self._save,
            "/stats": lambda _: self._stats(pages=True),
            "/help": lambda _: say(_HELP),
        }

    def run(self) -> int:
        """Talks until stdin ends or the user leaves; 1 where a turn failed and no user was there to see it."""
        if self._is_terminal:
            import readline  # noqa: F401 - gives `input` a history and keys

            say(f"{self._session.model.name}, {self._session.model.most_tokens} tokens; /help lists the commands")
        while True:
            try:
                text = self._read(">> ")
                if text.strip() == "/exit":
                    break
                self._do(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                say("\nCtrl-D or /exit leaves")
            except PagedKVError as error:
                self._failed = True
                say(f"error: {error}")
        if self._is_terminal:
            say("")
        return int(self._failed and not self._is_terminal)

    def _do(self, text: str) -> None:
        """One turn, or a command."""
        if text.startswith("/"):
            name, _, argument = text.strip().partition(" ")
            if name not in self._commands:
                raise ContractError(f"{printable(name)}: expected one of {', '.join(self._commands)}, /exit")
            self._commands[name](argument.strip())
        elif text.strip():
            self._turn(text)

    def _turn(self, text: str) -> None:
        session = self._session
        session.ask(text)
        try:
            self._answer()
            while calls := session.calls:
                for call in calls:
                    session.add_result(call, self._read(f"{call.tool.name} returns: "))
                self._answer()
        except (EOFError, KeyboardInterrupt, PagedKVError):  # a call without a result, or no answer
            session.withdraw()
            raise

    def _answer(self) -> None:
        """Prints the model's next message. Ctrl-C ends it; what has come is a part of the conversation."""
        session, last, end = self._session, None, ""
        try:
            with closing(session.answer()) as deltas:
                for delta in deltas:
                    if isinstance(delta, CallStart | CallArguments):
                        continue
                    if isinstance(delta, Reasoning) and not self._is_terminal:
                        continue
                    if last is Reasoning and isinstance(delta, Content) and not end.endswith("\n"):
                        click.echo()
                    last, end = type(delta), delta.text
                    text = self._clean(delta.text)
                    click.echo(click.style(text, dim=True) if last is Reasoning else text, nl=False)
        except KeyboardInterrupt:
            if not self._is_terminal or session.messages[-1]["role"] != "assistant":  # nothing has come
                raise
        if not end.endswith("\n") and (end or not session.calls):
            click.echo()
        for call in session.calls:
            click.echo(click.style(self._clean(_described(call)), bold=True))
        self._tell()

    def _tell(self) -> None:
        """Says what the answer's text does not."""
        session, counts = self._session, self._session.counts
        if counts is not None and counts.finish != "stop":
            reason = "it was interrupted" if counts.finish is None else "no more tokens are left for it"
            say(f"the answer ends here: {reason}")
        if session.num_left_out > self._num_left_out:
            say(f"the context is full: the model does not see the first {session.num_left_out} turns any more")
        self._num_left_out = session.num_left_out
        if self._verbose:
            self._stats(pages=False)

    def _stats(self, *, pages: bool) -> None:
        counts, most = self._session.counts, self._session.model.most_tokens
        if counts is None:
            say("no answer yet")
            return
        seconds = counts.seconds - counts.first
        rate = f", {(counts.new - 1) / seconds:.1f} tokens/s" if counts.new > 1 and seconds > 0 else ""
        say(
            f"prompt: {counts.prompt} tokens, {counts.cached} cached, {counts.first:.2f} s; "
            f"answer: {counts.new} tokens{rate}; context: {counts.prompt + counts.new} of {most}"
        )
        if pages:
            count = self._session.engine.pool.count()
            say(f"pages: {count.used} used, {count.cached} cached, {count.free} free")

    def _system(self, text: str) -> None:
        self._session.system = text or self._session.system
        say(self._session.system or "no system message")

    def _model(self, name: str) -> None:
        if name:
            self._session.choose(name)
        model = self._session.model
        say(f"{printable(model.name)} answers; there are {', '.join(map(printable, model.served_names))}")

    def _save(self, name: str) -> None:
        if not name:
            raise ContractError("/save: expected the name of a file")
        try:
            with write_regular(Path(name)) as file:
                json.dump(self._session.body(), file, ensure_ascii=False, indent=1)
        except (OSError, ValueError) as error:
            raise ContractError(f"/save {printable(name)}: cannot be written: {printable(error)}") from None
        say(f"{len(self._session.messages)} messages in {printable(name)}")

    def _read(self, prompt: str) -> str:
        """A text of one line or several. Raises EOFError where stdin has ended, ContractError where it is no text."""
        text = self._line(prompt)
        is_quoted = text.startswith(_QUOTES)
        text = text.removeprefix(_QUOTES)
        try:
            while not text.rstrip().endswith(_QUOTES) if is_quoted else text.endswith("\\"):
                text = (text if is_quoted else text[:-1]) + "\n" + self._line(".. ")
        except EOFError:  # the text ends there too
            pass
        return text.rstrip().removesuffix(_QUOTES) if is_quoted else text

    def _line(self, prompt: str) -> str:
        try:
            line = input(prompt) if self._is_terminal else sys.stdin.readline()
            line.encode()
        except UnicodeError:
            raise ContractError("stdin: expected UTF-8") from None
        if not line and not self._is_terminal:
            raise EOFError
        return line.removesuffix("\n")

    def _clean(self, text: str) -> str:
        return text.translate(_CONTROLS) if self._is_terminal else text


def _described(call: ToolCall) -> str:
    """A call as a line of Python would have it."""
    arguments = json.loads(call.text or "{}").items()
    return f"{call.tool.name}({', '.join(f'{key}={json.dumps(each, ensure_ascii=False)}' for key, each in arguments)})"
