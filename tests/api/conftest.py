"""The CPU stands in for a GPU in tests whose parameter `kind` or `place` is "gpu": torch tensors go a GPU's way."""

import pytest

from support.stand_in import stand_in

__all__ = ["stand_in"]  # a fixture


@pytest.fixture(autouse=True)
def _place(request: pytest.FixtureRequest) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "gpu" in [parameters.get(name) for name in ("kind", "place")]:
        request.getfixturevalue("stand_in")
