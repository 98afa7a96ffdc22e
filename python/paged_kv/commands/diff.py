"""`paged-kv diff`: where two runs part, from what `generate --logits` wrote of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paged_kv.engine.run_record import Difference


@click.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
def diff(one: Path, other: Path) -> int:
    """Show the first position, layer and operation at which two runs of the same prompts differ, to the bit.

    ONE and OTHER are files of `generate --logits`. The exit status is 1 where a sample differs.
    """
    from paged_kv.engine.run_record import differences, read_record

    samples = list(differences(read_record(one), read_record(other)))
    for each in samples:
        click.echo(line_of(each))
    return int(any(each.position is not None or each.parted is not None for each in samples))


def line_of(difference: Difference) -> str:
    """A sample's difference as a line for a terminal."""
    name = "sample " + ".".join(map(str, difference.key))
    parted = "" if difference.parted is None else f"; tokens part at position {difference.parted}"
    if difference.position is None:
        return f"{name}: {difference.compared} positions are the same to the bit{parted}"
    return (
        f"{name}: differs from position {difference.position} on, first in {difference.operation}; at"
        f" {difference.differing} of {difference.compared} positions, logits by up to {difference.largest:.3g}{parted}"
    )
