"""The Hopper kernel for many rows as PTX, and one call of it on a model of the hardware (ptx_machine.py)."""

import re
import struct
from functools import cache
from typing import Any

import numpy as np

from paged_kv import reference
from support import gpu_programs
from support.cases import Cache
from support.generic_kernels import DeviceMemory, view_bytes
from support.page_boxes import PageBoxes
from support.ptx_machine import Machine
from support.ptx_tensor_map import TensorMap

THREADS = 384
SCHEDULE_THREADS = 1024
TILE_HEADS = 128
SHORT = {"float16": "f16", "bfloat16": "bf16"}
most_blocks = 1 << 30
"""Of the attention kernel: fewer than there are items make blocks serve several."""


@cache
def kernels() -> dict[Any, str]:
    """The kernels of compile_many_rows.mojo: ("attention", head_dim, dtype), "schedule", ("combine", dtype)."""
    found: dict[Any, str] = {}
    for name, text in gpu_programs.many_rows().items():
        if "wgmma" in text:
            found["attention", dim_of(text), dtype_of(text)] = text
        elif "attention_gpu_combin" in name:
            found["combine", dtype_of(text)] = text
        else:
            # One for each dtype, which it does not use.
            assert "attention_gpu_schedu" in name, name
            found["schedule"] = text
    return found


def dim_of(text: str) -> int:
    """A product of Q and K reduces over 16 dims."""
    return 16 * len(re.findall(r"wgmma\.mma_async[^{]*\{[^}]*\}, %rd\d+, %rd\d+, p,", text))


def dtype_of(text: str) -> str:
    return "bfloat16" if "cvt.rn.bf16" in text else "float16"


def attend(
    texts: dict[Any, str],
    cache: Cache,
    q: np.ndarray,
    row_batch: np.ndarray,
    row_lengths: np.ndarray,
    options: dict[str, Any],
    wanted_items: int,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The items of the schedule, `[items, 8]` int32, o and lse.

    Args:
        texts: As `kernels`.
        cache: K and V.
        q: `[R, Hq, D]`.
        row_batch: `[R]`.
        row_lengths: `[R]`.
        options: Of `reference.attention`.
        wanted_items: Items that the schedule aims at, beside one a tile: few, so that tiles are split.
        seed: Of the order in which threads run.
    """
    case, memory = cache.case, DeviceMemory()
    rows, heads, dim = q.shape
    put = memory.put
    table_at = put(cache.lookup_table)
    box = min(64, case.page_size & -case.page_size)
    maps, steps, views = [], [], []
    for view, blocks in zip(reference.cache_views(*cache.pages[:2], case.layout, 0), cache.pages[:2], strict=True):
        start = put(blocks) + view.ctypes.data - blocks.ctypes.data
        boxes = PageBoxes.of(view, box)
        maps.append(TensorMap(start, SHORT[case.dtype], boxes.extents, boxes.strides, boxes.sides, 128).encode())
        steps.append(boxes.head_step)
        strides = [stride // view.itemsize for stride in view.strides[:3]]
        views.append(view_bytes(start, view.shape, strides, table_at, cache.lookup_table.shape))

    nan = np.full(q.shape, np.nan, q.dtype)
    lse = np.full((rows, heads), np.nan, np.float32)
    o_at, lse_at = put(nan), put(lse)
    slopes, sinks = (options.get(name, np.zeros(0)).astype(np.float32) for name in ("alibi_slopes", "sinks"))
    arrays = [put(array) for array in (q, row_batch, row_lengths, slopes, sinks)]
    scale = options.get("sm_scale", dim**-0.5) * options.get("q_scale", 1.0) * options.get("k_scale", 1.0)
    capacity = cache.lookup_table.shape[1] * case.page_size
    params = struct.pack(
        "<7Q6i3f2i4x",
        *(arrays[0], o_at, lse_at, *arrays[1:]),
        *(rows, heads, dim, len(cache.lookup_table), capacity, options.get("window_left", -1)),
        *(scale, options.get("logits_soft_cap", 0.0), options.get("v_scale", 1.0)),
        *(len(slopes) > 0, len(sinks) > 0),
    )
    most_rows = TILE_HEADS // (heads // case.num_kv_heads)
    max_items, max_splits = rows + wanted_items, min(rows, wanted_items * most_rows)
    max_partials = 2 * wanted_items * min(rows, most_rows)
    lists = [put(np.full(size, 77, np.int32)) for size in (8 * max_items, 4 * max_splits)]
    count_at = put(np.full(1, 77, np.int32))
    schedule = struct.pack("<3Q5i4x", *lists, count_at, 2 * max_items, max_splits, wanted_items, 0, 1)
    sums = np.full((max_partials, heads, dim), np.nan, np.float32)
    partials = struct.pack("<3Q", put(sums), put(sums[..., 0]), put(sums[..., 0]))

    launch = Machine(texts["schedule"], seed, memory.bytes).launch
    launch((1, 1, 1), SCHEDULE_THREADS, [params, schedule, struct.pack("<i", most_rows)])
    count = int(memory.get(count_at, np.zeros(1, np.int32))[0])
    assert 0 < count <= max_items
    items = memory.get(lists[0], np.zeros((max_items, 8), np.int32))
    assert (items[count:] == 77).all()
    numbers = [struct.pack("<i", number) for number in (box.bit_length() - 1, *steps)]
    launch = Machine(texts["attention", dim, case.dtype], seed, memory.bytes).launch
    blocks = min(count * case.num_kv_heads, most_blocks)
    launch((blocks, 1, 1), THREADS, [*maps, params, views[0], schedule, partials, *numbers], follows=True)
    launch = Machine(texts["combine", case.dtype], seed, memory.bytes).launch
    launch((max_splits, heads, 1), 128, [params, schedule, partials], follows=True)
    return items[:count], memory.get(o_at, nan), memory.get(lse_at, lse)
