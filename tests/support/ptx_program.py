"""PTX as Python: the text of a kernel becomes functions that run a thread from one wait or jump to the next.

A run of instructions without a jump or a wait is one function: what only computes (`ptx_numbers.expression`) is written
out in its source, everything else is a call of an operation.
"""

# ruff: noqa: ARG005 (an operation takes the machine and the thread, whether it needs them or not)

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from support.ptx_numbers import HELPERS, MASK, conversion, expression, signed
from support.ptx_wgmma import product_form, registers_of

SHARED = 1024  # where shared memory starts: a multiple of 1024, but not 0
PARAMETERS = 1 << 30
PARAMETER_BYTES = 4096


@dataclass
class Thread:
    index: int
    block: tuple[int, int, int] = (0, 0, 0)
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    """Registers of wgmmas that other instructions have accessed since the latest `wgmma.fence`."""
    pc: int = 0
    waits_for: tuple | None = None
    done: bool = False


Value = Callable[[Thread], int]
Operation = Callable[[Any, Thread], int | tuple | None]
"""Takes the machine and a thread. Returns the statement to go to, what the thread waits for now, or None: go on."""

SPECIAL: dict[str, Value] = {
    "%laneid": lambda t: t.index % 32,
    "%tid.x": lambda t: t.index,
    "%tid.y": lambda t: 0,
    "%tid.z": lambda t: 0,
    "%ntid.x": lambda t: t.threads,
    "%ctaid.x": lambda t: t.block[0],
    "%ctaid.y": lambda t: t.block[1],
    "%ctaid.z": lambda t: t.block[2],
    "%nctaid.x": lambda t: t.grid[0],
    "%nctaid.y": lambda t: t.grid[1],
    "%nctaid.z": lambda t: t.grid[2],
}
REGISTER = re.compile(r"%[a-z]+\d+|p|P1")
WAITS = re.compile(r"bar|shfl|wgmma|ret|setmaxnreg|mbarrier\.try_wait")
"""Instructions that may leave a thread waiting."""


class Program:
    """A kernel. `blocks[pc]` runs a thread from statement `pc`, where a jump or a wait may lead, to the next one."""

    def __init__(self, ptx: str) -> None:
        ptx = ptx.replace("$", "_")
        head, body = ptx.split("\n{\n", 1)
        names = re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", head)
        self.symbols = {name: PARAMETERS + PARAMETER_BYTES * i for i, name in enumerate(names)}
        self.symbols.update(dict.fromkeys(re.findall(r"\.shared .*? (\w+)\[\]", head), SHARED))
        at = SHARED
        for name, size in re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\];", body):
            self.symbols[name] = at
            at += -(-int(size) // 16) * 16
        body = re.sub(r"//.*", "", body)
        # A wait spins around try_wait: here it blocks.
        body = re.sub(r"LAB_WAIT:|DONE:|@P1 bra DONE;|bra LAB_WAIT;|\.(reg|shared) [^;]*;", "", body)
        body = re.sub(r"^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
        self.labels: dict[str, int] = {}
        self.statements: list[str] = []
        for part in body.split(";"):
            text = " ".join(part.split())
            while match := re.match(r"(\w+): ?", text):
                self.labels[match[1]] = len(self.statements)
                text = text[match.end() :]
            if text:
                self.statements.append(text)
        self.product_registers = {
            register
            for statement in self.statements
            if "wgmma.mma_async" in statement
            for operand in split_operands(statement.partition("wgmma.mma_async")[2].partition(" ")[2])
            for register in registers_of(operand)
        }
        self.blocks = self.compile()

    # Blocks

    def compile(self) -> dict[int, Operation]:
        starts = {0, *self.labels.values()}
        for i, statement in enumerate(self.statements):
            if WAITS.match(unguarded(statement)) or unguarded(statement).startswith("bra"):
                starts.add(i + 1)
        starts.discard(len(self.statements))
        scope: dict[str, Any] = dict(HELPERS)
        lines = []
        for start in sorted(starts):
            body, touched, at = [], set(), start
            while at < len(self.statements) and (at == start or at not in starts):
                body += ["    " + line for line in self.source_of(at, scope)]
                touched |= self.touched(self.statements[at])
                at += 1
            lines += [f"def block_{start}(m, t):", "    r = t.registers"]
            if touched:
                scope[f"touched_{start}"] = frozenset(touched)
                lines.append(f"    t.touched.update(touched_{start})")
            lines += [*body, f"    return {at}"]
        exec("\n".join(lines), scope)  # of our own making, from the compiler's output
        return {start: scope[f"block_{start}"] for start in starts}

    def touched(self, statement: str) -> set[str]:
        """The registers of wgmmas that another instruction accesses; of a guarded one, whether it runs or not."""
        if not self.product_registers or "wgmma." in statement:
            return set()
        return self.product_registers.intersection(REGISTER.findall(statement))

    def source_of(self, at: int, scope: dict[str, Any]) -> list[str]:
        """Of one statement; what it needs besides registers is added to the scope."""
        text = self.statements[at]
        guard = re.match(r"@(!?)(%\w+) ", text)
        body = unguarded(text)
        opcode, _, rest = body.partition(" ")
        parts, operands = opcode.split("."), split_operands(rest)
        computed = self.computed(parts, operands, scope)
        if parts[0] == "bra":
            lines = [f"return {self.labels[operands[0]]}"]
        elif computed:
            lines = computed
        else:
            scope[f"operation_{at}"] = self.operation(opcode, operands)
            lines = [f"operation_{at}(m, t)"]
            if WAITS.match(body):
                lines = [f"t.pc = {at + 1}", f"return operation_{at}(m, t)"]
        if not guard:
            return lines
        return [f"if {'not ' if guard[1] else ''}r['{guard[2]}']:", *("    " + line for line in lines)]

    def source(self, text: str, scope: dict[str, Any]) -> str:
        """Of an operand."""
        if REGISTER.fullmatch(text):
            return f"r['{text}']"
        if text in SPECIAL:
            scope[name := "special_" + text[1:].replace(".", "_")] = SPECIAL[text]
            return f"{name}(t)"
        return str(self.constant(text))

    def constant(self, text: str) -> int:
        name, _, offset = text.partition("+")
        if name in self.symbols:
            return self.symbols[name] + int(offset or 0)
        if text.startswith(("0f", "0d")):
            return int(text[2:], 16)
        return int(text.rstrip("U"), 0)

    def computed(self, parts: list[str], operands: list[str], scope: dict[str, Any]) -> list[str]:
        """The source of an instruction that only computes; nothing for others."""
        if parts[0] in ("bra", "ret", "wgmma", "mbarrier", "cp", "fence", "bar", "shfl", "ld", "st", "setmaxnreg"):
            return []
        target = operands[0]
        if parts[0] == "mov" and (target.startswith("{") or operands[1].startswith("{")):
            half = int(parts[-1][1:]) // 2
            low, high = (x.strip() for x in (target + operands[1]).partition("{")[2].partition("}")[0].split(","))
            if target.startswith("{"):
                whole = self.source(operands[1], scope)
                return [f"r['{low}'], r['{high}'] = {whole} & {MASK[half]}, {whole} >> {half} & {MASK[half]}"]
            packed = f"{self.source(low, scope)} & {MASK[half]} | ({self.source(high, scope)} & {MASK[half]}) << {half}"
            return [f"r['{target}'] = {packed}"]
        values = [self.source(operand, scope) for operand in operands[1:]]
        if parts[0] == "cvt":
            scope[name := "_".join(parts)] = conversion(parts)
            return [f"r['{target}'] = {name}({', '.join(values)})"]
        return [f"r['{target}'] = {expression(parts, values)}"]

    # Operations

    def value(self, text: str) -> Value:
        """Of an operand, `register + offset` among them."""
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
        if name == "wgmma":
            return self.wgmma(parts, operands)
        if name == "mbarrier":
            return self.mbarrier(opcode, operands)
        if opcode.startswith("cp.async.bulk.tensor"):
            return self.tensor_copy(operands)
        if name == "fence":
            return (lambda m, t: m.fence_proxy(t.index)) if "proxy" in parts else (lambda m, t: None)
        if name == "setmaxnreg":
            return lambda m, t: ("aligned",)
        if name == "bar":
            if parts[1] == "warp":
                return lambda m, t: ("warp",)
            barrier_id, count = self.value(operands[0]), self.value(operands[1]) if len(operands) > 1 else None
            kind = "bar" if parts[1] == "sync" else "arrive"
            assert parts[1] in ("sync", "arrive"), opcode
            return lambda m, t: (kind, barrier_id(t), count(t) if count else t.threads)
        if name == "shfl":
            mode, target = parts[2], operands[0]
            source, argument = self.value(operands[1]), self.value(operands[2])
            return lambda m, t: ("shfl", mode, source(t), argument(t), target)
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
            raw = m.load(space, address(t), size)
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
        return lambda m, t: m.start_copy(which(t), target(t), tuple(signed(x(t), 32) for x in where), barrier(t))

    def mbarrier(self, opcode: str, operands: list[str]) -> Operation:
        address = self.value(next(x for x in operands if x.startswith("[")))
        kind = opcode.split(".")[1]
        if kind == "arrive" and ".expect_tx" not in opcode:
            return lambda m, t: m.arrive(address(t), 0)
        last = self.value(operands[-1])
        if kind == "arrive":
            return lambda m, t: m.arrive(address(t), last(t))
        if kind == "init":
            return lambda m, t: m.start_barrier(address(t), last(t))
        assert kind == "try_wait", opcode
        return lambda m, t: ("wait", address(t), last(t) & 1)

    def wgmma(self, parts: list[str], operands: list[str]) -> Operation:
        if parts[1] != "mma_async":
            argument = int(operands[0]) if operands else 0
            return lambda m, t: ("wgmma", parts[1], argument)
        form = product_form(parts[4], parts[5:], operands)
        a = None if form.a_registers else self.value(operands[1])
        b, adds = self.value(operands[2]), operands[3]
        return lambda m, t: ("mma", (a(t) if a else None, b(t), bool(t.registers[adds])), form)


@cache
def program_of(ptx: str) -> Program:
    return Program(ptx)


def unguarded(text: str) -> str:
    return re.sub(r"^@!?%\w+ ", "", text)


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
