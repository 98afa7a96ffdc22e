"""`paged-kv compile`: a checkpoint's step, compiled before anybody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click

from paged_kv.commands.options import cache_dtype_option, rotate_option
from paged_kv.errors import ContractError
from paged_kv.options import CacheRotation, KVFormat
from paged_kv.output import say


@click.command("compile")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="DIR [-- MAX'S OWN FLAGS]")
@click.option("--serve", "for_server", is_flag=True, help="For paged-kv serve, instead of generate.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: its own; with --serve bfloat16, as for serve."
)
@cache_dtype_option
@rotate_option
@click.option("--page-size", type=int, help="With --serve: tokens in a page, as for serve.  [default: 128]")
@click.option("--target", "targets", multiple=True, help="A CPU to compile for, as LLVM names it. Default: this one.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for --compiled. Default: the cache.")
def compile_command(
    arguments: tuple[str, ...],
    for_server: bool,
    dtype: str | None,
    cache_dtype: KVFormat | None,
    rotate: CacheRotation | None,
    page_size: int | None,
    targets: tuple[str, ...],
    out: Path | None,
) -> None:
    """Compile the step of a checkpoint folder or GGUF file ahead: `generate` then starts without a compile.

    A step serves all models of one shape (layers, sizes, kinds of weights), dtype, kind of cache and CPU target, on any
    prompts, lengths, page sizes and numbers of pages. Another version of paged-kv, MAX or Mojo needs another one. A
    step in the cache folder is found by itself; a folder of --out may go to other machines, where `generate --compiled`
    names it. It holds machine code: take none from people whose programs you would not run.

    With --serve, what `serve` loads is compiled: a step for one size of pages, and MAX's sampler and log-probabilities.
    Give the --dtype, the --page-size and MAX's own flags that the server will get.
    """
    from paged_kv.engine.step import check_target

    if not arguments or not all(flag.startswith("-") for flag in arguments[1:2]):
        raise ContractError("name one folder or GGUF file; with --serve, MAX's own flags follow after --")
    if not for_server and (arguments[1:] or page_size is not None):
        what = "--page-size" if page_size is not None else arguments[1]
        raise ContractError(f"{what} is for --serve: the step of generate does not depend on it")
    for option, value in (("--cache-dtype", cache_dtype), ("--rotate", rotate)):
        if for_server and value is not None:
            raise ContractError(f"{option} is for the step of generate: the server has none")
    for name in targets:
        check_target(name)
    checkpoint = Path(arguments[0])
    job: Callable[[str | None, Path | None], list[Path]]
    if for_server:
        from paged_kv.serve.ahead import compile_for_server
        from paged_kv.serve.environment import check_environment
        from paged_kv.serve.launch import PAGE_SIZE, Serving

        check_environment()
        size = PAGE_SIZE if page_size is None else page_size
        serving = Serving(checkpoint, "", 0, dtype or "bfloat16", 16, size, arguments[1:])
        job = partial(compile_for_server, serving)
    else:
        job = partial(_compile_step, checkpoint, dtype, cache_dtype, rotate)
    wanted: Sequence[str | None] = targets or (None,)
    say(f"compiling what is missing: {'two minutes' if for_server else 'half a minute'} for each target")
    # A process for each target: MAX's is one for the process.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for target in wanted:
            for file in processes.submit(job, target, out).result():
                click.echo(f"ready{'' if target is None else f' for {target}'}: {file}")


def _compile_step(
    checkpoint: Path,
    dtype: str | None,
    cache_dtype: KVFormat | None,
    rotate: CacheRotation | None,
    target: str | None,
    out: Path | None,
) -> list[Path]:
    from paged_kv.engine.step import compile_checkpoint

    return [compile_checkpoint(checkpoint, dtype, target, out, cache_dtype, rotate)]
