"""The command line: `paged-kv compile | demo | generate | inspect | serve | warmup | doctor | bench`.

stdout carries results alone; progress, statistics and errors go to stderr. Bad input is one line and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from paged_kv import __version__
from paged_kv.arguments import shown
from paged_kv.commands.bench import bench
from paged_kv.commands.compile import compile_command
from paged_kv.commands.demo import demo
from paged_kv.commands.generate import generate
from paged_kv.commands.inspect import inspect
from paged_kv.commands.options import threads_option
from paged_kv.errors import ContractError, PagedKVError
from paged_kv.options import check_head_dim
from paged_kv.output import say, with_streams

if TYPE_CHECKING:  # MAX takes a third of a second to import: not for `--help`
    from paged_kv.runtime.compile_key import CompileKey


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


@commands.command()
@threads_option
@click.option("--compiled", is_flag=True, help="Also list each kernel of the API, and where its code lies.")
@click.option("--explain", is_flag=True, help="Also say which attention kernel each pair of dtypes gets, and why.")
@click.option("--arch", help="With --explain: a GPU's architecture (sm_90a, gfx942, ...) instead of what is here.")
@click.option("--head-dim", type=int, default=128, show_default=True, help="With --explain.")
@click.option("--group", type=int, default=4, show_default=True, help="With --explain: query heads a KV head.")
@click.option("--page-size", type=int, default=16, show_default=True, help="With --explain.")
def doctor(compiled: bool, explain: bool, arch: str | None, head_dim: int, group: int, page_size: int) -> int:
    """Print what was found: toolchain, CPU and its target, GPUs, cache folder, what is compiled for this CPU."""
    from paged_kv.runtime.doctor import collect, explain_kernels, list_compiled, render

    for name, value in (("--group", group), ("--page-size", page_size)):
        if not 1 <= value < 2**31:
            raise ContractError(f"{name} must be at least 1 and below 2^31, not {shown(value)}")
    check_head_dim("--head-dim", head_dim)
    report = collect(_steps)
    click.echo(render(report))
    if compiled:
        click.echo(list_compiled(report))
    if explain:
        devices = report.architectures if arch is None else [arch]
        click.echo(explain_kernels(devices, head_dim, group, page_size, report.target))
    return report.exit_status


def _steps() -> dict[str, CompileKey]:
    """What the step of each model in the package depends on, by the command that runs it."""
    from paged_kv.engine.step import demo_family

    (key,) = demo_family().keys.values()
    return {"demo": key}


@commands.command()
@click.option("--q-dtype", "q_dtypes", multiple=True, help="Of queries; repeat it. Default: all.")
@click.option("--kv-dtype", "kv_dtypes", multiple=True, help="Of caches; repeat it. Default: all.")
@click.option("--exact", is_flag=True, help="Compile for this very CPU what came with the package for a lower target.")
def warmup(q_dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...], exact: bool) -> None:
    """Compile the kernels now, so that the first call does not wait."""
    from paged_kv.runtime.warmup import warmup as compile_variants

    say("compiling what is missing: a minute or two for all dtypes")
    for variant in compile_variants(q_dtypes or None, kv_dtypes or None, exact=exact):
        click.echo(f"ready: {variant}")


@commands.command("serve")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[DIR] [-- MAX'S OWN FLAGS]")
@click.option("--demo", "use_demo", is_flag=True, help="Serve the small model in the package; no DIR then.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 is any that is free.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--max-batch-size", type=int, default=16, show_default=True, help="Requests that decode together.")
@click.option("--page-size", type=int, default=128, show_default=True, help="Tokens in a page of the cache.")
@click.option(
    "--compiled", type=click.Path(path_type=Path), metavar="FOLDER", help="Of paged-kv compile --serve --out."
)
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
    """Serve a checkpoint folder with MAX Serve, for OpenAI's clients. `max serve --help` lists MAX's own flags."""
    from paged_kv.engine.demo_model import FOLDER
    from paged_kv.serve.launch import Serving, serve

    folders, flags = ((), arguments) if use_demo else (arguments[:1], arguments[1:])
    if (not use_demo and not folders) or not all(flag.startswith("-") for flag in flags[:1]):
        raise ContractError("name one folder or --demo; MAX's own flags follow after --")
    folder = Path(folders[0]) if folders else FOLDER
    serve(Serving(folder, flags=flags, **options))


commands.add_command(bench)
commands.add_command(compile_command)
commands.add_command(demo)
commands.add_command(generate)
commands.add_command(inspect)
