"""One block of a PTX kernel on a model of a Hopper multiprocessor: enough of PTX for mojo_ops/decode_hopper.mojo.

Threads take turns at random, copies of the TMA unit arrive late, and what is stored without a proxy fence is not to be
read by a wgmma: so a wrong index, a wait too few or too many (a deadlock), and a missing fence show without a GPU.
The model is written from the PTX manual, not from the kernel.
"""

# ruff: noqa: ARG001, ARG005 (an operation takes the machine and the thread, whether it needs them or not)

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptx_numbers import MASK, arithmetic, float8, from_float, halves, signed, to_float, to_half

SHARED = 1024  # where dynamic shared memory starts: a multiple of 1024, but not 0
PARAMETERS = 1 << 30
GLOBAL = 1 << 33


@dataclass
class TensorMap:
    """A view `[page, slot, head, dim]` as bytes, and the box that a copy fetches."""

    data: np.ndarray  # uint8 [page, slot, head, dim * element size]
    slots: int
    box_bytes: int
    element: int
    swizzled: bool

    def box(self, dim: int, head: int, slot: int, page: int) -> np.ndarray:
        """[slots, box_bytes]; zeros outside the view."""
        out = np.zeros((self.slots, self.box_bytes), np.uint8)
        pages, slots, heads, row = self.data.shape
        at = dim * self.element
        if 0 <= page < pages and 0 <= head < heads and 0 <= at < row:
            for i in range(self.slots):
                if 0 <= slot + i < slots:
                    part = self.data[page, slot + i, head, at : at + self.box_bytes]
                    out[i, : part.size] = part
        return out


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    completed: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than an mbarrier expects"
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count


@dataclass
class Thread:
    index: int
    registers: dict[str, int] = field(default_factory=dict)
    pc: int = 0
    waits_for: tuple | None = None
    done: bool = False


Operation = Callable[["Machine", Thread], int | tuple | None]


class Machine:
    def __init__(self, ptx: str, seed: int = 0, shared_bytes: int = 227 * 1024):
        self.random = random.Random(seed)
        self.memory = bytearray()
        self.shared = np.full(shared_bytes + SHARED, 0xFF, np.uint8)
        self.unfenced = np.zeros(shared_bytes + SHARED, np.int32)  # the thread that stored, plus 1
        self.parameters: list[bytes | TensorMap] = []
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[tuple[TensorMap, tuple[int, ...], int, int]] = []
        self.block = 0
        self.parse(ptx)

    # Memory

    def allocate(self, array: np.ndarray) -> int:
        self.memory.extend(b"\0" * (-len(self.memory) % 256))
        address = GLOBAL + len(self.memory)
        self.memory.extend(np.ascontiguousarray(array).tobytes())
        return address

    def array(self, address: int, dtype: type, count: int) -> np.ndarray:
        return np.frombuffer(self.memory, dtype, count, address - GLOBAL).copy()

    def load(self, space: str, address: int, size: int) -> int:
        if space == "shared":
            assert SHARED <= address <= len(self.shared) - size, "shared memory"
            return int.from_bytes(self.shared[address : address + size].tobytes(), "little")
        if space == "param":
            index, at = divmod(address - PARAMETERS, 4096)
            raw = self.parameters[index]
            assert isinstance(raw, bytes)
            return int.from_bytes(raw[at : at + size], "little")
        at = address - GLOBAL
        assert 0 <= at <= len(self.memory) - size, f"global address {address:x}"
        assert at % size == 0, "unaligned load"
        return int.from_bytes(self.memory[at : at + size], "little")

    def store(self, space: str, address: int, size: int, value: int, thread: int) -> None:
        raw = (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        assert address % size == 0, "unaligned store"
        if space == "shared":
            assert SHARED <= address <= len(self.shared) - size, "shared memory"
            self.shared[address : address + size] = np.frombuffer(raw, np.uint8)
            self.unfenced[address : address + size] = thread + 1
        else:
            at = address - GLOBAL
            assert 0 <= at <= len(self.memory) - size, f"global address {address:x}"
            self.memory[at : at + size] = raw

    # Text

    def parse(self, ptx: str) -> None:
        head, body = ptx.split("\n{\n", 1)
        names = re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", head)
        self.symbols = {name: PARAMETERS + 4096 * i for i, name in enumerate(names)}
        self.symbols.update(dict.fromkeys(re.findall(r"\.shared .*? (\w+)\[\]", head), SHARED))
        body = re.sub(r"//.*", "", body)
        # A wait spins around try_wait: here it blocks.
        body = re.sub(r"LAB_WAIT:|DONE:|@P1 bra DONE;|bra LAB_WAIT;|\.reg [^;]*;", "", body)
        body = re.sub(r"^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
        self.labels: dict[str, int] = {}
        statements: list[str] = []
        for part in body.split(";"):
            text = " ".join(part.split())
            while match := re.match(r"(\$?\w+): ?", text):
                self.labels[match[1]] = len(statements)
                text = text[match.end() :]
            if text:
                statements.append(text)
        self.program = [self.compile(text) for text in statements]
        self.statements = statements

    def value(self, text: str) -> Callable[[Thread], int]:
        text = text.strip()
        special = {
            "%tid.x": lambda t: t.index,
            "%ctaid.x": lambda t: self.block,
            "%laneid": lambda t: t.index % 32,
        }
        if text in special:
            return special[text]
        if match := re.fullmatch(r"(%?\w+)\+(-?\d+)", text):
            base, offset = self.value(match[1]), int(match[2])
            return lambda t: base(t) + offset
        if text.startswith("0f"):
            bits = int(text[2:], 16)
            return lambda t: bits
        if re.fullmatch(r"-?\d+", text):
            number = int(text)
            return lambda t: number
        if text in self.symbols:
            address = self.symbols[text]
            return lambda t: address
        return lambda t: t.registers[text]

    def compile(self, text: str) -> Operation:
        guard = re.match(r"@(!?)(%\w+) ", text)
        operation = self.compile_plain(text[guard.end() :] if guard else text)
        if not guard:
            return operation
        wanted, name = guard[1] == "", guard[2]
        return lambda m, t: operation(m, t) if bool(t.registers[name]) == wanted else None

    def compile_plain(self, text: str) -> Operation:
        opcode, _, rest = text.partition(" ")
        parts = opcode.split(".")
        operands = split_operands(rest)
        name = parts[0]
        if name == "bra":
            return lambda m, t: m.labels[operands[0]]
        if name == "ret":
            return lambda m, t: ("exit",)
        if name == "wgmma":
            return self.compile_wgmma(parts, operands)
        if opcode.startswith("mbarrier."):
            return self.compile_mbarrier(opcode, operands)
        if opcode.startswith("cp.async.bulk.tensor.4d"):
            target, source = self.value(operands[0].strip("[]")), operands[1].strip("[]")
            map_text, coordinates = source.split(",", 1)
            which = self.value(map_text)
            where = [self.value(x) for x in coordinates.strip(" {}").split(",")]
            barrier = self.value(operands[2].strip("[]"))
            return lambda m, t: m.start_copy(which(t), target(t), tuple(signed(x(t), 32) for x in where), barrier(t))
        if name == "fence":
            if "proxy" in parts:
                return lambda m, t: m.fence(t.index)
            return lambda m, t: None
        if name == "bar":
            if parts[1] == "warp":
                return lambda m, t: ("warp",)
            barrier_id, count = self.value(operands[0]), self.value(operands[1]) if len(operands) > 1 else None
            return lambda m, t: ("bar", barrier_id(t), count(t) if count else m.threads)
        if name == "shfl":
            source, lane = self.value(operands[1]), self.value(operands[2])
            return lambda m, t: ("shfl", parts[2], source(t), lane(t), operands[0])
        if name in ("ld", "st"):
            return self.compile_memory(name, parts, operands)
        return self.compile_arithmetic(parts, operands)

    def compile_memory(self, name: str, parts: list[str], operands: list[str]) -> Operation:
        space = "param" if "param::entry" in parts else next((s for s in ("shared", "global") if s in parts), "global")
        width = int(parts[-1][1:]) // 8
        is_signed = parts[-1][0] == "s"
        address = self.value((operands[0] if name == "st" else operands[1]).strip("[]"))
        registers = (operands[1] if name == "st" else operands[0]).strip("{}").split(",")
        registers = [register.strip() for register in registers]

        def load(m: "Machine", t: Thread) -> None:
            for i, register in enumerate(registers):
                raw = m.load(space, address(t) + i * width, width)
                t.registers[register] = signed(raw, 8 * width) & MASK[64] if is_signed else raw

        values = [self.value(register) for register in registers] if name == "st" else []

        def store(m: "Machine", t: Thread) -> None:
            for i, value in enumerate(values):
                m.store(space, address(t) + i * width, width, value(t), t.index)

        return store if name == "st" else load

    def compile_arithmetic(self, parts: list[str], operands: list[str]) -> Operation:
        name, kind = parts[0], parts[-1]
        target = operands[0]
        values = [self.value(x) for x in operands[1:]]
        if name == "mov" and target.startswith("{"):
            low, high = (x.strip() for x in target.strip("{}").split(","))

            def split(m: "Machine", t: Thread) -> None:
                half = 16 if kind == "b32" else 32
                t.registers[low] = values[0](t) & MASK[half]
                t.registers[high] = values[0](t) >> half & MASK[half]

            return split
        if name == "cvt":
            return self.compile_convert(parts, target, values)
        function = arithmetic(name, parts)

        def apply(m: "Machine", t: Thread) -> None:
            t.registers[target] = function(*[value(t) for value in values])

        return apply

    def compile_convert(self, parts: list[str], target: str, values: list) -> Operation:
        to, source = parts[-2], parts[-1]

        def convert(*x: int) -> int:
            if source in ("e4m3x2", "e5m2x2"):
                pair = [float8(x[0] >> (8 * i) & 255, source[:4]) for i in range(2)]
                return int(pair[0].view(np.uint16)) | int(pair[1].view(np.uint16)) << 16
            if to in ("bf16x2", "f16x2"):
                return to_half(to_float(x[1]), to[:-2]) | to_half(to_float(x[0]), to[:-2]) << 16
            if to in ("bf16", "f16"):
                return to_half(to_float(x[0]), to)
            if to == "f32" and source in ("bf16", "f16"):
                return from_float(halves(np.array([x[0]], np.uint16), source)[0])
            if to == "f32":
                return from_float(signed(x[0], 32))
            width = int(source[1:])
            value = signed(x[0], width) if source[0] == "s" else x[0] & MASK[width]
            return value & MASK[int(to[1:])]

        def apply(m: "Machine", t: Thread) -> None:
            t.registers[target] = convert(*[value(t) for value in values])

        return apply

    # mbarriers and copies

    def compile_mbarrier(self, opcode: str, operands: list[str]) -> Operation:
        address = self.value(next(x for x in operands if x.startswith("[")).strip("[]"))
        last = self.value(operands[-1]) if not operands[-1].startswith("[") else None

        def init(m: "Machine", t: Thread) -> None:
            m.barriers[address(t)] = Barrier(last(t), last(t))

        def arrive(m: "Machine", t: Thread) -> None:
            m.barriers[address(t)].pending -= 1
            m.barriers[address(t)].settle()

        def expect(m: "Machine", t: Thread) -> None:
            m.barriers[address(t)].bytes += last(t)
            arrive(m, t)

        def wait(m: "Machine", t: Thread) -> tuple:
            return ("wait", address(t), last(t) & 1)

        kinds = {"init": init, "try_wait": wait, "arrive": expect if ".expect_tx" in opcode else arrive}
        return kinds[opcode.split(".")[1]]

    def start_copy(self, which: int, target: int, coordinates: tuple[int, ...], barrier: int) -> None:
        tensor_map = self.parameters[(which - PARAMETERS) // 4096]
        assert isinstance(tensor_map, TensorMap)
        size = tensor_map.slots * tensor_map.box_bytes
        assert target % 128 == 0, "a copy's target"
        # From now on until it has arrived, anything may be found there.
        self.shared[target : target + size] = 0xFF
        self.copies.append((tensor_map, coordinates, target, barrier))

    def finish_copy(self) -> None:
        tensor_map, coordinates, target, barrier = self.copies.pop(self.random.randrange(len(self.copies)))
        data = tensor_map.box(*coordinates).reshape(-1)
        at = target + np.arange(data.size)
        if tensor_map.swizzled:
            at ^= (at >> 3) & 0x70
        assert not self.unfenced[at].any(), "a copy overwrites what was stored without a fence"
        self.shared[at] = data
        self.barriers[barrier].bytes -= data.size
        self.barriers[barrier].settle()

    def fence(self, thread: int) -> None:
        self.unfenced[self.unfenced == thread + 1] = 0

    # Tensor cores

    def compile_wgmma(self, parts: list[str], operands: list[str]) -> Operation:
        if parts[1] != "mma_async":
            # Products are made at once; a use of their results before the wait is ptxas's to see.
            return lambda m, t: ("group", parts[1])
        columns = int(re.fullmatch(r"m64n(\d+)k16", parts[4])[1])
        registers = [x.strip() for x in operands[0].strip("{}").split(",")]
        a, b, scale = self.value(operands[1]), self.value(operands[2]), operands[3]
        a_transposed, b_transposed = operands[6] == "1", operands[7] == "1"
        kind = parts[-1]

        def multiply(m: "Machine", t: Thread) -> tuple:
            key = (a(t), b(t), bool(t.registers[scale]))
            return ("mma", key, registers, columns, kind, a_transposed, b_transposed)

        return multiply

    def operand(self, descriptor: int, rows: int, transposed: bool, kind: str) -> np.ndarray:
        """[rows, 16] float32."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        row, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
        mode = descriptor >> 62
        if mode == 1 and not transposed:
            at = start + row // 8 * stride + row % 8 * 128 + k * 2
        elif mode == 1:
            at = start + row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
        elif mode == 0 and not transposed:
            at = start + row // 8 * stride + k // 8 * leading + row % 8 * 16 + k % 8 * 2
        else:
            assert mode == 0, "a swizzle that the model has not"
            at = start + row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
        if mode == 1:
            at ^= (at >> 3) & 0x70
        assert not self.unfenced[at].any(), "a wgmma reads what was stored without a fence"
        assert not self.unfenced[at + 1].any(), "a wgmma reads what was stored without a fence"
        return halves(self.shared[at].astype(np.uint16) | self.shared[at + 1].astype(np.uint16) << 8, kind)

    def multiply(self, group: list[Thread]) -> None:
        _, (a, b, scale), _, columns, kind, a_transposed, b_transposed = group[0].waits_for
        assert all(t.waits_for[1] == (a, b, scale) for t in group), "descriptors differ inside a warpgroup"
        with np.errstate(invalid="ignore", over="ignore"):
            product = self.operand(a, 64, a_transposed, kind) @ self.operand(b, columns, b_transposed, kind).T
        for t in group:
            lane, warp = t.index % 32, t.index % 128 // 32
            for i, register in enumerate(t.waits_for[2]):
                row = warp * 16 + lane // 4 + 8 * (i // 2 % 2)
                column = i // 4 * 8 + lane % 4 * 2 + i % 2
                before = to_float(t.registers[register]) if scale else np.float32(0)
                with np.errstate(invalid="ignore", over="ignore"):
                    t.registers[register] = from_float(before + product[row, column])

    # Threads

    def run(self, block: int, threads: int) -> None:
        """Runs one block to its end."""
        self.block, self.threads = block, threads
        self.shared[:] = 0xFF
        self.unfenced[:] = 0
        self.barriers.clear()
        everyone = [Thread(i) for i in range(threads)]
        warps = [everyone[i : i + 32] for i in range(0, threads, 32)]
        while not all(t.done for t in everyone):
            moved = False
            for warp in self.random.sample(warps, len(warps)):
                if self.random.random() < 0.3:
                    continue
                for t in self.random.sample(warp, 32):
                    moved |= self.advance(t)
                moved |= self.release(everyone, warps)
            if self.copies and self.random.random() < 0.3:
                self.finish_copy()
                moved = True
            if not moved and not self.copies:
                for t in everyone:
                    moved |= self.advance(t)
                moved |= self.release(everyone, warps)
                assert moved, "deadlock: " + str([(t.index, t.waits_for[:2]) for t in everyone if t.waits_for][:8])
        assert not self.copies, "copies still under way at the end of a block"

    def advance(self, t: Thread) -> bool:
        """Runs a thread to where it has to wait."""
        if t.done:
            return False
        if t.waits_for:
            if t.waits_for[0] != "wait" or self.barriers[t.waits_for[1]].completed & 1 == t.waits_for[2]:
                return False
            t.waits_for = None
        while True:
            answer = self.program[t.pc](self, t)
            if isinstance(answer, int):
                t.pc = answer
                continue
            t.pc += 1
            if isinstance(answer, tuple):
                t.done = answer[0] == "exit"
                t.waits_for = None if t.done else answer
                return True

    def release(self, everyone: list[Thread], warps: list[list[Thread]]) -> bool:
        """Lets threads go that have met where they had to."""
        moved = False
        for warp in warps:
            kinds = {t.waits_for[0] if t.waits_for else None for t in warp}
            if kinds == {"warp"}:
                moved = True
                for t in warp:
                    t.waits_for = None
            elif kinds == {"shfl"}:
                moved = True
                assert len({t.pc for t in warp}) == 1, "a shuffle met another"
                values = [t.waits_for[2] for t in warp]
                for lane, t in enumerate(warp):
                    _, mode, _, argument, target = t.waits_for
                    t.registers[target] = values[lane ^ argument if mode == "bfly" else argument & 31]
                for t in warp:
                    t.waits_for = None
        for first in range(0, len(everyone) - 127, 128):
            group = everyone[first : first + 128]
            kinds = {t.waits_for[0] if t.waits_for else None for t in group}
            if kinds in ({"mma"}, {"group"}):
                moved = True
                assert len({t.pc for t in group}) == 1, "a wgmma met another"
                if kinds == {"mma"}:
                    self.multiply(group)
                for t in group:
                    t.waits_for = None
        waiting = [t for t in everyone if t.waits_for and t.waits_for[0] == "bar"]
        for barrier_id in {t.waits_for[1] for t in waiting}:
            here = [t for t in waiting if t.waits_for[1] == barrier_id]
            assert len(here) <= here[0].waits_for[2], "more threads at a barrier than it takes"
            if len(here) == here[0].waits_for[2]:
                moved = True
                for t in here:
                    t.waits_for = None
        return moved


def split_operands(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
