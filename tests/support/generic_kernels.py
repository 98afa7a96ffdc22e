"""The PTX of the kernels for any GPU, and their parameters as bytes."""

import re
import struct
from functools import cache
from typing import Any

from support import gpu_programs

THREADS = 128
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""PTX's names of the dtypes."""


@cache
def kernels() -> dict[Any, str]:
    """The kernels of compile_gpu_kernels.mojo: attention by its static shared memory, the others by name and output."""
    found: dict[Any, str] = {}
    for name, text in gpu_programs.generic["sm_90a"]().items():
        kind = gpu_programs.kind_of(name)
        if kind == "attention":
            found[tuple(map(int, re.findall(r"\.shared \.align \d+ \.b8 \S+\[(\d+)\];", text)))] = text
        elif kind in ("combine", "merge"):
            dtype = next((k for k in ("bf16", "f16") if f"cvt.rn.{k}.f32" in text), "f32")
            found[kind, dtype] = text
        elif kind == "schedule":
            found[kind] = text
        else:
            found[kind, "v4.b32" in text] = text
    return found


def view_bytes(start: int, shape: tuple[int, ...], strides: list[int], table_at: int, table: tuple[int, ...]) -> bytes:
    """A `PagedKVCache` with run-time sizes, as it lies in a kernel's parameters."""
    return struct.pack("<Q4q3qQqQ2qqII", start, *shape, *strides, 0, 0, table_at, *table, table[1], 0, 0)
