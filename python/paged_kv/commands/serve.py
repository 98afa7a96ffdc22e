"""`paged-kv serve`: a checkpoint behind OpenAI's API."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from paged_kv.arguments import printable
from paged_kv.commands.options import (
    cache_dtype_option,
    deterministic_option,
    lora_option,
    numa_option,
    rotation_option,
    threads_option,
)
from paged_kv.errors import ContractError
from paged_kv.files import read_regular

_MOST_BYTES = 1 << 20
"""The most bytes of a configuration's file."""


def _read_config(context: click.Context, option: click.Parameter, file: Path | None) -> None:  # noqa: ARG001
    """Makes the values of a TOML file the options' defaults.

    Raises:
        ContractError: it cannot be read, or names what is no option.
    """
    if file is None:
        return
    try:
        settings = tomllib.loads(read_regular(file, _MOST_BYTES).decode())
    except (OSError, ValueError) as error:
        raise ContractError(f"--config {printable(file)}: cannot be read: {printable(error)}") from None
    options = {
        name.lstrip("-"): parameter
        for parameter in context.command.params
        for name in parameter.opts
        if parameter.name not in ("config", "help")
    }
    values: dict[str, Any] = {}
    for name, value in settings.items():
        declared = options.get(name.replace("_", "-"))
        if declared is None:
            raise ContractError(f"--config {printable(file)}: {printable(repr(name))} is no option of this command")
        is_single = getattr(declared, "multiple", False) and isinstance(value, str)  # click would take its letters
        values[str(declared.name)] = [value] if is_single else value
    context.default_map = values


_PATH = click.Path(path_type=Path)


@click.command("serve")
@click.option(
    "--config",
    type=_PATH,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    metavar="FILE",
    help="A TOML file with values for the options here, by their names without --; the command line comes first.",
)
@numa_option
@threads_option
@deterministic_option
@click.argument("model", required=False)
@click.option("--demo", is_flag=True, help="Serve the small model in the package; no MODEL then.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="The model's name for clients; repeat it for several.  [default: MODEL as it is given]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 is any that is free.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: bfloat16, unless it is in float32.")
@click.option(
    "--task",
    type=click.Choice(["generate", "embed", "rerank"]),
    help="What the model is for.  [default: what its files say; any decoder can embed]",
)
@cache_dtype_option
@rotation_option
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens in a page of the cache.")
@click.option("--pages", type=int, help="Pages of the cache.")
@click.option("--memory-gb", type=float, help="Or its size in 10^9 bytes.  [default: half of what the weights leave]")
@click.option("--max-length", type=int, help="Tokens of the longest request.  [default: what model and cache hold]")
@click.option("--max-running", type=int, default=64, show_default=True, help="Samples of one step at most.")
@click.option("--max-queue", type=int, default=256, show_default=True, help="Samples that may wait; more get 429.")
@click.option("--max-step-tokens", type=int, default=512, show_default=True, help="Tokens of one step at most.")
@click.option(
    "--max-gap",
    type=float,
    default=0.25,
    show_default=True,
    help="Seconds that prompts may keep others' tokens waiting.",
)
@click.option("--kv-disk", type=_PATH, metavar="DIR", help="Keep pages of prefixes there, and find them.")
@click.option("--kv-disk-gb", type=float, default=10.0, show_default=True, help="Its most, in 10^9 bytes.")
@click.option(
    "--speculate",
    metavar="lookup|mtp|DRAFT",
    help="Draft tokens by the text, by the model's MTP layer, by a smaller checkpoint or an EAGLE-3 head.",
)
@lora_option
@click.option("--lora-loading", is_flag=True, help="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter.")
@click.option("--chat-template", type=_PATH, metavar="FILE", help="In place of the model's own.")
@click.option(
    "--generation-config",
    type=click.Choice(["model", "none"]),
    default="model",
    show_default=True,
    help="Sampling that requests leave out: as the model's generation_config.json has it, or not.",
)
@click.option("--strict", is_flag=True, help="Refuse fields of requests that are not known, instead of ignoring them.")
@click.option("--drain-seconds", type=float, default=30.0, show_default=True, help="For requests when it is stopped.")
@click.option(
    "--stall-seconds", type=float, default=120.0, show_default=True, help="A step that is longer is unhealthy."
)
@click.option("--api-key", help="What clients must send; `ps` shows it: PAGED_KV_API_KEY in the environment is safer.")
@click.option("--api-key-file", type=_PATH, metavar="FILE", help="The key is this file's text.")
@click.option("--allow-unauthenticated", is_flag=True, help="Without a key, on a --host that other machines reach.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="Of Host and Origin; repeat it.")
@click.option(
    "--allowed-origin",
    "allowed_origins",
    multiple=True,
    metavar="ORIGIN",
    help="A page that may read answers, as https://app.example; repeat it.",
)
@click.option("--metrics", is_flag=True, help="Serve /metrics, for Prometheus.")
@click.option("--profile", is_flag=True, help="Serve /start_profile and /stop_profile: where the time of steps goes.")
@click.option("--max-body-bytes", type=int, help="Of a request.  [default: 262144, or 16 a token of the longest]")
@click.option("--max-connections", type=int, default=256, show_default=True, help="At a time.")
def serve_command(model: str | None, demo: bool, names: tuple[str, ...], **options: Any) -> None:
    """Serve a checkpoint folder, a GGUF file or a hub's model, `org/name[:Q4_K_M]`, for OpenAI's clients."""
    from paged_kv.engine.demo_model import FOLDER
    from paged_kv.serve.launch import serve
    from paged_kv.serve.settings import Settings

    if demo == (model is not None):
        raise ContractError("name one MODEL, or --demo")
    name, *aliases = names or (model or "demo",)
    serve(Settings(FOLDER if model is None else Path(model), name, aliases=tuple(aliases), **options))
