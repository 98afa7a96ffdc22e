"""`python -m paged_kv.build_kernels`: every variant of the array API, compiled ahead for the CPUs that people have."""

from __future__ import annotations

from pathlib import Path

import click

from paged_kv.errors import PagedKVError
from paged_kv.output import say


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--targets", help="CPUs to compile for, as LLVM names them, with commas. Default: the levels people have."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Gets a folder for each target.")
@click.option("--jobs", type=click.IntRange(1), help="Compiles at a time, 1.5 GB each. Default: one a core.")
@click.option("--families", help="Only these files, with commas: attention_float32_float32, copies, merges, ...")
def build_kernels(targets: str | None, out: Path, jobs: int | None, families: str | None) -> None:
    """Compile every variant of the array API ahead, for CPUs that need not be here.

    What lies in --out and is whole is not compiled again, so the command may be stopped and run again. An installation
    finds them in the package's folder `kernels`; .ci/wheels.py makes wheels of them.
    """
    # Not at the top: --help needs no MAX.
    from paged_kv.runtime import kernel_build
    from paged_kv.runtime.api_variants import API_FAMILIES

    try:
        failures = kernel_build.build(
            out,
            targets.split(",") if targets is not None else kernel_build.TARGETS,
            families=families.split(",") if families is not None else tuple(API_FAMILIES),
            jobs=jobs,
            report=say,
        )
    except PagedKVError as error:
        raise click.ClickException(str(error)) from error
    if failures:
        raise click.ClickException("\n".join(failures))


if __name__ == "__main__":
    build_kernels(prog_name="python -m paged_kv.build_kernels")
