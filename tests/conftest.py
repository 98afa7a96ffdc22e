"""Options of every test run."""

import pytest

from support import background
from support.isa import CPU_TARGETS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-target",
        choices=CPU_TARGETS,
        help="compile the kernels for this LLVM target instead of the best that this CPU can run",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "waits_for(*jobs): jobs of background.py that the test wants the results of")
    target = config.getoption("--cpu-target")
    if target is not None:
        from max.driver import set_virtual_cpu_target

        set_virtual_cpu_target(target)  # a target that is already set stays in force (`apply_cpu_target`)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("waits_for") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    for item in session.items:
        for marker in item.iter_markers("waits_for"):
            for job in marker.args:
                job.start()


def pytest_sessionfinish() -> None:
    background.stop()
