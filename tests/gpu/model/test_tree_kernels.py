"""Moves of tokens and the rows of trees, as PTX on a model of the hardware (ptx_machine.py).

Found here: a move that is made out of order or without a slot; a row's slot, position or mask that its tree has not.
"""

import struct

import numpy as np
import pytest

from gpu.model import programs
from gpu.model.generic_kernels import THREADS, view_bytes
from gpu.model.ptx_machine import Machine
from paged_kv import reference
from support.cases import CacheCase, build
from support.compare import assert_bits_equal
from support.trees import path_to, random_parents, seen_tokens

pytestmark = pytest.mark.waits_for(programs.generic["sm_90a"])

PAGE = 4


@pytest.mark.parametrize("dim", [8, 7])
def test_moves_of_tokens(dim, ptx):
    """In both layers, one after the other; moves of tokens without a slot are skipped, nothing else is written."""
    cache = build(CacheCase((17, 20, 5), 3, 3, dim, PAGE, rank=6, layers=2, dtype="float16"))
    blocks = np.random.default_rng(1).standard_normal(cache.k_blocks.shape).astype(np.float16)
    block = Machine(ptx["move_tokens", dim == 8])
    at, table_at = block.allocate(blocks), block.allocate(cache.lookup_table)
    views = []
    for view in reference.cache_views(blocks, blocks, "NHD", 0):
        start = at + view.ctypes.data - blocks.ctypes.data
        strides = [stride // 2 for stride in view.strides[:3]]
        views.append(view_bytes(start, view.shape, strides, table_at, cache.lookup_table.shape))
    moves = [(0, 9, 8), (1, 12, 12), (0, 11, 9), (-1, 3, 2), (0, 10**6, 10), (2, -1, 0), (0, 15, 10), (2, 4, 1)]
    pointers = [struct.pack("<Q", block.allocate(np.array(column, np.int32))) for column in zip(*moves, strict=True)]
    stride = struct.pack("<q", PAGE * 3 * dim)
    block.launch((1, 2, 2), THREADS, [*views, stride, *pointers, struct.pack("<i", len(moves))])
    expected = blocks.copy()
    for request, source, target in ((0, 9, 8), (0, 11, 9), (0, 15, 10), (2, 4, 1)):
        (page, slot), (to_page, to_slot) = (
            (cache.lookup_table[request, token // PAGE], token % PAGE) for token in (source, target)
        )
        expected[to_page, :, :, to_slot] = blocks[page, :, :, slot]
    found = block.array(at, np.float16, blocks.size).reshape(blocks.shape)
    assert_bits_equal(found, expected, what="the pool")


@pytest.mark.parametrize("window", [-1, 0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_trees(seed, window, ptx):
    """As their definition says; a parent that is no earlier row counts as -1."""
    rng = np.random.default_rng(seed)
    counts = np.array([14, 0, 23, 5])
    parents = [random_parents(rng, count) for count in counts]
    given = np.concatenate([*parents, [3]]).astype(np.int32)  # and a row of padding
    given[0] = (-7, 2**31 - 1)[seed]
    cached = np.array([7, 1, 0, 100], np.uint32)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    rows, mask_bytes = len(given), 3
    block = Machine(ptx["tree_rows", False])
    batch, slots, positions, firsts = (block.allocate(np.full(rows, 77, np.int32)) for _ in range(4))
    starts = block.allocate(np.full(rows, 77, np.int64))
    mask = block.allocate(np.full(rows * mask_bytes, 0xFF, np.uint8))
    inputs = [struct.pack("<Q", block.allocate(array)) for array in (given, offsets, cached)]
    struct_bytes = struct.pack("<6Q2q", batch, slots, positions, firsts, starts, mask, rows, mask_bytes)
    block.launch((1, 1, 1), THREADS, [struct_bytes, *inputs, struct.pack("<i", 4), struct.pack("<i", window)])
    found = [block.array(at, np.int32, rows) for at in (batch, slots, positions, firsts)]
    starts_found = block.array(starts, np.int64, rows)
    bits = np.unpackbits(block.array(mask, np.uint8, rows * mask_bytes), bitorder="little")
    for b, of_request in enumerate(parents):
        for i in range(len(of_request)):
            r, length = int(offsets[b]) + i, int(cached[b])
            position = length + len(path_to(of_request, i)) - 1
            assert [int(column[r]) for column in found] == [b, length + i, position, length]
            kept = [
                j
                for j in range(length + i + 1)
                if (j < length or starts_found[r] < 0 or bits[starts_found[r] + j - length])
                and (window < 0 or j >= position - window)
            ]
            assert kept == sorted(seen_tokens(of_request, i, length, window))
    assert [int(column[-1]) for column in found[:2]] == [-1, 0]
    assert starts_found[-1] == -1
