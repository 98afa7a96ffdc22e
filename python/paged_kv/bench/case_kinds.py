"""The kinds of cases: their operands' sizes, bytes and arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from paged_kv.arrays.dtypes import DTYPES
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.options import KV_DTYPES, stored_dtype, stored_head

MIN_COPIES = 20
MIN_ROTATED = 2.6e9
"""Bytes of all copies together. A cache that is used again at once comes from the last-level cache: 480 MB on some
machines."""

DTYPE_BYTES = {name: DTYPES[stored_dtype(name)].itemsize for name in (*KV_DTYPES, *CODE_DTYPES)}
"""Bytes of a stored number; a head of codes has as many numbers as `options.stored_head` says."""
Layout = Literal["NHD", "HND", "MAX"]


def named(name: str) -> Any:
    """The class of a name `module:Class`, of a module of this package."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"paged_kv.bench.{module}"), attribute)


@dataclass(frozen=True)
class Versus:
    """A comparison with the fastest of some peers."""

    label: str
    peers: tuple[str, ...]
    """Keys of `cases.PEERS`."""


@dataclass(frozen=True)
class Case(ABC):
    """Fields that every case has. Classes that build its operands and run it are named, not imported."""

    name: str
    title: str
    versus: tuple[Versus, ...] = ()

    problem: ClassVar[str]
    """The `problems.Problem` of the kind."""
    ours: ClassVar[str]
    """The `ours.Ours` of the kind."""
    ceiling: ClassVar[Literal["read", "copy"]] = "read"
    """The bandwidth that its bytes over its time are a share of."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """That one run must move: each byte counted once."""

    @property
    def flops(self) -> int:
        """The floating-point operations of one run, a multiplication and an addition counted as two; 0 where there is
        no arithmetic.
        """
        return 0

    @property
    def is_memory_bound(self) -> bool:
        """True if its share of the bandwidth says something."""
        return True

    @property
    def copies(self) -> int:
        """Sets of operands that take turns."""
        return max(MIN_COPIES, -int(-MIN_ROTATED // self.bytes))

    @property
    def peers(self) -> list[str]:
        return [peer for versus in self.versus for peer in versus.peers]

    def rate(self, seconds: float) -> str:
        """Return what a user would count: bytes, tokens or arithmetic a second."""
        if self.is_memory_bound:
            return f"{self.bytes / seconds / 1e9:.1f} GB/s"
        return f"{self.flops / seconds / 1e9:.0f} GFLOP/s"


@dataclass(frozen=True)
class AttentionCase(Case):
    """Requests of `lengths` tokens; each has its `new_tokens` last tokens as query rows (1: a decode step)."""

    problem = "problems:AttentionProblem"
    ours = "ours:OursAttention"

    lengths: tuple[int, ...] = (4096,) * 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    """The dtype of q and the output."""
    kv_dtype: str = "bfloat16"
    page_size: int = 16
    layout: Layout = "NHD"
    """MAX: all layers in one array, the copies being its layers."""
    new_tokens: int = 1
    rope_theta: float | None = None
    """Keys are stored without their rotation, and rotated when they are read."""

    @property
    def bytes(self) -> int:
        head = stored_head(self.kv_dtype, self.head_dim) * DTYPE_BYTES[self.kv_dtype]
        return 2 * sum(self.lengths) * self.kv_heads * head

    @property
    def flops(self) -> int:
        # Row r of a request sees all tokens but those after its own.
        n = self.new_tokens
        seen = sum(length * n - n * (n - 1) // 2 for length in self.lengths)
        return 4 * self.heads * self.head_dim * seen

    @property
    def is_memory_bound(self) -> bool:
        return self.new_tokens == 1


@dataclass(frozen=True)
class AppendCase(Case):
    """`tokens` new tokens for each of `batch` requests, written after `context` tokens."""

    problem = "problems:AppendProblem"
    ours = "ours:OursAppend"
    ceiling = "copy"

    batch: int = 1
    tokens: int = 4096
    context: int = 4096
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    """That of the tokens, or codes that they become."""
    page_size: int = 16

    @property
    def bytes(self) -> int:
        head = stored_head(self.kv_dtype, self.head_dim) * DTYPE_BYTES[self.kv_dtype]
        return 2 * self.batch * self.tokens * self.kv_heads * head

    @property
    def is_copy(self) -> bool:
        """True if it is held against memcpy: it changes no bit, and has more than a few tokens."""
        return self.kv_dtype == self.dtype and self.tokens > 1

    @property
    def copies(self) -> int:
        """By the size of the cache that is written to, new tokens included."""
        cache = self.bytes // self.tokens * (self.context + self.tokens)
        return max(MIN_COPIES, -int(-MIN_ROTATED // cache))


@dataclass(frozen=True)
class CascadeCase(Case):
    """A decode step of `batch` requests that share their first `shared` tokens and have `own` tokens each."""

    problem = "wrappers:CascadeProblem"
    ours = "wrappers:OursCascade"

    batch: int = 16
    shared: int = 8192
    own: int = 256
    heads: int = 32
    kv_heads: int = 8

    @property
    def flat(self) -> AttentionCase:
        """The same step without a cascade: each request attends to all its tokens."""
        lengths = (self.shared + self.own,) * self.batch
        return AttentionCase(self.name, self.title, lengths=lengths, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def bytes(self) -> int:
        """The shared tokens counted once."""
        return self.flat.bytes // (self.batch * (self.shared + self.own)) * (self.shared + self.batch * self.own)

    @property
    def flops(self) -> int:
        return self.flat.flops

    @property
    def is_memory_bound(self) -> bool:
        """No: each token that is read is multiplied with every request's query."""
        return False


@dataclass(frozen=True)
class PrefillCase(AttentionCase):
    """The same through the prefill wrapper of the array API."""

    ours = "wrappers:OursPrefill"


@dataclass(frozen=True)
class LatentCase(Case):
    """A decode step of latent attention (MLA): `batch` requests of `length` tokens."""

    problem = "latent:LatentProblem"
    ours = "latent:OursLatent"

    batch: int = 8
    length: int = 4096
    heads: int = 128
    ckv: int = 512
    kpe: int = 64
    dtype: str = "bfloat16"
    page_size: int = 16

    @property
    def bytes(self) -> int:
        return self.batch * self.length * (self.ckv + self.kpe) * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.length * self.heads * (2 * self.ckv + self.kpe)
