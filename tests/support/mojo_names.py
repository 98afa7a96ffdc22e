"""Names that a Mojo file lists, read from its text."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "mojo_ops"


def mojo_tuple(file: str, name: str) -> list[str]:
    """The members of `comptime NAME = (...)`, in lower case and without `DType.`."""
    (members,) = re.findall(rf"^comptime {name} = \(([^)]*)\)", (_FOLDER / file).read_text(), re.MULTILINE)
    return [each.strip().removeprefix("DType.").lower() for each in members.split(",")]
