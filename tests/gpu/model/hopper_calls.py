"""A call of the Hopper kernel on the model of the hardware (ptx_machine.py), compared with float64.

Unused slots and pages are NaN, the page table is shuffled, threads run in random order.
"""

import struct
from dataclasses import dataclass
from functools import cache

import numpy as np

from gpu.model.page_boxes import PageBoxes
from gpu.model.ptx_machine import Machine
from gpu.model.ptx_numbers import float8, halves, to_half
from gpu.model.ptx_tensor_map import TensorMap
from gpu.rules import block_threads

KV_HEADS = 2
LOG2E = np.log2(np.e)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.array([to_half(np.float32(value), dtype) for value in x.ravel()], np.uint16).reshape(x.shape)


@cache
def float8_values(dtype: str) -> np.ndarray:
    return np.array([float8(byte, dtype) for byte in range(256)], np.float32)


def tensor_map(machine: Machine, stored: np.ndarray, dtype: str, hnd: bool, slots: int) -> tuple[TensorMap, int]:
    """The strides of a cache `[page, slot, head, dim]`, and those of its heads; `hnd`: heads outside of slots."""
    order = (0, 2, 1, 3) if hnd else (0, 1, 2, 3)
    blocks = np.ascontiguousarray(stored.transpose(order))
    boxes = PageBoxes.of(blocks.transpose(order), slots)
    swizzle = 0 if dtype == "u8" else 128
    found = TensorMap(machine.allocate(blocks), dtype, boxes.extents, boxes.strides, boxes.sides, swizzle)
    return found, boxes.head_step


@dataclass
class HopperCall:
    """One row over a paged cache, and the part of it that an item has."""

    dim: int = 64
    columns: int = 8
    dtype: str = "bf16"
    kv_dtype: str = ""
    group: int = 8
    page_size: int = 16
    length: int = 150
    begin: int = 0
    end: int | None = None
    partial: int = -1
    soft_cap: float = 0
    v_scale: float = 1
    alibi: bool = False
    sinks: bool = False
    bad_page: int | None = None
    hnd: bool = False
    listed: bool = True
    """True if the item comes from a list; else from the lengths, and is the whole row."""
    rows_before: int = 0
    """Rows of padding before this one, where there is no list."""

    def random_cache(self, rng: np.random.Generator, table: np.ndarray, pages: int) -> tuple[np.ndarray, np.ndarray]:
        """As stored, `[page, slot, head, dim]`, and the tokens' values, `[tokens, head, dim]`."""
        shape = (pages, self.page_size, KV_HEADS, self.dim)
        stored_dtype = self.kv_dtype or self.dtype
        # NaN in every dtype.
        stored = np.full(shape, 0x7F, np.uint8) if self.kv_dtype else np.full(shape, 0x7FFF, np.uint16)
        for token in range(self.begin, self.length):
            slot = table[token // self.page_size], token % self.page_size
            if slot[0] >= pages:
                continue
            values = rng.uniform(-1, 1, shape[2:])
            if self.kv_dtype:
                # Bytes below 0x40 are small numbers in both; bit 7 is the sign.
                stored[slot] = rng.integers(0, 0x38, shape[2:]) | rng.integers(0, 2, shape[2:]) << 7
            else:
                stored[slot] = encode(values, self.dtype)
        tokens = np.arange(self.begin, self.length)
        raw = stored[np.minimum(table[tokens // self.page_size], pages - 1), tokens % self.page_size]
        return stored, (float8_values(self.kv_dtype)[raw] if self.kv_dtype else halves(raw, stored_dtype)).astype(float)

    def run(self, ptx: str, seed: int = 0, at_once: int = 1, slow_warp: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        heads = KV_HEADS * self.group
        max_pages = -(-self.length // self.page_size)
        pages = max_pages + 2
        table = rng.permutation(pages)[:max_pages].astype(np.uint32)
        if self.bad_page is not None:
            table[self.bad_page] = pages + 3
        keys, k = self.random_cache(rng, table, pages)
        values, v = self.random_cache(rng, table, pages)
        q = encode(rng.uniform(-1, 1, (heads, self.dim)), self.dtype)
        slopes = rng.uniform(0, 0.05, heads).astype(np.float32)
        sinks = rng.uniform(-1, 2, heads).astype(np.float32)
        scale = self.dim**-0.5
        end = self.length if self.end is None else self.end

        machine = Machine(ptx, seed, slow_warp=slow_warp)
        poison = np.full((3, heads, self.dim), np.nan, np.float32)
        before = self.rows_before
        o = machine.allocate(np.full((before + 1, heads, self.dim), 0x7FFF, np.uint16))
        lse = machine.allocate(np.full((before + 1, heads), np.nan, np.float32))
        acc, greatest, total = (machine.allocate(x) for x in (poison, poison[..., 0], poison[..., 0]))
        box = min(64, self.page_size & -self.page_size)
        # The heads of V lie outside of its slots where those of K lie inside, and the other way round.
        layouts = [(keys, self.hnd), (values, not self.hnd)]
        dtype = "u8" if self.kv_dtype else self.dtype
        maps, steps = zip(*(tensor_map(machine, blocks, dtype, hnd, box) for blocks, hnd in layouts), strict=True)
        queries = np.concatenate([np.full((before, *q.shape), 0x7FFF, np.uint16), q[None]])
        requests, lengths = [-1] * before + [0], [0] * before + [self.length]
        pointers = [queries, np.array(requests, np.int32), np.array(lengths, np.int32), slopes, sinks]
        q_at, batch_at, lengths_at, slopes_at, sinks_at = (machine.allocate(x) for x in pointers)
        params = struct.pack(
            "<7Q6i3f2i4x",
            *(q_at, o, lse, batch_at, lengths_at, slopes_at, sinks_at),
            *(before + 1, heads, self.dim, 1, max_pages * self.page_size, -1),
            *(scale, self.soft_cap, self.v_scale, self.alibi, self.sinks),
        )
        view = struct.pack(
            "<Q4q3qQqQ2qqII",
            *(0, pages, self.page_size, KV_HEADS, self.dim, 0, 0, 0),
            *(0, 0, machine.allocate(table), 1, max_pages, max_pages, 0, 0),
        )
        # A list of two items, the second one past the end.
        items = machine.allocate(np.array([0, self.begin, end, self.partial, -1, 0, 0, 0], np.int32))
        schedule = struct.pack("<2Q5i4x", items if self.listed else 0, 0, before + 2, 0, 1, 0, self.listed)
        sums = struct.pack("<3Q", acc, greatest, total)
        numbers = [struct.pack("<i", number) for number in (box.bit_length() - 1, *steps)]
        parameters = [*maps, params, view, schedule, sums, *numbers]
        threads = block_threads("gpu/hopper", float8=bool(self.kv_dtype))
        machine.launch(((before + 2) * KV_HEADS, 1, 1), threads, parameters, at_once, follows=self.listed)

        found_o = halves(machine.array(o, np.uint16, (before + 1) * heads * self.dim), self.dtype)
        assert not found_o[: before * heads * self.dim].any()
        found_o = found_o[before * heads * self.dim :].reshape(heads, self.dim)
        found_lse = machine.array(lse, np.float32, (before + 1) * heads)[before * heads :]
        states = [machine.array(x, np.float32, poison.size // self.dim).reshape(3, heads) for x in (greatest, total)]
        found_acc = machine.array(acc, np.float32, poison.size).reshape(poison.shape)
        for head in range(heads):
            tokens = np.arange(self.begin, end)
            x = k[: len(tokens), head // self.group] @ halves(q[head], self.dtype).astype(float) * scale
            if self.alibi:
                x += slopes[head] * tokens
            if self.soft_cap:
                x = self.soft_cap * np.tanh(x / self.soft_cap)
            part = v[: len(tokens), head // self.group]
            # P is rounded to 8 or 11 bits; exp2 and the order of sums are the machine's.
            tolerance = 4e-3 if self.dtype == "bf16" else 1e-3
            if self.partial >= 0:
                assert np.isnan(found_o).all()
                assert np.isnan(found_lse).all()
                reference, sum_of_weights = states[0][self.partial, head], states[1][self.partial, head]
                weights = np.exp2(x * LOG2E - reference)
                np.testing.assert_allclose(reference, (x * LOG2E).max(), atol=1e-4)
                np.testing.assert_allclose(sum_of_weights, weights.sum(), rtol=1e-4)
                found = found_acc[self.partial, head] / weights.sum()
                np.testing.assert_allclose(found, weights @ part / weights.sum(), atol=tolerance)
                continue
            assert np.isnan(found_acc).all()
            if self.bad_page is not None or end < 0:
                assert np.isnan(found_o[head]).all()
                assert np.isnan(found_lse[head])
            elif end == 0:
                assert (found_o[head] == 0).all()
                assert found_lse[head] == -np.inf
            else:
                everything = np.append(x, sinks[head]) if self.sinks else x
                sum_of_weights = np.exp(everything - everything.max()).sum()
                expected = np.exp(x - everything.max()) @ part / sum_of_weights * self.v_scale
                np.testing.assert_allclose(found_o[head], expected, atol=tolerance * max(1, abs(expected).max()))
                np.testing.assert_allclose(
                    found_lse[head], (everything.max() + np.log(sum_of_weights)) * LOG2E, atol=1e-4
                )


def any_order(call: HopperCall, ptx: str, orders: int, slow_warp: int | None = None) -> None:
    """One block after the other, then all of them at once, and so on."""
    for seed in range(orders):
        call.run(ptx, seed, 1 + seed % 2 * 3, slow_warp)
