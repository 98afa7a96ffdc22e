"""`python -m paged_kv.build_kernels`: libraries of kernels, compiled ahead for most CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paged_kv.errors import PagedKVError
from paged_kv.output import say

if TYPE_CHECKING:  # MAX takes a third of a second to import: not for `--help`
    from paged_kv.runtime.libraries import Library


def kernel_bundles() -> dict[str, tuple[Library, ...]]:
    """All that a wheel of kernels holds, by the name of the file."""
    from paged_kv.runtime.libraries import api_libraries

    bundles: dict[str, tuple[Library, ...]] = {}
    for library in api_libraries():
        bundles[library.bundle] = (*bundles.get(library.bundle, ()), library)
    return bundles


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--targets", help="CPUs to compile for, as LLVM names them, with commas. Default: the levels people have."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Gets a folder for each target.")
@click.option("--jobs", type=click.IntRange(1), help="Compiles at a time, 1.5 GB each. Default: one a core.")
@click.option("--bundles", help="Only these files, with commas: attention_float32_float32, layers_float32, ...")
def build_kernels(targets: str | None, out: Path, jobs: int | None, bundles: str | None) -> None:
    """Compile every library of kernels of the API ahead, for CPUs that need not be here.

    What lies in --out and is whole is not compiled again, so the command may be stopped and run again. An installation
    finds them in the package's folder `kernels`; .ci/wheels.py makes wheels of them.
    """
    from paged_kv.runtime import kernel_build

    try:
        failures = kernel_build.build(
            kernel_bundles(),
            out,
            targets.split(",") if targets is not None else kernel_build.TARGETS,
            only=bundles.split(",") if bundles is not None else None,
            jobs=jobs,
            report=say,
        )
    except PagedKVError as error:
        raise click.ClickException(str(error)) from error
    if failures:
        raise click.ClickException("\n".join(failures))


if __name__ == "__main__":
    build_kernels(prog_name="python -m paged_kv.build_kernels")
