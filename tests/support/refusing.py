"""Common parts of the contract tests of the API: a call that must be refused, and that must leave its arrays alone."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paged_kv.errors import PagedKVError
from support.kinds import bytes_of


def changed(array: np.ndarray, at: int, value: int) -> np.ndarray:
    """A copy with another value in one place."""
    copy = array.copy()
    copy[at] = value
    return copy


def refuses(call: Callable[[], Any], error: type[Exception], message: str, *arrays: Any) -> None:
    """The call raises that error with that text in its one line, and leaves the arrays as they are."""
    before = bytes_of(arrays)
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert isinstance(raised.value, PagedKVError)
    assert "\n" not in str(raised.value)
    assert bytes_of(arrays) == before
