"""The Hopper kernel's PTX, run on a model of the hardware (ptx_machine.py) and compared with float64.

Unused slots and pages are NaN, the page table is shuffled, threads run in random order.
"""

import re
import struct
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from support import gpu_programs
from support.hopper_variants import tensor_kernels, variant_of
from support.page_boxes import PageBoxes
from support.ptx_machine import Machine
from support.ptx_numbers import float8, halves, to_half
from support.ptx_tensor_map import TensorMap

pytestmark = pytest.mark.waits_for(gpu_programs.hopper)

THREADS = 160
KV_HEADS = 2
LOG2E = np.log2(np.e)


@pytest.fixture(scope="module")
def variants() -> dict[tuple[int, int, str, str], str]:
    """The PTX of each variant: head_dim, columns, dtype of q, dtype of the cache."""
    return {variant_of(ptx): ptx for ptx in tensor_kernels(gpu_programs.hopper())}


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.array([to_half(np.float32(value), dtype) for value in x.ravel()], np.uint16).reshape(x.shape)


@cache
def float8_values(dtype: str) -> np.ndarray:
    return np.array([float8(byte, dtype) for byte in range(256)], np.float32)


def tensor_map(machine: Machine, stored: np.ndarray, dtype: str, hnd: bool, slots: int) -> tuple[bytes, int]:
    """Of a cache `[page, slot, head, dim]`, and from one head to the next in it; `hnd`: heads outside of slots."""
    order = (0, 2, 1, 3) if hnd else (0, 1, 2, 3)
    blocks = np.ascontiguousarray(stored.transpose(order))
    boxes = PageBoxes.of(blocks.transpose(order), slots)
    swizzle = 0 if dtype == "u8" else 128
    found = TensorMap(machine.allocate(blocks), dtype, boxes.extents, boxes.strides, boxes.sides, swizzle)
    return found.encode(), boxes.head_step


@dataclass
class Call:
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
    """Whether the item comes from a list; else from the lengths, and is the whole row."""
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

    def run(self, ptx: str, seed: int = 0, at_once: int = 1) -> None:
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

        machine = Machine(ptx, seed)
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
        schedule = struct.pack("<3Q5i4x", items if self.listed else 0, 0, 0, before + 2, 0, 1, 0, self.listed)
        sums = struct.pack("<3Q", acc, greatest, total)
        numbers = [struct.pack("<i", number) for number in (box.bit_length() - 1, *steps)]
        parameters = [*maps, params, view, schedule, sums, *numbers]
        machine.launch(((before + 2) * KV_HEADS, 1, 1), THREADS, parameters, at_once, follows=self.listed)

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


VARIANTS = [
    Call(dim, columns, dtype, kv_dtype, group=group, length=length)
    for dim, length in [(64, 140), (128, 100), (256, 70)]
    for columns, group in [(8, 5), (16, 12)]
    for dtype, kv_dtype in [("bf16", ""), ("f16", ""), ("bf16", "e4m3"), ("f16", "e4m3"), ("bf16", "e5m2")]
    # The other variants differ from these in a conversion alone.
    if dim == 64 or (dtype == "bf16" and kv_dtype != "e5m2")
]


@pytest.mark.parametrize("call", VARIANTS, ids=str)
def test_variants(variants, call):
    call.run(variants[call.dim, call.columns, call.dtype, call.kv_dtype])


TOKEN_RANGES = [
    *(Call(page_size=page_size, length=200) for page_size in (8, 24, 32, 48, 64, 96, 128, 256)),
    *(Call(128, page_size=page_size, length=90, hnd=True) for page_size in (8, 16, 128)),
    *(Call(length=length, group=3) for length in (1, 63, 64, 65, 128, 129)),
    *(Call(begin=begin, length=150, group=1) for begin in (1, 15, 16, 47, 63, 64, 149)),
    Call(page_size=256, begin=250, length=270),
    Call(length=700, group=1),
    Call(length=256, begin=17, partial=1),
    Call(length=256, end=128, partial=0),
    Call(begin=0, end=0),
    Call(begin=0, end=-1),
    Call(bad_page=2),
    Call(bad_page=0, length=16),
    *(Call(length=300, listed=False, rows_before=count) for count in (0, 3)),
    Call(kv_dtype="e4m3", page_size=24, begin=29, length=131),
    Call(kv_dtype="e4m3", page_size=64, begin=63, length=130),
]


@pytest.mark.parametrize("call", TOKEN_RANGES, ids=str)
def test_token_ranges(variants, call):
    call.run(variants[call.dim, call.columns, call.dtype, call.kv_dtype])


OPTIONS = [
    Call(soft_cap=2.0),
    Call(alibi=True),
    Call(sinks=True),
    Call(v_scale=0.5),
    Call(soft_cap=3.0, alibi=True, sinks=True, begin=40, v_scale=2),
    Call(dim=128, columns=16, dtype="f16", group=16, alibi=True, sinks=True, soft_cap=2.0, length=90),
]


@pytest.mark.parametrize("call", OPTIONS, ids=str)
def test_options(variants, call):
    call.run(variants[call.dim, call.columns, call.dtype, call.kv_dtype])


@pytest.mark.parametrize("kv_dtype", ["", "e4m3"])
def test_any_order_of_threads(variants, kv_dtype):
    any_order(Call(length=400, group=2, kv_dtype=kv_dtype), variants[64, 8, "bf16", kv_dtype], 6)


FAULTS = {
    "the wait for the schedule": (r"griddepcontrol\.wait;", "", "griddepcontrol"),
    "a proxy fence": (r"fence\.proxy\.async\.shared::cta;", "", "without a fence"),
    "the barriers of the consumers": (r"bar\.sync\s+1, 128;", "", None),
    "the release of a stage": (r"mbarrier\.arrive\.shared\.b64[^;]*;", "", "deadlock"),
    "the wait for a stage": (r"mbarrier\.try_wait[^;]*;", "", None),
    "the fence of registers": (r"wgmma\.fence\.sync\.aligned;", "", "without a wgmma.fence"),
    "a commit": (r"wgmma\.commit_group\.sync\.aligned;", "", "under way"),
    "a commit in one lane": (
        r"(wgmma\.commit_group\.sync\.aligned;)",
        r"mov.u32 %r9999, %tid.x; setp.ne.b32 %p9999, %r9999, 77; @%p9999 \1",
        "different instructions, one of them .aligned",
    ),
    "the wait for products": (r"wgmma\.wait_group\.sync\.aligned 0;", "", "under way"),
    "the fence after the sums are rescaled": (
        r"(bar\.sync\s+1, 128;(?:\s|//[^\n]*\n)*)wgmma\.fence\.sync\.aligned;",
        r"\1",
        "no wgmma.fence between",
    ),
    # The release of K's stage, with the barrier of the warp and the branch before it, goes before the wait.
    "the wait before the release of a stage": (
        r"(wgmma\.wait_group\.sync\.aligned 0;)((?:\s+//[^\n]*)*)(\s+bar\.warp\.sync[^;]*;\s+@%p\d+ bra\s+(\S+);[^:]*?"
        r"mbarrier\.arrive\.shared\.b64[^;]*;\s+\4:)",
        r"\3\n\1",
        "overwritten before its wgmma.wait_group",
    ),
}
"""What is missing: the part of the text, what stands there instead, and what the model says, where that is sure."""


WRONG_MAPS = {
    "heads": lambda boxes: replace(boxes, head_step=boxes.head_step + 1),
    "rows": lambda boxes: replace(boxes, strides=(2 * boxes.strides[0], *boxes.strides[1:])),
    "groups of rows": lambda boxes: replace(boxes, strides=(*boxes.strides[:2], boxes.strides[0], boxes.strides[3])),
    "a group more": lambda boxes: replace(boxes, sides=(*boxes.sides[:3], boxes.sides[3] + 1, 1)),
}


@pytest.mark.parametrize("wrong", WRONG_MAPS)
def test_a_wrong_map_shows(variants, monkeypatch, wrong):
    of = PageBoxes.of
    monkeypatch.setattr(PageBoxes, "of", lambda view, slots: WRONG_MAPS[wrong](of(view, slots)))
    with pytest.raises(AssertionError):
        Call(128).run(variants[128, 8, "bf16", ""])


@pytest.mark.parametrize("missing", FAULTS)
def test_a_kernel_fails_without(variants, missing):
    """A kernel without one of these fails, so that the tests above can fail."""
    pattern, by, message = FAULTS[missing]
    ptx, count = re.subn(pattern, by, variants[64, 8, "bf16", ""])
    assert count > 0
    with pytest.raises(AssertionError, match=message):
        any_order(Call(length=900, group=2), ptx, 4)


def any_order(call: Call, ptx: str, orders: int) -> None:
    """One block after the other, then all of them at once, and so on."""
    for seed in range(orders):
        call.run(ptx, seed, at_once=1 + seed % 2 * 3)


def test_the_model_tells_operands_apart(variants):
    ptx = variants[64, 8, "bf16", ""]
    assert "p, 1,  1, 1,  1;" in ptx
    with pytest.raises(AssertionError):
        Call().run(ptx.replace("p, 1,  1, 1,  1;", "p, 1,  1, 0,  0;"))
