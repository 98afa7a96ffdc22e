"""`paged-kv warmup`: the kernels of the API, compiled before the first call."""

from __future__ import annotations

import click

from paged_kv.output import say


@click.command()
@click.option("--q-dtype", "q_dtypes", multiple=True, help="Of queries; repeat it. Default: all.")
@click.option("--kv-dtype", "kv_dtypes", multiple=True, help="Of caches; repeat it. Default: all.")
@click.option("--exact", is_flag=True, help="Compile for this very CPU what came with the package for a lower target.")
def warmup(q_dtypes: tuple[str, ...], kv_dtypes: tuple[str, ...], exact: bool) -> None:
    """Compile the kernels now, so that the first call does not wait."""
    from paged_kv.runtime.warmup import warmup as compile_variants

    say("compiling what is missing: a minute or two for all dtypes")
    for variant in compile_variants(q_dtypes or None, kv_dtypes or None, exact=exact):
        click.echo(f"ready: {variant}")
