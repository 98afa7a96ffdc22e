"""Bits packed to bytes, in NumPy's words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paged_kv.errors import ContractError, ContractTypeError, PageTableError, ShapeError
from paged_kv.quantization import packbits, segment_packbits
from support.compare import assert_bits_equal
from support.prefilling import offsets
from support.refusing import refuses


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_bits_are_packed_as_numpy_packs_them(bitorder: str, dtype: str) -> None:
    rng = np.random.default_rng(13)
    for lengths in ((0,), (8, 16), (3, 0, 8, 21, 1), tuple(range(20))):
        bits = (rng.random(sum(lengths)) < 0.5).astype(dtype)
        assert_bits_equal(packbits(bits, bitorder), np.packbits(bits.astype(bool), bitorder=bitorder), what="bytes")
        indptr = offsets(lengths)
        for kind in (np.asarray, torch.from_numpy):
            y, new_indptr = (np.asarray(array) for array in segment_packbits(kind(bits), indptr, bitorder))
            assert new_indptr.tolist() == offsets([-(-n // 8) for n in lengths]).tolist()
            for i in range(len(lengths)):
                part = np.packbits(bits[indptr[i] : indptr[i + 1]].astype(bool), bitorder=bitorder)
                assert_bits_equal(y[new_indptr[i] : new_indptr[i + 1]], part, what=f"segment {i}")


PACKED = [
    (lambda: packbits(np.zeros((2, 2), bool)), ShapeError, "x: expected one dimension, got shape [2, 2]"),
    (lambda: packbits([True]), ContractTypeError, "x: expected an array"),
    (lambda: packbits(np.zeros(3, bool), "middle"), ContractError, "bitorder: expected 'big' or 'little'"),
    (lambda: segment_packbits(np.zeros(3, bool), np.array([0, 2])), ShapeError, "expected an end at x's 3"),
    (lambda: segment_packbits(np.zeros(3, bool), np.array([0, 4, 3])), PageTableError, "indptr decreases at"),
    (lambda: segment_packbits(np.zeros(3, bool), np.array([0.0, 3.0])), ContractTypeError, "expected an integer dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), PACKED)
def test_packing(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    refuses(call, error, message)
