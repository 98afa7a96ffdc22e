"""`paged-kv serve`: a checkpoint behind MAX Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from paged_kv.errors import ContractError


@click.command("serve")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[DIR] [-- MAX'S OWN FLAGS]")
@click.option("--demo", "use_demo", is_flag=True, help="Serve the small model in the package; no DIR then.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 is any that is free.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--max-batch-size", type=int, default=16, show_default=True, help="Requests that decode together.")
@click.option("--page-size", type=int, default=128, show_default=True, help="Tokens in a page of the cache.")
@click.option("--compiled", type=click.Path(path_type=Path), metavar="FOLDER", help="Of paged-kv compile --out.")
@click.option(
    "--api-key", help="What clients must send; `ps` shows it: PAGED_KV_API_KEY in the environment does the same."
)
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="The key is this file's text.")
@click.option("--allow-unauthenticated", is_flag=True, help="Without a key, on a --host that other machines reach.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="Of Host and Origin; repeat it.")
@click.option("--operator-routes", is_flag=True, help="Serve /reset_prefix_cache, /docs, /metrics and the like too.")
@click.option("--metrics", is_flag=True, help="Record metrics, for Prometheus, on a port that the first line names.")
@click.option("--max-body-bytes", type=int, help="Of a request.  [default: 262144, or 16 a token of the longest]")
@click.option("--max-connections", type=int, default=256, show_default=True, help="At a time.")
def serve_command(arguments: tuple[str, ...], use_demo: bool, **options: Any) -> None:
    """Serve a checkpoint folder, for OpenAI's clients."""
    folders, flags = ((), arguments) if use_demo else (arguments[:1], arguments[1:])
    if (not use_demo and not folders) or not all(flag.startswith("-") for flag in flags[:1]):
        raise ContractError("name one folder or --demo; MAX's own flags follow after --")
    raise ContractError(f"{folders}, {options}: `max serve --custom-architectures paged_kv.max_serve` serves models")
