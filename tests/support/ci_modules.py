"""The modules of .ci, which are no package: what checks, builds and releases."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[2] / ".ci"


def ci_module(name: str) -> ModuleType:
    """A module of its own, which finds its neighbours; its name is free again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CI))
        patch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module
