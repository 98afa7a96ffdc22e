"""The model's matrix instruction (ptx_wgmma.py) on its own: shapes and forms of operands, and the rules of its use.

A kernel of a few lines copies tiles by TMA, multiplies them once and stores the sums. Tiles lie in shared memory as the
copy engine swizzles them, and are found there through descriptors.
"""

import re
import struct

import numpy as np
import pytest

from support.generic_kernels import DeviceMemory
from support.ptx_machine import Machine
from support.ptx_numbers import halves, to_half
from support.ptx_tensor_map import TensorMap
from support.ptx_units import SHARED

Q = struct.Struct("<Q")
A_AT, B_AT = SHARED + 1024, SHARED + 64 * 1024
REDUCED = 64
"""Elements that four wgmmas reduce over."""

KERNEL = """
.extern .shared .align 1024 .b8 memory[];
.visible .entry k(
    .param .align 64 .b8 k_param_0[128], .param .align 64 .b8 k_param_1[128], .param .b64 k_param_2,
    .param .b64 k_param_3
)
{
    ld.param::entry.b64 %rd1, [k_param_2];
    ld.param::entry.b64 %rd3, [k_param_3];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, ROW_BYTES;
    add.s64 %rd1, %rd1, %rd2;
    mul.wide.u32 %rd2, %r1, 64;
    add.s64 %rd3, %rd3, %rd2;
    setp.ne.b32 %p1, %r1, 0;
    @%p1 bra LOADED;
    mbarrier.init.shared.b64 [memory], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [memory], BYTES;
    COPIES
LOADED:
    bar.sync 0;
    mov.b32 %r2, memory;
    mov.b32 %r3, 0;
    mbarrier.try_wait.parity.shared::cta.b64 P1, [%r2], %r3;
    LOADS
    wgmma.fence.sync.aligned;
    PRODUCTS
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
RESULTS:
    STORES
    ret;
}
"""


def kernel(columns: int, kind: str, a: list[str], b: list[int], flags: list[int], copies: list[str], size: int) -> str:
    """Its text: products of the descriptors or registers `a` with the descriptors `b`, one after the other."""
    sums = [f"%r{100 + i}" for i in range(columns // 2)]
    products = []
    for step, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
        products.append(f"setp.ne.b32 p, {step}, 0;")
        products.append(f"mov.b64 %rd5, {of_b};")
        if not of_a.startswith("{"):
            products += [f"mov.b64 %rd4, {of_a};"]
            of_a = "%rd4"
        products.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{', '.join(sums)}}}, "
            f"{of_a}, %rd5, p, {', '.join(map(str, flags))};"
        )
    loads = [f"ld.global.v4.b32 {of_a}, [%rd3+{16 * i}];" for i, of_a in enumerate(a) if of_a.startswith("{")]
    stores = [f"st.global.b32 [%rd1+{4 * i}], {register};" for i, register in enumerate(sums)]
    parts = {"COPIES": copies, "LOADS": loads, "PRODUCTS": products, "STORES": stores}
    text = KERNEL.replace("ROW_BYTES", str(2 * columns)).replace("BYTES", str(size))
    return re.sub("|".join(parts), lambda match: "\n    ".join(parts[match[0]]), text)


def copy(which: int, target: int, coordinates: tuple[int, int]) -> list[str]:
    x, y = coordinates
    return [
        f"mov.b32 %r10, {target};",
        f"mov.b64 %rd10, k_param_{which};",
        f"mov.b32 %r11, {x};",
        f"mov.b32 %r12, {y};",
        "mov.b32 %r13, memory;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%r10], [%rd10, {%r11, %r12}], [%r13];",
    ]


class Operand:
    """[rows, REDUCED] in shared memory at `at`, copied from an array with that or the other dimension adjacent."""

    def __init__(
        self, memory: DeviceMemory, which: int, at: int, x: np.ndarray, transposed: bool, swizzle: int
    ) -> None:
        array = x.T if transposed else x
        span = swizzle // 2  # elements in a swizzled row
        height, width = array.shape
        self.map = TensorMap(memory.put(array), "bf16", (width, height), (2 * width,), (span, height), swizzle)
        panels = range(-(-width // span))
        panel_bytes = height * swizzle
        self.bytes = len(panels) * panel_bytes
        self.copies = [line for i in panels for line in copy(which, at + i * panel_bytes, (i * span, 0))]
        mode = {128: 1, 64: 2, 32: 3}[swizzle]
        self.descriptors = []
        for step in range(REDUCED // 16):
            if transposed:
                start, leading, stride = at + step * 16 * swizzle, panel_bytes, 8 * swizzle
            else:
                panel, inside = divmod(step * 32, swizzle)
                start, leading, stride = at + panel * panel_bytes + inside, 0, 8 * swizzle
            self.descriptors.append(start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62)


def encoded(x: np.ndarray, kind: str) -> np.ndarray:
    return np.array([to_half(np.float32(value), kind) for value in x.ravel()], np.uint16).reshape(x.shape)


def multiply(
    columns: int,
    kind: str = "bf16",
    *,
    a_in_registers: bool = False,
    a_transposed: bool = False,
    b_transposed: bool = False,
    swizzle: int = 128,
    signs: tuple[int, int] = (1, 1),
    edit: tuple[str, str] | None = None,
) -> None:
    """One product against NumPy's; `edit` replaces a part of the kernel's text."""
    rng = np.random.default_rng(columns)
    a, b = (encoded(rng.uniform(-1, 1, (rows, REDUCED)), kind) for rows in (64, columns))
    memory = DeviceMemory()
    of_a = Operand(memory, 0, A_AT, a, a_transposed, swizzle)
    of_b = Operand(memory, 1, B_AT, b, b_transposed, swizzle)
    # The fragment of A as the manual draws it: 4 registers a lane and step.
    registers = np.zeros((128, REDUCED // 16, 4, 2), np.uint16)
    for thread in range(128):
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for step in range(REDUCED // 16):
            for i, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
                at = 16 * step + column + right
                registers[thread, step, i] = a[row + down, at : at + 2]
    operands = [f"{{{', '.join(f'%r{20 + 4 * step + i}' for i in range(4))}}}" for step in range(REDUCED // 16)]
    if not a_in_registers:
        operands = [str(descriptor) for descriptor in of_a.descriptors]
    flags = [*signs, int(b_transposed)] if a_in_registers else [*signs, int(a_transposed), int(b_transposed)]
    copies = of_b.copies if a_in_registers else of_a.copies + of_b.copies
    size = of_b.bytes if a_in_registers else of_a.bytes + of_b.bytes
    text = kernel(columns, kind, operands, of_b.descriptors, flags, copies, size)
    if edit:
        assert len(re.findall(edit[0], text)) == 1
        text = re.sub(*edit, text)
    poison = np.full((4, 8, 4, columns // 8, 2, 2), np.nan, np.float32)
    pointers = [memory.put(poison), memory.put(registers)]
    Machine(text, 0, memory.bytes).launch(
        (1, 1, 1), 128, [of_a.map.encode(), of_b.map.encode(), *map(Q.pack, pointers)]
    )
    found = memory.get(pointers[0], poison)
    # [warp, row, pair of columns, group of columns, half of the rows, column]
    found = found.transpose(0, 4, 1, 3, 2, 5).reshape(64, columns)
    expected = halves(a, kind) @ halves(b, kind).T * np.prod(signs)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("columns", [8, 16, 24, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_shapes(columns, kind):
    multiply(columns, kind)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("a", ["rows", "transposed", "registers"])
def test_forms(a, b_transposed, swizzle):
    for columns in (8, 72, 128):
        multiply(
            columns,
            a_in_registers=a == "registers",
            a_transposed=a == "transposed",
            b_transposed=b_transposed,
            swizzle=swizzle,
        )


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
def test_signs(signs):
    multiply(16, signs=signs)


FENCE, COMMIT, WAIT = (rf"wgmma\.{name}.sync.aligned" for name in ("fence", "commit_group", "wait_group"))
STORE = r"mov.b32 %r5, 7; st.shared.b32 [memory+65536], %r5;"
# What is wrong: the part of the text that is replaced, by what, and what the model says.
FAULTS = {
    "no fence before the first product": (f"{FENCE};", "", "without a wgmma.fence"),
    "sums written after the fence": (f"({FENCE};)", r"\1 mov.b32 %r101, 0;", "no wgmma.fence between"),
    "A written after the fence": (f"({FENCE};)", r"\1 add.s32 %r20, %r20, 0;", "no wgmma.fence between"),
    "sums read before the wait": (f"({COMMIT};)", r"\1 mov.b32 %r5, %r100;", "%r100.*under way"),
    "sums written before the wait": (f"({COMMIT};)", r"\1 mov.b32 %r100, 0;", "written before its wgmma.wait"),
    "A read before the wait": (f"({COMMIT};)", r"\1 mov.b32 %r5, %r20;", "%r20.*under way"),
    "A written before the wait": (f"({COMMIT};)", r"\1 mov.b32 %r20, 0;", "written before its wgmma.wait"),
    "no commit": (f"{COMMIT};", "", "under way"),
    "no wait": (f"{WAIT} 0;", "", "under way"),
    "no wait for the latest group": (f"{WAIT} 0;", "wgmma.wait_group.sync.aligned 1;", "under way"),
    "B overwritten before the wait": (
        f"({COMMIT};)",
        rf"\1 {STORE} fence.proxy.async.shared::cta;",
        "overwritten before its wgmma.wait_group",
    ),
    "B stored without a proxy fence": (f"({FENCE};)", rf"{STORE} bar.sync 0; \1", "stored without a fence"),
    "a lane that leaves": (
        f"({WAIT} 0;)",
        r"setp.eq.b32 %p2, %r1, 77; @%p2 bra LEAVE; \1 bra RESULTS; LEAVE: ret;",
        "have left",
    ),
    "a lane that waits elsewhere": (
        f"({WAIT} 0;)",
        r"setp.eq.b32 %p2, %r1, 77; @%p2 bra OTHER; \1 bra RESULTS; OTHER: wgmma.wait_group.sync.aligned 0;",
        "different instructions",
    ),
    "an mbarrier without a fence": (r"fence\.mbarrier_init[^;]*;", "", "not fenced after its init"),
    "lanes at barriers of their own": (
        r"LOADED:\s+bar\.sync 0;",
        r"bar.sync 0; bra GO; LOADED: bar.sync 0; GO:",
        "different instructions",
    ),
    "a warp without its part": (f"({FENCE};)", r"setp.gt.u32 %p2, %r1, 95; @%p2 bra RESULTS; \1", "deadlock|no value"),
    "a lane's own descriptor": (
        r"(setp\.ne\.b32 p, 1, 0;\s+mov\.b64 %rd5, \d+;)",
        r"\1 @%p1 add.s64 %rd5, %rd5, 2;",
        "descriptors differ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    """The same product is right as it stands, and each rule that it could break is named where it does."""
    pattern, by, message = FAULTS[fault]
    multiply(16, a_in_registers=True)
    with pytest.raises(AssertionError, match=message):
        multiply(16, a_in_registers=True, edit=(pattern, by))


SECOND = "setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r200, %r201, %r202, %r203}, "
SECOND += "{%r20, %r21, %r22, %r23}, %rd5, p, 1, 1, 0;"


@pytest.mark.parametrize("early", ["", "mov.b32 %r5, %r200;", "mov.b32 %r5, %r20;"])
def test_a_wait_may_leave_the_latest_group_under_way(early):
    """The older group's sums can be stored; the sums and A of the latest one cannot be read yet."""
    pattern = rf"(?s)({COMMIT};)\s+{WAIT} 0;(.*)ret;"
    edit = pattern, rf"\1 {SECOND} \1 wgmma.wait_group.sync.aligned 1; {early} \2 wgmma.wait_group.sync.aligned 0; ret;"
    if not early:
        multiply(16, a_in_registers=True, edit=edit)
        return
    with pytest.raises(AssertionError, match="under way"):
        multiply(16, a_in_registers=True, edit=edit)
