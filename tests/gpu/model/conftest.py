"""The kernels that several files run on the model."""

from typing import Any

import pytest

from gpu.model import programs
from gpu.model.generic_kernels import kernels
from gpu.model.hopper_variants import tensor_kernels, variant_of


@pytest.fixture(scope="session")
def ptx() -> dict[Any, str]:
    """The kernels for any GPU, by what they do (`generic_kernels.kernels`)."""
    return kernels()


@pytest.fixture(scope="session")
def variants() -> dict[tuple[int, int, str, str], str]:
    """The PTX of each variant of the Hopper kernel: head_dim, columns, dtype of q, dtype of the cache."""
    return {variant_of(ptx): ptx for ptx in tensor_kernels(programs.hopper())}
