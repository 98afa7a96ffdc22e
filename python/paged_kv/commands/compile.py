"""`paged-kv compile`: what a checkpoint's step needs, compiled before anybody waits for it."""

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
    """Compile ahead for a checkpoint folder or GGUF file: `generate` then starts without a compile.

    Without --out and --target these are the libraries of kernels that the step calls on this CPU, in the cache folder.
    They serve all models of the same dtypes and kinds of weights. A step that holds what they lack, and one of --out or
    --target, is compiled by MAX as a graph of its own.

    Such a step serves all models of one shape (layers, sizes, kinds of weights), dtype, kind of cache and CPU target,
    on any prompts, lengths, page sizes and numbers of pages. Another version of paged-kv, MAX or Mojo needs another
    one. A step in the cache folder is found by itself; a folder of --out may go to other machines, where `generate
    --compiled` names it. It holds machine code: take none from people whose programs you would not run.
    """
    from paged_kv.engine.step import build_libraries, check_target, compile_checkpoint
    from paged_kv.runtime.graph_reading import UnknownGraph

    for name in targets:
        check_target(name)
    if out is None and not targets:
        try:
            count = build_libraries(checkpoint, dtype, cache_dtype, cache_rotation)
        except UnknownGraph as unknown:
            say(f"MAX compiles this step: {unknown}")
        else:
            click.echo(f"ready: {count} libraries of kernels")
            return
    wanted: Sequence[str | None] = targets or (None,)
    say("compiling what is missing: half a minute for each target")
    # A process for each target: MAX's is one for the process.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for target in wanted:
            file = processes.submit(
                compile_checkpoint, checkpoint, dtype, target, out, cache_dtype, cache_rotation
            ).result()
            click.echo(f"ready{'' if target is None else f' for {target}'}: {file}")
