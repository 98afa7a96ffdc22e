"""Each GPU kernel as the assembler made it in a compiled artefact: read from its cubins, without CUDA's tools."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_EM_CUDA = 190
_NOBITS = 8
# Attributes in a cubin's .nv.info sections, as cuobjdump names them: EIATTR_...
_REGCOUNT, _FRAME_SIZE, _MAX_THREADS = 0x2F, 0x11, 0x05
_SIZED = 0x04  # the format of an attribute with a length; the others are 4 bytes in all


@dataclass(frozen=True)
class Kernel:
    """One kernel of a cubin."""

    name: str
    registers: int
    stack_bytes: int
    """Local memory a thread: what registers are spilled to, among other things."""
    shared_bytes: int
    """Static shared memory."""
    max_threads: int | None
    """Threads of a block, where the source says it."""


def kernels(artefact: bytes) -> list[Kernel]:
    """The kernels of all the cubins in an artefact, in their order there."""
    found = []
    at = artefact.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", artefact, at + 18)[0] == _EM_CUDA:
            found += _kernels_of(artefact, at)
        at = artefact.find(b"\x7fELF", at + 4)
    return found


def _kernels_of(data: bytes, base: int) -> list[Kernel]:
    offset, _, _, _, _, size, count, names_at = struct.unpack_from("<QIHHHHHH", data, base + 40)
    headers = [struct.unpack_from("<IIQQQQ", data, base + offset + i * size) for i in range(count)]
    names_base = base + headers[names_at][4]
    sections = {}
    for name_at, kind, _, _, start, length in headers:
        name = data[names_base + name_at : data.index(b"\0", names_base + name_at)].decode()
        sections[name] = (b"" if kind == _NOBITS else data[base + start : base + start + length], length)
    common = _attributes(sections[".nv.info"][0])
    registers = max(struct.unpack("<II", value)[1] for kind, value in common if kind == _REGCOUNT)
    stack = max(struct.unpack("<II", value)[1] for kind, value in common if kind == _FRAME_SIZE)
    result = []
    for name in (section.removeprefix(".text.") for section in sections if section.startswith(".text.")):
        own = _attributes(sections[f".nv.info.{name}"][0])
        threads = [struct.unpack("<III", value)[0] for kind, value in own if kind == _MAX_THREADS]
        shared = sections.get(f".nv.shared.{name}", (b"", 0))[1]
        result.append(Kernel(name, registers, stack, shared, threads[0] if threads else None))
    return result


def _attributes(section: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(section):
        form, kind, length = struct.unpack_from("<BBH", section, at)
        if form == _SIZED:
            found.append((kind, section[at + 4 : at + 4 + length]))
            at += length
        at += 4
    return found
