"""Options of every test run."""

import pytest

from isa import CPU_TARGETS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-target",
        choices=CPU_TARGETS,
        help="compile the kernels for this LLVM target instead of the best that this CPU can run",
    )


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--cpu-target")
    if target is not None:
        from max.driver import set_virtual_cpu_target

        set_virtual_cpu_target(target)  # a target that is already set stays in force (`apply_cpu_target`)
