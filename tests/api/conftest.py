"""The variants that a module executes, and the CPU in a GPU's place: in tests whose parameter `kind` or `place` is
"gpu", torch tensors go a GPU's way.
"""

import pytest

from support import calls, decoding, latent, prefilling
from support.stand_in import stand_in

__all__ = ["stand_in"]  # a fixture


@pytest.fixture(autouse=True)
def _place(request: pytest.FixtureRequest) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "gpu" in [parameters.get(name) for name in ("kind", "place")]:
        request.getfixturevalue("stand_in")


@pytest.fixture(scope="session")
def decode_variants() -> None:
    decoding.load_variants()


@pytest.fixture(scope="session")
def masked_variants() -> None:
    prefilling.load_variants()


@pytest.fixture(scope="session")
def latent_variants() -> None:
    latent.load_variants()


@pytest.fixture(scope="session")
def all_variants() -> None:
    calls.load_variants()
