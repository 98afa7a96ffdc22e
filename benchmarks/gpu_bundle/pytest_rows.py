"""A pytest plugin: each test's outcome is a line of its own, a JSON object, which `run.py` makes a row of."""

from __future__ import annotations

import json
from typing import Any


class TestRows:
    """Prints the rows.

    Args:
        plugins: pytest's, of which the terminal reporter is one once all are there.
    """

    def __init__(self, plugins: Any) -> None:
        self._plugins = plugins

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid.rpartition("/")[2], "outcome": report.outcome, "phase": report.when}
            if report.failed:
                said = [line[1:] for line in report.longreprtext.splitlines() if line.startswith("E ")]
                row["reason"] = " ".join(" ".join(said).split())[:300]
            reporter = self._plugins.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(json.dumps({**row, "seconds": round(report.duration, 2)}))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(TestRows(config.pluginmanager))
