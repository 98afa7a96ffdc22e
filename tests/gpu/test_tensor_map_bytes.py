"""The 128 bytes of a tensor map: the driver's, and those that the model of the TMA unit reads (ptx_tensor_map.py)."""

import ctypes

import pytest

from support.ptx_tensor_map import KNOWN, MAP_BYTES, MAX_RANK, SWIZZLES, TensorMap

DRIVER_DTYPES = {"u8": 0, "f16": 6, "bf16": 9}
"""`CUtensorMapDataType`."""
L2_128B = 2  # CUtensorMapL2promotion, as mojo_ops/cache/tensor_map.mojo has it
MAP_ALIGNMENT = 64


def driver_bytes(tensor_map: TensorMap) -> bytes:
    """What `cuTensorMapEncodeTiled` writes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    skipped = -ctypes.addressof(room) % MAP_ALIGNMENT
    rank = len(tensor_map.dims)
    status = cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + skipped),
        ctypes.c_int(DRIVER_DTYPES[tensor_map.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor_map.address),
        (ctypes.c_uint64 * rank)(*tensor_map.dims),
        (ctypes.c_uint64 * max(1, rank - 1))(*tensor_map.strides),
        (ctypes.c_uint32 * rank)(*tensor_map.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(SWIZZLES.index(tensor_map.swizzle)),
        ctypes.c_int(L2_128B),
        ctypes.c_int(0),  # zeros outside
    )
    assert status == 0, f"cuTensorMapEncodeTiled: {status}"
    return room.raw[skipped : skipped + MAP_BYTES]


def of_dimensions(rank: int) -> bytes:
    """`KNOWN` without the fields of dimensions that the map does not have."""
    mask = int.from_bytes(KNOWN, "little")
    for i in range(rank, MAX_RANK):
        mask &= ~(0xFFFFFFFF << 8 * (32 + 4 * i) | 0xFF << 8 * (55 + i) | 7 << 8 * 52 + 3 * i)
        mask &= ~(0xFFFFFFFF << 8 * (12 + 4 * (i - 1)) | 15 << 8 * 28 + 4 * (i - 1)) if i else -1
    return mask.to_bytes(MAP_BYTES, "little")


# Innermost first. Addresses need not be anything's: the driver only writes them down.
MAPS = [
    # Boxes of whole heads of 128 of a page of 16 (page_boxes.py): heads inside of slots, and outside.
    TensorMap(0x7F12_3456_7800, "bf16", (64, 8, 16, 2, 1000), (2048, 128, 16384, 65536), (64, 8, 2, 2, 1), 128),
    TensorMap(0x7F12_3456_7800, "bf16", (64, 8, 226, 2, 1000), (256, 128, 2048, 65536), (64, 8, 2, 2, 1), 128),
    # A page of 16 slots, one head, a swizzle atom of dims; NHD: [dim, head, slot, page], and HND.
    TensorMap(0x7F12_3456_7800, "bf16", (128, 8, 16, 1000), (256, 2048, 65536), (64, 1, 16, 1), 128),
    TensorMap(0x7F12_3456_7800, "f16", (128, 8, 16, 1000), (4096, 256, 65536), (64, 1, 16, 1), 128),
    # Float8, copied as bytes.
    TensorMap(0x7F12_3456_7810, "u8", (256, 2, 64, 70000), (256, 512, 32768), (256, 1, 64, 1)),
    # Strides of more than 32 bits, five dimensions.
    TensorMap(0x7F12_3456_7800, "bf16", (64, 8, 2, 8, 77), (256, 128, 2048, 1 << 36), (64, 8, 2, 2, 1), 128),
    TensorMap(0x7F00_0000_0000, "f16", (1 << 20, 3), (1 << 21,), (16, 3), 32),
    TensorMap(0x7F00_0000_0000, "f16", (1 << 20, 3), (1 << 21,), (32, 3), 64),
]


@pytest.mark.parametrize("tensor_map", MAPS, ids=lambda tensor_map: f"{tensor_map.dtype}-{len(tensor_map.dims)}")
def test_the_driver_writes_what_the_model_reads(tensor_map):
    found, ours, mask = driver_bytes(tensor_map), tensor_map.encode(), of_dimensions(len(tensor_map.dims))
    assert TensorMap.decode(found) == tensor_map, found.hex()
    differ = [i for i in range(MAP_BYTES) if (found[i] ^ ours[i]) & mask[i]]
    assert not differ, f"bytes {differ}: {found.hex()}"
