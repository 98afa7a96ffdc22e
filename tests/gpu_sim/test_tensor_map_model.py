"""The model's tensor maps (ptx_tensor_map.py): their bytes, and which bytes of memory a copy finds."""

import numpy as np
import pytest

from support.ptx_tensor_map import KNOWN, TensorMap

# [dim, slot, head, page], innermost first: 64 of 128 dims, 16 slots, a swizzled row of 128 bytes.
PAGES = TensorMap(0x7F1234567800, "bf16", (128, 16, 8, 1000), (2048, 256, 1 << 36), (64, 16, 1, 1), 128)


def bits(raw: bytes, first: int, count: int) -> int:
    """`count` bits from bit `first` on; the bytes are little-endian."""
    return int.from_bytes(raw, "little") >> first & (1 << count) - 1


def test_fields_lie_where_ptxas_puts_them():
    """The offsets are those of the stores that ptxas makes of each `tensormap.replace`."""
    raw = PAGES.encode()
    assert len(raw) == 128
    assert bits(raw, 0, 64) == PAGES.address
    assert bits(raw, 8 * 8 + 4, 3) == 3  # rank - 1
    assert bits(raw, 8 * 8 + 7, 4) == 10  # bfloat16
    assert bits(raw, 8 * 8 + 11, 2) == 0  # not interleaved
    assert bits(raw, 8 * 8 + 13, 2) == 3  # 128 bytes
    assert bits(raw, 8 * 8 + 15, 1) == 0  # zeros outside
    assert [bits(raw, 8 * (12 + 4 * i), 32) for i in range(4)] == [128, 16, 0, 0]
    assert [bits(raw, 8 * 28 + 4 * i, 4) for i in range(4)] == [0, 0, 1, 0]
    assert [bits(raw, 8 * (32 + 4 * i), 32) for i in range(5)] == [127, 15, 7, 999, 0]
    assert bits(raw, 8 * 52, 15) == 0  # element strides of 1
    assert list(raw[55:60]) == [63, 15, 0, 0, 0]
    assert not any(raw[60:])


@pytest.mark.parametrize(
    "tensor_map",
    [
        PAGES,
        TensorMap(1 << 40, "u8", (256, 5), (256,), (256, 5)),
        TensorMap(64, "f16", (1 << 20,), (), (8,), 32),
        TensorMap(16, "bf16", (64, 8, 6, 2, 77), (256, 128, 2048, 1 << 20), (64, 8, 6, 2, 1), 128),
    ],
    ids=lambda tensor_map: str(len(tensor_map.dims)),
)
def test_bytes_are_read_back(tensor_map):
    raw = tensor_map.encode()
    assert TensorMap.decode(raw) == tensor_map
    # What a driver adds elsewhere is not read.
    everywhere = bytes(a | ~known & 0xFF for a, known in zip(raw, KNOWN, strict=True))
    assert TensorMap.decode(everywhere) == tensor_map


def test_a_box_is_what_numpy_slices():
    pages = np.random.default_rng(0).integers(0, 256, (3, 8, 4, 64, 2), np.uint8)  # [page, slot, head, dim, byte]
    memory = np.concatenate([np.zeros(16, np.uint8), pages.ravel()])
    sizes = (64, 4, 8, 3)
    tensor_map = TensorMap(0, "f16", sizes, pages.strides[2::-1], (32, 2, 4, 1), 64)
    found = tensor_map.copied(memory, 16, (32, 1, 4, 2)).reshape(4, 2, 32, 2)
    np.testing.assert_array_equal(found, pages[2, 4:8, 1:3, 32:])


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("below", [False, True])
def test_zeros_outside_the_tensor(axis, below):
    pages = np.random.default_rng(0).integers(1, 256, (3, 8, 4, 32, 2), np.uint8)
    memory = pages.ravel()
    tensor_map = TensorMap(0, "f16", (32, 4, 8, 3), pages.strides[2::-1], (16, 2, 2, 2))
    at = [0, 0, 0, 0]
    at[axis] = -1 if below else tensor_map.dims[axis] - 1
    found = tensor_map.copied(memory, 0, tuple(at)).reshape(2, 2, 2, 16, 2)
    inside = np.ones((2, 2, 2, 16), bool)
    np.moveaxis(inside, 3 - axis, 0)[slice(0, 1) if below else slice(1, None)] = False
    assert (found.any(axis=-1) == inside).all()


@pytest.mark.parametrize(
    "change",
    [
        {"address": 8},
        {"strides": (2048, 264, 1 << 36)},
        {"strides": (2048, 256, 1 << 40)},
        {"strides": (2048, 256)},
        {"box": (64, 257, 1, 1)},
        {"box": (128, 16, 1, 1)},
        {"box": (60, 16, 1, 1)},
        {"dims": (128, 16, 0, 1000)},
    ],
    ids=str,
)
def test_what_the_driver_refuses(change):
    with pytest.raises(AssertionError):
        TensorMap(**{**vars(PAGES), **change})
