"""The command line: `paged-kv chat | compile | demo | embed | generate | diff | inspect | serve | warmup | doctor |
bench`.

stdout carries results alone; progress, statistics and errors go to stderr. Bad input is one line and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from paged_kv import __version__
from paged_kv.commands.bench import bench
from paged_kv.commands.chat import chat
from paged_kv.commands.compile import compile_command
from paged_kv.commands.demo import demo
from paged_kv.commands.diff import diff
from paged_kv.commands.doctor import doctor
from paged_kv.commands.embed import embed
from paged_kv.commands.generate import generate
from paged_kv.commands.inspect import inspect
from paged_kv.commands.serve import serve_command
from paged_kv.commands.warmup import warmup
from paged_kv.errors import PagedKVError
from paged_kv.output import say, with_streams


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 fine, 1 a check or stdout failed, 2 bad input, 130 interrupted."""
    sys.exit(with_streams(lambda: _run(args)))


def _run(args: Sequence[str] | None) -> int:
    try:
        status = commands.main(args=args, prog_name="paged-kv", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return 2
    except click.ClickException as error:
        return _refuse(error.format_message())
    except PagedKVError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return 130
    return status if isinstance(status, int) else 0


def _refuse(message: str) -> int:
    say(f"error: {message}")
    return 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def commands() -> None:
    """A paged KV cache and decode attention for LLM inference on MAX."""


for command in (bench, chat, compile_command, demo, diff, doctor, embed, generate, inspect, serve_command, warmup):
    commands.add_command(command)
