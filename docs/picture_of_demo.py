"""Runs `paged-kv demo` and draws what it prints: `python docs/picture_of_demo.py` writes docs/pictures/demo.svg."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 112
"""Characters of a line; longer ones end in an ellipsis."""


def main() -> None:
    command = [str(Path(sys.executable).with_name("paged-kv")), "demo"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ paged-kv demo", style="bold"))
    for line in done.stdout.splitlines():
        short = line if len(line) < WIDTH else f"{line[: WIDTH - 2]}…"
        console.print(Text(short, style="bold green" if re.match(r"\d\. ", line) else ""))
    svg = console.export_svg(title="paged-kv demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts of another host
    (Path(__file__).parent / "pictures" / "demo.svg").write_text(svg.replace("Fira Code", "ui-monospace"))


if __name__ == "__main__":
    main()
