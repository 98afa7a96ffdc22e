"""The instructions of PTX that do more than to compute, as functions of a block and a thread."""

# ruff: noqa: ARG005 (an operation takes the block and the thread, whether it needs them or not)

import re
from collections.abc import Callable
from typing import Any

from gpu.model.ptx_numbers import MASK, signed
from gpu.model.ptx_units import Thread
from gpu.model.ptx_wgmma import product_form

Value = Callable[[Thread], int]
Operation = Callable[[Any, Thread], int | tuple | None]
"""Takes the block and a thread. Returns the statement to go to, what the thread waits for now, or None: go on."""

SPECIAL: dict[str, Value] = {
    "%laneid": lambda t: t.index % 32,
    "%tid.x": lambda t: t.index,
    "%tid.y": lambda t: 0,
    "%tid.z": lambda t: 0,
    "%ntid.x": lambda t: t.threads,
    "%ctaid.x": lambda t: t.block[0],
    "%ctaid.y": lambda t: t.block[1],
    "%ctaid.z": lambda t: t.block[2],
    "%nctaid.z": lambda t: t.grid[2],
}
REGISTER = re.compile(r"%[a-z]+\d+|p|P1")
STRONG = frozenset(("relaxed", "acquire", "release", "volatile"))
"""Accesses that order others, which no kernel makes."""


class Operations:
    """Read a kernel's text.

    Args:
        symbols: The addresses of names.
    """

    def __init__(self, symbols: dict[str, int]) -> None:
        self.symbols = symbols

    def constant(self, text: str) -> int:
        name, _, offset = text.partition("+")
        if name in self.symbols:
            return self.symbols[name] + int(offset or 0)
        if text.startswith(("0f", "0d")):
            return int(text[2:], 16)
        return int(text.rstrip("U"), 0)

    def value(self, text: str) -> Value:
        """Return the value of an operand, `register + offset` among them."""
        text = text.strip().strip("[]")
        if text in SPECIAL:
            return SPECIAL[text]
        base, _, offset = text.partition("+")
        if REGISTER.fullmatch(base):
            if not offset:
                return lambda t: t.registers[base]
            step = int(offset)
            return lambda t: t.registers[base] + step
        number = self.constant(text)
        return lambda t: number

    def operation(self, opcode: str, operands: list[str]) -> Operation:
        """An instruction that does more than to compute."""
        parts = opcode.split(".")
        name = parts[0]
        if name == "ret":
            return lambda m, t: ("exit",)
        if name == "griddepcontrol":
            return (lambda m, t: m.admit(t)) if parts[1] == "wait" else (lambda m, t: None)
        if name == "wgmma":
            return self.wgmma(parts, operands)
        if name == "mbarrier":
            return self.mbarrier(opcode, operands)
        if opcode.startswith("cp.async.bulk.tensor"):
            return self.tensor_copy(operands)
        if name == "fence" and parts[1] == "proxy":
            return lambda m, t: m.fence_proxy(t.index)
        if name == "fence" and parts[1] == "mbarrier_init":
            return lambda m, t: m.barriers.fence(t.index)
        if opcode == "bar.warp.sync":
            return lambda m, t: ("warp",)
        if opcode == "bar.sync":
            barrier_id, count = self.value(operands[0]), self.value(operands[1]) if len(operands) > 1 else None
            return lambda m, t: ("bar", barrier_id(t), count(t) if count else t.threads)
        if name == "shfl":
            mode, target = parts[2], operands[0]
            source, argument = self.value(operands[1]), self.value(operands[2])
            return lambda m, t: ("shfl", mode, source(t), argument(t), target)
        if STRONG.isdisjoint(parts):
            if name == "ld":
                return self.load(parts, operands)
            if name == "st":
                return self.store(parts, operands)
        raise NotImplementedError(f"the model has no {opcode}")

    def load(self, parts: list[str], operands: list[str]) -> Operation:
        registers = [register.strip() for register in operands[0].strip("{}").split(",")]
        address = self.value(operands[1])
        space, width, is_signed = memory_space(parts), int(parts[-1][1:]) // 8, parts[-1][0] == "s"
        size = width * len(registers)

        def load(m: Any, t: Thread) -> None:
            raw = m.load(space, address(t), size, t.index)
            for i, register in enumerate(registers):
                x = int.from_bytes(raw[i * width : (i + 1) * width], "little")
                t.registers[register] = signed(x, 8 * width) & MASK[64] if is_signed else x

        return load

    def store(self, parts: list[str], operands: list[str]) -> Operation:
        address = self.value(operands[0])
        values = [self.value(register) for register in operands[1].strip("{}").split(",")]
        space, width = memory_space(parts), int(parts[-1][1:]) // 8
        mask = (1 << 8 * width) - 1

        def store(m: Any, t: Thread) -> None:
            raw = b"".join((value(t) & mask).to_bytes(width, "little") for value in values)
            m.store(space, address(t), raw, t.index)

        return store

    def tensor_copy(self, operands: list[str]) -> Operation:
        target, barrier = self.value(operands[0]), self.value(operands[2])
        map_text, coordinates = operands[1].strip("[]").split(",", 1)
        which = self.value(map_text)
        where = [self.value(x) for x in coordinates.strip(" {}").split(",")]
        return lambda m, t: m.start_copy(
            t.index, which(t), target(t), tuple(signed(x(t), 32) for x in where), barrier(t)
        )

    def mbarrier(self, opcode: str, operands: list[str]) -> Operation:
        place = next(i for i, x in enumerate(operands) if x.startswith("["))
        address, last, kind = self.value(operands[place]), self.value(operands[-1]), opcode.split(".")[1]
        if kind == "arrive" and ".expect_tx" in opcode:
            return lambda m, t: m.arrive(address(t), last(t))
        if kind == "arrive":
            assert len(operands) == place + 1, operands
            return lambda m, t: m.arrive(address(t), 0)
        if kind == "init":
            return lambda m, t: m.barriers.start(t.index, address(t), last(t))
        assert kind == "try_wait", opcode
        return lambda m, t: ("wait", address(t), last(t) & 1)

    def wgmma(self, parts: list[str], operands: list[str]) -> Operation:
        if parts[1] != "mma_async":
            assert operands in ([], ["0"]), "a wait that leaves products under way"
            return lambda m, t: ("wgmma", parts[1])
        form = product_form(parts[4], parts[5:], operands)
        a, b, adds = self.value(operands[1]), self.value(operands[2]), operands[3]
        return lambda m, t: ("mma", (a(t), b(t), bool(t.registers[adds])), form)


def memory_space(parts: list[str]) -> str:
    return "param" if "param::entry" in parts else next((s for s in ("shared", "global") if s in parts), "global")


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
