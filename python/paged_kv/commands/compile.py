"""`paged-kv compile`: what a checkpoint's step needs, built before anybody waits for it."""

from __future__ import annotations

from pathlib import Path

import click

from paged_kv.commands.options import cache_dtype_option, rotation_option
from paged_kv.kv_formats import KVFormat
from paged_kv.options import CacheRotation


@click.command("compile")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: the checkpoint's own.")
@cache_dtype_option
@rotation_option
def compile_command(
    checkpoint: Path, dtype: str | None, cache_dtype: KVFormat | None, cache_rotation: CacheRotation | None
) -> None:
    """Compile ahead for a checkpoint folder or GGUF file: `generate` then starts without a compile.

    On a CPU these are the libraries of kernels that the step calls. They serve all models of the same dtypes and kinds
    of weights. On a GPU it is the step itself, which serves all models of one shape (layers, sizes, kinds of weights),
    dtype and kind of cache. Both lie in the cache folder; another version of paged-kv, MAX or Mojo needs others.
    """
    from paged_kv.engine.step import compile_checkpoint

    click.echo(f"ready: {compile_checkpoint(checkpoint, dtype, cache_dtype, cache_rotation)}")
