"""The CHANGELOG at a release: what stands under `## [Unreleased]` becomes a version with a date.

python .ci/changelog.py cut [--date YYYY-MM-DD]    writes CHANGELOG.md
python .ci/changelog.py show VERSION               prints the section of a version
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## [Unreleased]"
_HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$")


def section(text: str, version: str) -> str:
    """Return what stands under a version's heading, which must have a date.

    Raises:
        ValueError: there is no such heading, several, one without a date, or nothing below it.
    """
    lines = text.splitlines()
    found = [at for at, line in enumerate(lines) if (match := _HEADING.match(line)) and match["version"] == version]
    if len(found) != 1:
        raise ValueError(f"CHANGELOG.md has {len(found) or 'no'} section{'s' * (len(found) > 1)} for {version}")
    if not _HEADING.match(lines[found[0]])["date"]:  # type: ignore[index]
        raise ValueError(f"CHANGELOG.md gives no date for {version}")
    following = (at for at in range(found[0] + 1, len(lines)) if lines[at].startswith("## "))
    body = "\n".join(lines[found[0] + 1 : next(following, len(lines))]).strip()
    if not re.search(r"^- \S", body, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md says nothing of {version}")
    return body


def cut(text: str, version: str, date: datetime.date) -> str:
    """The text with what was unreleased under `version` and `date`, and an empty unreleased section above it.

    Raises:
        ValueError: there is nothing unreleased, or the version is there already.
    """
    lines = text.splitlines()
    if lines.count(UNRELEASED) != 1:
        raise ValueError(f"CHANGELOG.md needs one line {UNRELEASED!r}")
    if any((match := _HEADING.match(line)) and match["version"] == version for line in lines):
        raise ValueError(f"CHANGELOG.md has a section for {version} already")
    at = lines.index(UNRELEASED)
    lines[at : at + 1] = [UNRELEASED, "", f"## [{version}] - {date.isoformat()}"]
    after = "\n".join(lines) + "\n"
    section(after, version)
    return after


def version() -> str:
    """The package's version."""
    values: dict[str, object] = {}
    exec((ROOT / "python" / "paged_kv" / "versions.py").read_text(), values)
    return str(values["VERSION"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_cut = commands.add_parser("cut", help="unreleased becomes the version of versions.py")
    of_cut.add_argument("--date", type=datetime.date.fromisoformat, default=datetime.date.today())
    commands.add_parser("show", help="a version's section").add_argument("version")
    arguments = parser.parse_args()
    file = ROOT / "CHANGELOG.md"
    try:
        if arguments.command == "cut":
            file.write_text(cut(file.read_text(), version(), arguments.date))
        else:
            print(section(file.read_text(), arguments.version))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
