"""The asynchronous matrix products (wgmma) of a warp: what they read, when their results appear, what is a fault.

Modelled, each a failed assertion where a kernel breaks it:

- A product reads its operands in shared memory at any time from its issue to the warp's `wgmma.wait_group`: they are
  read at both ends, and have to be the same.
- Its sums belong to it until then: they are taken from the threads and come back at the wait. Another instruction that
  reads one finds no such register; one that writes one is seen at the wait.
- A `wgmma.fence` stands before the first product, and between any other access to a register and a product that uses
  it. Products that add to the same registers need none between them.
- Bytes that a thread stored are behind a proxy fence (`ptx_block.py`).

Shapes: m64nNk16, bfloat16 or float16 with sums in float32; both operands in shared memory, with either dimension
adjacent, swizzled by 128 bytes or not. Not modelled: other shapes and dtypes, operands in registers, a wait that leaves
products under way, base offsets of descriptors, how the tensor cores round a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from gpu.model.ptx_numbers import halves
from gpu.model.ptx_units import swizzled

WARP_ROWS = 16
"""Rows of a product [64, columns] that each warp of a warpgroup has."""
SWIZZLES = {0: 0, 1: 128}
"""Bytes of a swizzled row, by the mode in a descriptor."""


@dataclass(frozen=True)
class ProductForm:
    """A wgmma as it stands in the text."""

    columns: int
    kind: str  # "bf16" or "f16"
    sums: tuple[str, ...]  # registers, columns / 2 a thread
    a_transposed: bool
    b_transposed: bool


def product_form(shape: str, kinds: list[str], operands: list[str]) -> ProductForm:
    """Parse the shape, the dtypes and the operands of a `wgmma.mma_async`."""
    assert shape.startswith("m64n"), f"no shape of a wgmma: {shape}"
    assert shape.endswith("k16"), f"a shape that the model does not have: {shape}"
    columns = int(shape[4:-3])
    assert columns % 8 == 0, f"columns of a wgmma: {columns}"
    assert kinds in (["f32", "bf16", "bf16"], ["f32", "f16", "f16"]), f"dtypes that the model does not have: {kinds}"
    sums = registers_of(operands[0])
    assert len(sums) == columns // 2, f"{len(sums)} sums for {columns} columns"
    *signs, a_transposed, b_transposed = operands[4:]
    assert signs == ["1", "1"], f"operands of a wgmma: {operands}"
    return ProductForm(columns, kinds[1], sums, a_transposed == "1", b_transposed == "1")


def registers_of(operand: str) -> tuple[str, ...]:
    """Those of a list in braces; none of any other operand."""
    return tuple(x.strip() for x in operand.strip("{}").split(",")) if operand.startswith("{") else ()


# Operands and results


@cache
def operand_addresses(descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """[rows, 16]: where a wgmma finds the 2-byte elements of an operand."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    used = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62
    assert not descriptor & ~used, f"bits of a descriptor that the model does not have: {descriptor:x}"
    row, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
    span = SWIZZLES[descriptor >> 62]
    if span and not transposed:
        at = start + row // 8 * stride + row % 8 * span + k * 2
    elif span:
        at = start + row // (span // 2) * leading + k // 8 * stride + k % 8 * span + row % (span // 2) * 2
    elif not transposed:
        at = start + row // 8 * stride + k // 8 * leading + row % 8 * 16 + k % 8 * 2
    else:
        at = start + row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    return swizzled(at, span)


@cache
def positions(elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each of a lane's sums in a warp's part [16, columns] of a result, `[32, elements]`."""
    lane, i = np.meshgrid(np.arange(32), np.arange(elements), indexing="ij")
    return lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2


# Products under way


@dataclass
class Product:
    """A warp's part of one wgmma: 16 rows."""

    form: ProductForm
    adds: bool
    """To the sums; they are replaced otherwise."""
    a: np.ndarray  # [16, 16], as bits
    a_at: np.ndarray  # their addresses
    b: np.ndarray  # [columns, 16]
    b_at: np.ndarray

    def result(self, shared: np.ndarray, before: np.ndarray) -> np.ndarray:
        """The lanes' sums, `[32, columns / 2]`, at the wait; `shared` is shared memory as 16-bit elements."""
        for bits, at in ((self.a, self.a_at), (self.b, self.b_at)):
            same = np.array_equal(shared[at // 2], bits)
            assert same, "shared memory that a wgmma reads was overwritten before its wgmma.wait_group"
        a, b = (halves(bits, self.form.kind) for bits in (self.a, self.b))
        with np.errstate(invalid="ignore", over="ignore"):
            sums = (a @ b.T)[positions(self.form.columns // 2)]
            return before + sums if self.adds else sums


@dataclass
class Products:
    """The products of one warp, from their issue to the wait for them.

    Args:
        registers: The registers of each lane.
    """

    registers: list[dict[str, int]]
    fenced: bool = False
    """A `wgmma.fence` was met."""
    open: list[Product] = field(default_factory=list)
    committed: list[Product] = field(default_factory=list)
    sums: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    """The sums of products under way as float32 `[32, columns / 2]`, by their registers."""

    def fence(self, touched: list[set[str]]) -> None:
        """`wgmma.fence`; `touched` are the registers that each lane has accessed since its latest one."""
        self.fenced = True
        for lane in touched:
            lane.clear()

    def issue(self, product: Product, touched: list[set[str]]) -> None:
        names = product.form.sums
        assert self.fenced, "a wgmma without a wgmma.fence before it"
        late = set().union(*touched).intersection(names)
        assert not late, f"no wgmma.fence between another access to {sorted(late)[:4]} and a wgmma that uses them"
        if names not in self.sums:
            self.sums[names] = self.take(names, product.adds).view(np.float32)
        self.open.append(product)

    def take(self, names: tuple[str, ...], adds: bool) -> np.ndarray:
        """[32, registers] uint32: their values, which the lanes have no longer; what is not read need not be there."""
        if not adds:
            return np.array([[lane.pop(name, 0) for name in names] for lane in self.registers], np.uint32)
        try:
            return np.array([[lane.pop(name) for name in names] for lane in self.registers], np.uint32)
        except KeyError as error:
            raise AssertionError(
                f"a wgmma reads {error}, which has no value or is another's that is under way"
            ) from None

    def commit(self) -> None:
        self.committed += self.open
        self.open = []

    def wait(self, shared: np.ndarray) -> None:
        """`wgmma.wait_group 0`: what was committed is done."""
        for product in self.committed:
            self.sums[product.form.sums] = product.result(shared, self.sums[product.form.sums])
        self.committed = []
        left = {product.form.sums for product in self.open}
        for names in [names for names in self.sums if names not in left]:
            for lane, bits in zip(self.registers, self.sums.pop(names).view(np.uint32).tolist(), strict=True):
                written = [name for name in names if name in lane]
                assert not written, f"{written[:4]} of a wgmma written before its wgmma.wait_group"
                lane.update(zip(names, bits, strict=True))

    def end(self) -> None:
        assert not self.open, "wgmmas that were never committed"
        assert not self.committed, "wgmmas that were never waited for"
