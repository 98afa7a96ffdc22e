"""The kinds of cases: their operands' sizes, bytes and arithmetic."""

from __future__ import annotations

import math
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
    """The class of a name `module:Class`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class Versus:
    """A comparison with the fastest of some peers."""

    label: str
    peers: tuple[str, ...]
    """Keys of the grid's `PEERS`."""


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

    problem = "paged_kv.bench.problems:AttentionProblem"
    ours = "paged_kv.bench.ours:OursAttention"

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

    problem = "paged_kv.bench.problems:AppendProblem"
    ours = "paged_kv.bench.ours:OursAppend"
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
class LinearCase(Case):
    """`y = x w^T`: x `[rows, inner]`, w `[outer, inner]`."""

    problem = "paged_kv.bench.problems:LinearProblem"
    ours = "paged_kv.bench.ours:OursLinear"

    rows: int = 1
    outer: int = 8192
    inner: int = 4096
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        return self.outer * self.inner * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.outer * self.inner


@dataclass(frozen=True)
class StepCase(Case):
    """A whole step of a Llama model: `tokens` new tokens for each of `batch` requests that have `context` tokens."""

    problem = "paged_kv.bench.problems:StepProblem"
    ours = "paged_kv.bench.ours:OursStep"

    batch: int = 1
    tokens: int = 1
    context: int = 1024
    page_size: int = 16
    dtype: str = "bfloat16"
    layers: int = 16
    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 32000

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights, by their names in a checkpoint."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes[f"{at}.input_layernorm.weight"] = (self.hidden,)
            shapes[f"{at}.self_attn.q_proj.weight"] = (q, self.hidden)
            shapes[f"{at}.self_attn.k_proj.weight"] = (kv, self.hidden)
            shapes[f"{at}.self_attn.v_proj.weight"] = (kv, self.hidden)
            shapes[f"{at}.self_attn.o_proj.weight"] = (self.hidden, q)
            shapes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
            shapes |= {f"{at}.{name}.weight": shape for name, shape in self.mlp_shapes().items()}
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's MLP, by their names in the layer."""
        return {
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def row_bytes(self, name: str, elements: int) -> int:  # noqa: ARG002
        """Return the bytes of a row of the matrix of that name."""
        return elements * DTYPE_BYTES[self.dtype]

    def share_met(self, name: str, tokens: int) -> float:  # noqa: ARG002
        """Return the share of the matrix of that name that so many tokens are multiplied with."""
        return 1

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights but norms."""
        return {name: shape for name, shape in self.shapes().items() if len(shape) > 1}

    @property
    def parameters(self) -> int:
        """The parameters of the model, norms left out."""
        return sum(map(math.prod, self.matrices.values()))

    @property
    def bytes(self) -> int:
        """Weights and K and V, each read once; of the embedding table only a few rows are, so it does not count."""
        weights = sum(
            math.prod(shape[:-1]) * self.row_bytes(name, shape[-1]) * self.share_met(name, self.batch * self.tokens)
            for name, shape in self.matrices.items()
            if "embed" not in name
        )
        kv = 2 * self.layers * self.batch * (self.context + self.tokens) * self.kv_heads * self.head_dim
        return int(weights) + kv * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        seen = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        attention = 4 * self.layers * self.heads * self.head_dim * seen
        layers = {name: shape for name, shape in self.matrices.items() if ".layers." in name}
        met = round(sum(math.prod(shape) * self.share_met(name, 1) for name, shape in layers.items()))
        per_request = 2 * met * self.tokens + 2 * self.vocab * self.hidden + attention
        return self.batch * per_request

    @property
    def is_memory_bound(self) -> bool:
        return self.tokens == 1

    def rate(self, seconds: float) -> str:
        return f"{self.batch * self.tokens / seconds:.1f} tokens/s"

    @property
    def copies(self) -> int:
        """The weights are larger than a last-level cache."""
        return 1
