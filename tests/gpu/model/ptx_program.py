"""PTX as Python: the text of a kernel becomes functions that run a thread from one wait or jump to the next.

A run of instructions without a jump or a wait is one function: what only computes (`ptx_numbers.expression`) is written
out in its source, everything else is a call of an operation.
"""

import re
from functools import cache
from typing import Any

from gpu.model.ptx_numbers import HELPERS, MASK, conversion, expression
from gpu.model.ptx_operations import REGISTER, SPECIAL, Operation, Operations, split_operands
from gpu.model.ptx_units import PARAMETER_BYTES, PARAMETERS, SHARED
from gpu.model.ptx_wgmma import registers_of

COMPUTES_NOT = frozenset(
    "bra ret wgmma mbarrier cp fence membar bar barrier shfl ld st setmaxnreg atom red griddepcontrol".split()
)
WAITS = re.compile(r"bar|shfl|wgmma|ret|mbarrier\.try_wait")
"""Instructions that may leave a thread waiting."""


class Program(Operations):
    """A kernel. `blocks[pc]` runs a thread from statement `pc`, where a jump or a wait may lead, to the next one."""

    def __init__(self, ptx: str) -> None:
        ptx = ptx.replace("$", "_")
        head, body = ptx.split("\n{\n", 1)
        names = re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", head)
        super().__init__({name: PARAMETERS + PARAMETER_BYTES * i for i, name in enumerate(names)})
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
            for register in registers_of(split_operands(statement.partition("wgmma.mma_async")[2].partition(" ")[2])[0])
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
        """Return the source of one statement; what it needs besides registers is added to the scope."""
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
        """Return the source of an operand."""
        if REGISTER.fullmatch(text):
            return f"r['{text}']"
        if text in SPECIAL:
            scope[name := "special_" + text[1:].replace(".", "_")] = SPECIAL[text]
            return f"{name}(t)"
        return str(self.constant(text))

    def computed(self, parts: list[str], operands: list[str], scope: dict[str, Any]) -> list[str]:
        """The source of an instruction that only computes; nothing for others."""
        if parts[0] in COMPUTES_NOT:
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


@cache
def program_of(ptx: str) -> Program:
    return Program(ptx)


def unguarded(text: str) -> str:
    return re.sub(r"^@!?%\w+ ", "", text)
