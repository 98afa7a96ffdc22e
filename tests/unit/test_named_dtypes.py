"""No array takes a default that a program can change: each that the package makes names its dtype, and of torch its
device.
"""

import ast
from pathlib import Path

import pytest

import paged_kv

ROOT = Path(paged_kv.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "bench" not in path.parts)
POSITIONS = {"zeros": 1, "ones": 1, "empty": 1, "full": 2}
"""Values of the dtype, in NumPy's functions whose default is float64."""
OF_TORCH = {*POSITIONS, "arange", "eye", "linspace", "tensor", "as_tensor", "scalar_tensor", "rand", "randn", "randint"}


def unnamed(source: str) -> list[str]:
    """The calls that name no dtype, or of torch no device."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Attribute):
            continue
        owner, name = ast.unparse(call.func.value), call.func.attr
        given = {keyword.arg for keyword in call.keywords}
        of_numpy = owner == "np" and name in POSITIONS
        if of_numpy and "dtype" not in given and len(call.args) <= POSITIONS[name]:
            found.append(ast.unparse(call))
        if owner.removesuffix(".numpy") in ("torch", "xp", "jnp", "jax") and name in OF_TORCH:
            found += [ast.unparse(call)] * (not {"dtype", "device"} <= given)
    return found


@pytest.mark.parametrize("source", ["np.zeros(3)", "np.full(3, -1)", "torch.zeros(3, dtype=x)", "xp.arange(3)"])
def test_what_is_found(source: str) -> None:
    assert unnamed(source) == [source]


def test_every_array_names_its_dtype() -> None:
    found = [f"{path.relative_to(ROOT)}: {call}" for path in FILES for call in unnamed(path.read_text())]
    assert not found, "\n".join(found)
