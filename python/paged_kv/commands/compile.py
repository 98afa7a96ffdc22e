"""`paged-kv compile`: a checkpoint's step, compiled before anybody waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click

from paged_kv.commands.options import cache_dtype_option, rotation_option
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation
from paged_kv.output import say


@click.command("compile")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: the checkpoint's own.")
@cache_dtype_option
@rotation_option
@click.option("--target", "targets", multiple=True, help="A CPU to compile for, as LLVM names it. Default: this one.")
@click.option("--out", type=click.Path(path_type=Path), help="A folder for --compiled. Default: the cache.")
def compile_command(
    checkpoint: Path,
    dtype: str | None,
    cache_dtype: KVFormat | None,
    cache_rotation: CacheRotation | None,
    targets: tuple[str, ...],
    out: Path | None,
) -> None:
    """Compile what a checkpoint folder or GGUF file needs ahead: `generate` then starts without a compile.

    On a CPU most steps run as programs of kernels: without --target and --out the libraries of these are built. Other
    steps are compiled by MAX.

    A step serves all models of one shape (layers, sizes, kinds of weights), dtype, kind of cache and CPU target, on any
    prompts, lengths, page sizes and numbers of pages. Another version of paged-kv, MAX or Mojo needs another one. A
    step in the cache folder is found by itself; a folder of --out may go to other machines, where `generate --compiled`
    names it. It holds machine code: take none from people whose programs you would not run.
    """
    from paged_kv.engine.step import check_target, compile_checkpoint

    for name in targets:
        check_target(name)
    wanted: Sequence[str | None] = targets or (None,)
    say("compiling what is missing: half a minute for each target")
    # A process for each target: MAX's is one for the process.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for target in wanted:
            file = processes.submit(
                compile_checkpoint, checkpoint, dtype, target, out, cache_dtype, cache_rotation
            ).result()
            click.echo(f"ready{'' if target is None else f' for {target}'}: {file}")
