"""The kernels for any GPU as PTX, and one call of attention by them on a model of the hardware (ptx_machine.py)."""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gpu.model import programs
from gpu.model.ptx_machine import GLOBAL, Machine

THREADS = 128
SCHEDULE_THREADS = 1024
MAX_SEARCHED_ROWS = 32
WANTED_ITEMS = 3  # of the schedule: few, so that rows are split
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""PTX's names of the dtypes."""

CONVERSIONS = {"append": "cvt.f32.{}", "gather": "cvt.rn.{}"}
"""The dtypes of the rows that become codes, and of those that codes become."""
MOST_POSITIONS = 24
"""Integers that attention without rotary keys makes float32 where the cache holds no codes; else there are more."""
MASKED_PARAMS = 176
"""Bytes of a call's parameters with masks and positions."""


@cache
def kernels() -> dict[Any, str]:
    """The kernels of compile_gpu_kernels.mojo.

    Attention by its static shared memory, with "masked" before it where rows have masks and "codes" where the cache
    holds some; latent attention by the dtype of q and the shared memory; schedule by "masked" or "plain"; combine by
    that and the dtype of o; append and gather over codes by "codes", dtype of the rows and whether they are aligned;
    the others by name.
    """
    found: dict[Any, str] = {}
    for name, text in programs.generic["sm_90a"]().items():
        kind = programs.kind_of(name)
        shared = tuple(map(int, re.findall(r"\.shared \.align \d+ \.b8 \S+\[(\d+)\];", text)))
        row_masks = "masked" if f"_param_0[{MASKED_PARAMS}]" in text else "plain"
        if kind == "attention":
            # Angles of rotary keys, which codes do not have, are made of integers too.
            has_codes = "cos." not in text and text.count("cvt.rn.f32.s") > MOST_POSITIONS
            codes = ["codes"] if has_codes else []
            found[(*([row_masks] if row_masks == "masked" else []), *codes, *shared)] = text
        elif kind in CONVERSIONS and re.search(r"cvt\.rni|cvt\.rn\.f32\.s", text):
            found[kind, "codes", dtype_of(text, CONVERSIONS[kind]), "v4.b32" in text] = text
        elif kind == "latent":
            found[kind, dtype_of(text, "cvt.f32.{}"), shared[0]] = text
        elif kind == "combine":
            found[kind, row_masks, dtype_of(text, "cvt.rn.{}.f32")] = text
        elif kind == "merge":
            found[kind, dtype_of(text, "cvt.rn.{}.f32")] = text
        elif kind == "schedule":
            found[kind, row_masks] = text
        else:
            found[kind, "v4.b32" in text] = text
    return found


def dtype_of(text: str, conversion: str) -> str:
    """The 16-bit dtype that a kernel converts, f32 where it converts none."""
    return next((kind for kind in ("bf16", "f16") if conversion.format(kind) in text), "f32")


def view_bytes(start: int, shape: Sequence[int], strides: list[int], table_at: int, table: tuple[int, ...]) -> bytes:
    """A `PagedKVCache` with run-time sizes, as it lies in a kernel's parameters."""
    return struct.pack("<Q4q3qQqQ2qqII", start, *shape, *strides, 0, 0, table_at, *table, table[1], 0, 0)


class DeviceMemory:
    """Global memory that several kernels share."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def put(self, array: np.ndarray) -> int:
        """The address of a copy of the array's elements."""
        self.bytes.extend(bytes(-len(self.bytes) % 64))
        address = GLOBAL + len(self.bytes)
        self.bytes.extend(np.ascontiguousarray(array).tobytes())
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        """Return what lies there now, in the shape of `like`."""
        return np.frombuffer(bytes(self.bytes), like.dtype, like.size, address - GLOBAL).reshape(like.shape)

    def views(
        self, storage: Sequence[tuple[np.ndarray, np.ndarray]], table: np.ndarray, dim: int | None = None
    ) -> list[bytes]:
        """Views `[page, slot, head, dim]` of arrays, as kernels take them; an array given twice is stored once.

        Of codes, whose arrays have bytes, `dim` is a head's elements.
        """
        table_at = self.put(table)
        at: dict[int, int] = {}
        found = []
        for view, blocks in storage:
            if id(blocks) not in at:
                at[id(blocks)] = self.put(blocks)
            start = at[id(blocks)] + view.ctypes.data - blocks.ctypes.data
            strides = [stride // view.itemsize for stride in view.strides[:3]]
            shape = (*view.shape[:3], dim or view.shape[3])
            found.append(view_bytes(start, shape, strides, table_at, table.shape))
        return found


@dataclass
class Call:
    """The rows and options of a call, and what the kernels are told of them."""

    q: np.ndarray  # [R, Hq, D]
    o: np.ndarray  # [R, Hq, Dv], of any content
    row_batch: np.ndarray
    row_lengths: np.ndarray
    table: np.ndarray
    page_size: int
    options: dict[str, Any]
    scale: float
    row_masks: bytes = b""
    """The fields of a `GpuCustomMasks`."""
    batch_invariant: bool = False

    def placed(self, memory: DeviceMemory) -> tuple[bytes, list[tuple[int, np.ndarray]]]:
        """The parameters as kernels take them, and where o and lse lie, which are NaN, with arrays of their kind."""
        rows, heads, dim = self.q.shape
        results = np.full(self.o.shape, np.nan, self.o.dtype), np.full((rows, heads), np.nan, np.float32)
        places = [(memory.put(result), result) for result in results]
        options = self.options
        slopes = options.get("alibi_slopes", np.zeros(0)).astype(np.float32)
        sinks = options.get("sinks", np.zeros(0)).astype(np.float32)
        arrays = [memory.put(array) for array in (self.q, self.row_batch, self.row_lengths, slopes, sinks)]
        capacity = self.table.shape[1] * self.page_size
        params = struct.pack(
            "<7Q6i3f2i4x",
            *(arrays[0], *(at for at, _ in places), *arrays[1:]),
            *(rows, heads, dim, len(self.table), capacity, options.get("window_left", -1)),
            *(self.scale, options.get("logits_soft_cap", 0.0), options.get("v_scale", 1.0)),
            *(len(slopes) > 0, len(sinks) > 0),
        )
        return params + self.row_masks, places


def attend(
    texts: tuple[str, str, str],
    memory: DeviceMemory,
    call: Call,
    grid: tuple[int, int],
    operands: Sequence[list[bytes]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """o, lse and the items of the schedule.

    The merge runs twice, by the schedule in memory and by each warp's search for its row: alike, to the bit.

    Args:
        texts: The kernels' PTX: schedule, attention, combine.
        memory: Holds what `operands` point to.
        call: Rows and options.
        grid: The grid of the attention kernel, after the items.
        operands: The attention kernel's: those after the parameters of the call, and those after the partial results.
    """
    schedule, attention, combine = (
        Machine(text, seed, memory.bytes) for seed, text in zip((0, 1, 0), texts, strict=True)
    )
    put, (rows, heads, _) = memory.put, call.q.shape
    nan = np.full((2 * WANTED_ITEMS + 64, heads, call.o.shape[2]), np.nan, np.float32)
    params, results = call.placed(memory)
    max_items = rows * 64 if call.batch_invariant else rows + WANTED_ITEMS
    max_splits = rows if call.batch_invariant else min(rows, WANTED_ITEMS)
    lists = [put(np.full(4 * max(1, count), 77, np.int32)) for count in (max_items, max_splits)]
    bounds = (max_items, max_splits, WANTED_ITEMS, call.batch_invariant)
    listed = struct.pack("<2Q5i4x", *lists, *bounds, 1)
    sums = [put(nan), put(nan[..., 0]), put(nan[..., 0])]
    partials = struct.pack("<3Q", *sums)

    schedule.launch((1, 1, 1), SCHEDULE_THREADS, [params, listed])
    items = schedule.array(lists[0], np.int32, 4 * max_items).reshape(-1, 4)
    items = items[items[:, 0] >= 0]
    # The rest of the list is blocks that return at once.
    blocks = min(max_items, len(items) + 1)
    before, after = operands
    attention.launch((blocks, *grid), THREADS, [params, *before, listed, partials, *after])
    written = [range(at, at + array.nbytes) for at, array in zip(sums, (nan, nan[..., 0], nan[..., 0]), strict=True)]
    searched = struct.pack("<2Q5i4x", 0, 0, *bounds, 0)
    assert rows <= MAX_SEARCHED_ROWS
    merged = []
    for by, early in ((listed, None), (searched, written)):
        combine.launch((max_splits, heads, 1), THREADS, [params, by, partials], follows=True, written=early)
        merged.append([memory.get(*result) for result in results])
    for found, again in zip(*merged, strict=True):
        assert found.tobytes() == again.tobytes(), "the merge by a search is not that by the list"
    o, lse = merged[0]
    return o, lse, items


def merge(
    text: str, call: Call, acc: np.ndarray, greatest: np.ndarray, total: np.ndarray, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """The o and lse of the first row of a call, whose partial results `[n, Hq, Dv]` are those from `first` on."""
    memory = DeviceMemory()
    combine = Machine(text, 0, memory.bytes)
    params, results = call.placed(memory)
    splits = memory.put(np.array([0, first, len(acc) - first, 0], np.int32))
    schedule = struct.pack("<2Q5i4x", splits, splits, 1, 1, 1, 0, 1)
    partials = struct.pack("<3Q", *map(memory.put, (acc, greatest, total)))
    combine.launch((1, call.q.shape[1], 1), THREADS, [params, schedule, partials], follows=True)
    o, lse = (memory.get(*result) for result in results)
    return o, lse
