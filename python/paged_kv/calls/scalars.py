"""Numbers that FlashInfer takes as arrays of one element too."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_kv.arrays import devices
from paged_kv.arrays.dtypes import is_float
from paged_kv.arrays.host import as_numpy


def one_number(value: Any, name: str) -> Any:
    """The number in a float array of one element; any other value as it is, for others to check.

    Raises:
        ContractTypeError: it is an array on a GPU, which would have to be waited for.
    """
    if isinstance(value, type) or not (isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")):
        return value
    devices.require_host(value, name, "it is read on the host")
    view = as_numpy(value, name)
    return float(view.reshape(())) if view.size == 1 and is_float(view.dtype) else value
