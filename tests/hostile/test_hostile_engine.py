"""Generated hostile use of the engine, in this process: a case is named by its seed and number.

A case is a whole run of requests: there is one for every `CALLS_A_RUN` calls of `--hostile-cases`.

pytest tests/hostile/test_hostile_engine.py --hostile-seed 7 --hostile-cases 25000
"""

import traceback
from pathlib import Path

import numpy as np
import pytest

from hostile.engines import EngineRun

CALLS_A_RUN = 5
BATCH = 125
"""Cases of one test."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed = metafunc.config.getoption("--hostile-seed")
    count = -(-metafunc.config.getoption("--hostile-cases") // CALLS_A_RUN)
    batches = [(seed, first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
    metafunc.parametrize("cases", batches, ids=lambda batch: f"seed {batch[0]}, {batch[1]} to {batch[2]}")


def test_requests_get_what_each_gets_alone_whatever_fails_around_them(
    cases: tuple[int, int, int], tmp_path: Path
) -> None:
    seed, first, last = cases
    wrong = []
    for number in range(first, last):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            EngineRun(np.random.default_rng([seed, number]), folder).run()
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"seed {seed}, case {number}: {type(error).__name__} at {at.filename}:{at.lineno}: {error}")
    assert not wrong, "\n".join(["", *wrong])
