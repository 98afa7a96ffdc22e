"""The kinds of cases: their operands' sizes, bytes and arithmetic."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from paged_kv.arrays.dtypes import DTYPES
from paged_kv.graphs.encodings import TABLE, Encoding
from paged_kv.kv_formats import CODE_DTYPES
from paged_kv.options import KV_DTYPES, stored_dtype, stored_head

MIN_BYTES = 128 * 2**20
"""Bytes of K and V (or weights) in one call of a memory-bound case."""
MIN_COPIES = 20
MIN_ROTATED = 2.6e9
"""Bytes of all copies together. A cache that is used again at once comes from the last-level cache: 480 MB on some
machines."""

DTYPE_BYTES = {name: DTYPES[stored_dtype(name)].itemsize for name in (*KV_DTYPES, *CODE_DTYPES)}
"""Bytes of a stored number; a head of codes has as many numbers as `options.stored_head` says."""
Layout = Literal["NHD", "HND", "MAX"]
MAX_ENCODINGS = ("Q4_0", "Q4_K", "Q6_K")
"""That MAX has products for on a CPU."""
FileType = Literal["Q8_0", "Q4_K_M"]
"""llama.cpp's name of a whole file, by the encodings of its matrices."""
BYTES_OF_256 = {name: block.bytes * 256 // block.elements for name, block in TABLE.items()}
"""Bytes of 256 quantised weights."""


@dataclass(frozen=True)
class Versus:
    """A comparison: the fastest of some peers, and the least factor by which we are meant to be faster."""

    label: str
    peers: tuple[str, ...]
    """Keys of `peers.PEERS`."""
    at_least: float | None = None
    """None: for information."""


@dataclass(frozen=True)
class Case(ABC):
    """Fields that every case has. `share` is what its bytes over its time should be of the read (append: copy)
    bandwidth.

    The targets in `CASES` are those of CPUs with AMX; `targets.py` has the others'.
    """

    name: str
    title: str
    share: float | None = None
    versus: tuple[Versus, ...] = ()
    either: bool = False
    """True if reaching one target, of the share's and the factors', is enough."""

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
    def copies(self) -> int:
        """Sets of operands that take turns."""
        return max(MIN_COPIES, -int(-MIN_ROTATED // self.bytes))

    @property
    def peers(self) -> list[str]:
        return [peer for versus in self.versus for peer in versus.peers]


@dataclass(frozen=True)
class AttentionCase(Case):
    """Requests of `lengths` tokens; each has its `new_tokens` last tokens as query rows (1: a decode step)."""

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


@dataclass(frozen=True)
class CascadeCase(Case):
    """A decode step of `batch` requests that share their first `shared` tokens and have `own` tokens each."""

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


@dataclass(frozen=True)
class PrefillCase(AttentionCase):
    """The same through the prefill wrapper of the array API."""


@dataclass(frozen=True)
class LatentCase(Case):
    """A decode step of latent attention (MLA): `batch` requests of `length` tokens."""

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


@dataclass(frozen=True)
class AppendCase(Case):
    """`tokens` new tokens for each of `batch` requests, written after `context` tokens."""

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
    def copies(self) -> int:
        """By the size of the cache that is written to, new tokens included."""
        cache = self.bytes // self.tokens * (self.context + self.tokens)
        return max(MIN_COPIES, -int(-MIN_ROTATED // cache))


@dataclass(frozen=True)
class LinearCase(Case):
    """`y = x w^T`: x `[rows, inner]`, w `[outer, inner]`."""

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
class QuantisedCase(LinearCase):
    """The same with w in GGUF's blocks; `dtype` is that of x."""

    dtype: str = "float32"
    encoding: Encoding = "Q4_K"

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of w."""
        return self.inner // 256 * BYTES_OF_256[self.encoding]

    @property
    def bytes(self) -> int:
        return self.outer * self.row_bytes


@dataclass(frozen=True)
class ExpertCase(Case):
    """One row of x through `chosen` experts of a stack w `[experts, outer, inner]`; the next run chooses others."""

    outer: int = 2048
    inner: int = 4096
    dtype: str = "bfloat16"
    experts: int = 64
    chosen: int = 8
    encoding: Encoding | None = None
    """The encoding of w, x being float32; w is of `dtype` too where it is None."""

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of an expert."""
        if self.encoding is None:
            return self.inner * DTYPE_BYTES[self.dtype]
        return self.inner // 256 * BYTES_OF_256[self.encoding]

    @property
    def bytes(self) -> int:
        return self.chosen * self.outer * self.row_bytes

    @property
    def flops(self) -> int:
        return 2 * self.chosen * self.outer * self.inner

    @property
    def copies(self) -> int:
        """Stacks."""
        return max(1, -int(-MIN_ROTATED // (self.experts * self.outer * self.row_bytes)))


@dataclass(frozen=True)
class StepCase(Case):
    """A whole step of a Llama model: `tokens` new tokens for each of `batch` requests that have `context` tokens.

    With experts it is a Qwen3-MoE model.
    """

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
    file_type: FileType | None = None
    """Matrices are in GGUF's blocks, and `dtype` is that of K and V alone."""
    experts: int = 0
    """Experts of each layer, in place of its MLP; 0: none. `intermediate` is the inner dimension of each."""
    chosen: int = 0
    """Experts of a token."""

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
            mlp, stack = (f"{at}.mlp.experts", (self.experts,)) if self.experts else (f"{at}.mlp", ())
            shapes[f"{mlp}.gate_proj.weight"] = (*stack, self.intermediate, self.hidden)
            shapes[f"{mlp}.up_proj.weight"] = (*stack, self.intermediate, self.hidden)
            shapes[f"{mlp}.down_proj.weight"] = (*stack, self.hidden, self.intermediate)
            if self.experts:
                shapes[f"{at}.mlp.gate.weight"] = (self.experts, self.hidden)
                shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def encoding(self, name: str) -> Encoding | None:
        """Return the encoding of the matrix of that name, None where it is plain. Q4_K_M is llama.cpp's rule, read
        from its source.
        """
        if self.file_type is None or name.endswith("mlp.gate.weight"):
            return None
        if self.file_type == "Q8_0":
            return "Q8_0"
        if name == "lm_head.weight":
            return "Q6_K"
        if not name.endswith(("v_proj.weight", "down_proj.weight")):
            return "Q4_K"
        layer, eighth = int(name.split(".")[2]), self.layers // 8
        is_wide = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
        return "Q6_K" if is_wide else "Q4_K"

    def row_bytes(self, name: str, elements: int) -> int:
        """Return the bytes of a row of the matrix of that name."""
        encoding = self.encoding(name)
        if encoding is None:
            return elements * DTYPE_BYTES[self.dtype if self.file_type is None else "float32"]
        return elements // 256 * BYTES_OF_256[encoding]

    @property
    def block_weights(self) -> int:
        """Weights of all layers that a token meets."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.experts * self.hidden
        return self.layers * (attention + router + 3 * max(1, self.chosen) * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """The parameters of the model, norms left out."""
        return sum(math.prod(shape) for shape in self.shapes().values() if len(shape) > 1)

    @property
    def bytes(self) -> int:
        """Weights and K and V, each read once; of the embedding table only a few rows are, so it does not count. Of
        experts, those that so many tokens choose where each chooses at random.
        """
        matrices = {name: shape for name, shape in self.shapes().items() if len(shape) > 1 and "embed" not in name}
        sizes = {name: math.prod(shape[:-1]) * self.row_bytes(name, shape[-1]) for name, shape in matrices.items()}
        met = 1 - (1 - self.chosen / max(1, self.experts)) ** (self.batch * self.tokens)
        weights = sum(size * (met if ".experts." in name else 1) for name, size in sizes.items())
        kv = 2 * self.layers * self.batch * (self.context + self.tokens) * self.kv_heads * self.head_dim
        return int(weights) + kv * DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        seen = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        attention = 4 * self.layers * self.heads * self.head_dim * seen
        per_request = 2 * self.block_weights * self.tokens + 2 * self.vocab * self.hidden + attention
        return self.batch * per_request

    @property
    def copies(self) -> int:
        """The weights are larger than a last-level cache."""
        return 1
