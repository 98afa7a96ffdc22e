"""`paged-kv doctor`: what was found here, and what of it is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paged_kv.arguments import shown
from paged_kv.commands.options import threads_option
from paged_kv.errors import ContractError
from paged_kv.options import check_head_dim

if TYPE_CHECKING:  # MAX takes a third of a second to import: not for `--help`
    from paged_kv.runtime.libraries import Library


@click.command()
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
            raise ContractError(f"{name}: expected at least 1 and below 2^31, got {shown(value)}")
    check_head_dim("--head-dim", head_dim)
    report = collect(_steps)
    click.echo(render(report))
    if compiled:
        click.echo(list_compiled(report))
    if explain:
        devices = report.architectures if arch is None else [arch]
        click.echo(explain_kernels(devices, head_dim, group, page_size, report.target))
    return report.exit_status


def _steps() -> dict[str, list[Library]]:
    """Return the libraries that the step of each model in the package calls, by the command that runs it."""
    from paged_kv.engine.step import demo_libraries

    return {"demo": demo_libraries()}
