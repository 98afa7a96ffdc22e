"""`paged-kv chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from paged_kv.commands.options import (
    cache_dtype_option,
    deterministic_option,
    lora_option,
    numa_option,
    rotation_option,
    sampling_options,
    threads_option,
)
from paged_kv.engine.sampling import OF_MODEL, Sampling
from paged_kv.errors import ContractError

_FILE = click.Path(path_type=Path)


@click.command()
@numa_option
@threads_option
@deterministic_option
@click.argument("model", required=False)
@click.option("--demo", is_flag=True, help="Talk to the small model in the package; no MODEL then.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--tools", type=_FILE, metavar="FILE", help="JSON list of OpenAI's tools; you type what a call returns.")
@click.option("--verbose", is_flag=True, help="After each answer: tokens, those that were cached, and times.")
@sampling_options("logprobs", "prompt_logprobs", "skip_special_tokens", **dict.fromkeys((*OF_MODEL, "max_tokens")))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: bfloat16, unless it is in float32.")
@cache_dtype_option
@rotation_option
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens in a page of the cache.")
@click.option("--max-length", type=int, help="Tokens of the context.  [default: what model and memory hold]")
@click.option("--kv-disk", type=_FILE, metavar="DIR", help="Keep pages of prefixes there, and find them.")
@click.option("--kv-disk-gb", type=float, default=10.0, show_default=True, help="Its most, in 10^9 bytes.")
@click.option("--speculate", metavar="lookup|DRAFT", help="Draft tokens by the text, or by a smaller checkpoint.")
@lora_option
@click.option("--chat-template", type=_FILE, metavar="FILE", help="In place of the model's own.")
def chat(model: str | None, demo: bool, system: str | None, tools: Path | None, verbose: bool, **options: Any) -> int:
    """Talk to a checkpoint folder, a GGUF file or a hub's model, `org/name[:Q4_K_M]`.

    Without a terminal, each line of stdin is a turn, and stdout has the answers. Sampling that no option says is the
    model's own, at temperature 1 if it says nothing. The first adapter of --lora answers, until /model names another
    one or the model. /help lists the commands of a conversation.
    """
    from paged_kv.commands.chat_session import ChatSession, read_tools
    from paged_kv.commands.chat_terminal import ChatTerminal
    from paged_kv.engine.demo_model import FOLDER
    from paged_kv.serve.launch import served_model
    from paged_kv.serve.loading import set_up
    from paged_kv.serve.settings import Settings

    if demo == (model is not None):
        raise ContractError("name one MODEL, or --demo")
    if sys.stdin is None:
        raise ContractError("stdin: expected a terminal or lines, got a closed one")
    names = {each.name for each in fields(Sampling)} & options.keys()
    sampling = {name: value for name in names if (value := options.pop(name)) is not None}
    settings = Settings(
        FOLDER if model is None else Path(model), model or "demo", max_running=1, max_gap=None, **options
    )
    setup = set_up(settings)
    served = served_model(settings, setup.source, setup.size.max_length)
    offered = None if tools is None else read_tools(tools)
    session = ChatSession(lambda: setup.engine(served.tokenizer), served, sampling, offered, system)
    if settings.lora:
        served.store = session.engine
        session.choose(session.engine.adapters[0])
    status = ChatTerminal(session, verbose=verbose).run()
    session.engine.flush()
    return status
