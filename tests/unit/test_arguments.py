"""Checks of plain arguments, and any value as it is shown in a message of one line."""

import numpy as np
import pytest
import torch

from paged_kv.arguments import flag, integer, shown
from paged_kv.errors import ContractError, ContractTypeError


class Broken:
    def __bool__(self) -> bool:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __index__(self) -> int:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (-(2**62), "-4611686018427387904"),
        (10**5000, "(an integer of 16610 bits)"),
        (-(10**5000), "-(an integer of 16610 bits)"),
        ("a\nb", r"'a\nb'"),
        (Broken(), "an object of type Broken"),
        ([10**5000, (1,), (), [[[2]]]], "[(an integer of 16610 bits), (1,), (), [a list of 1]]"),
        ((1, "a"), "(1, 'a')"),
        (list(range(9)), "a list of 9"),
        ({1: 2}, "an object of type dict"),
        (np.zeros((2, 2)), "an object of type ndarray"),
        ([torch.zeros(2)], "[an object of type Tensor]"),
        (np.float32(0.5), "np.float32(0.5)"),
        (np.ndarray, "<class 'numpy.ndarray'>"),
        ("x" * 500, "'" + "x" * 116 + "..."),
    ],
    ids=range(15),
)
def test_every_value_is_shown_in_one_line(value, text):
    assert shown(value) == text


def test_a_tensor_whose_storage_was_freed_is_shown():
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)  # its own repr reads the memory
    assert shown([tensor]) == "[an object of type Tensor]"


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)])
def test_integers_of_every_library(value):
    assert integer("n", value, 3, 3) == 3
    assert type(integer("n", value, 3, 3)) is int


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (True, ContractTypeError, "n: expected an integer, got True of type bool"),
        (3.0, ContractTypeError, "n: expected an integer, got 3.0 of type float"),
        (None, ContractTypeError, "n: expected an integer, got None of type NoneType"),
        (Broken(), ContractTypeError, "n: expected an integer, got an object of type Broken of type Broken"),
        (int, ContractTypeError, "n: expected an integer, got <class 'int'> of type type"),
        (1, ContractError, "n: expected at least 2, got 1"),
        (5, ContractError, "n: expected at most 4, got 5"),
        (-(10**5000), ContractError, "n: expected at least 2, got -.an integer of 16610 bits."),
        (10**5000, ContractError, "n: expected at most 4, got .an integer of 16610 bits."),
    ],
    ids=range(9),
)
def test_what_is_no_integer_in_the_range(value, error, said):
    with pytest.raises(error, match=f"^{said}$"):
        integer("n", value, 2, 4)


def test_flags():
    assert [flag("f", value) for value in (True, False, 1, 0, None, np.True_, torch.tensor(False))] == [
        *(True, False, True, False, False, True, False)
    ]
    for value in (np.zeros(2), torch.zeros(2), Broken()):
        with pytest.raises(ContractTypeError, match=r"^f: expected true or false, got"):
            flag("f", value)
