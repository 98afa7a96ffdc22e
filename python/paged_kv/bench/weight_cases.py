"""Cases of products with weights: linear layers, experts, whole steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paged_kv.bench.case_kinds import DTYPE_BYTES, MIN_ROTATED, Case
from paged_kv.graphs.encodings import TABLE, Encoding

MAX_ENCODINGS = ("Q4_0", "Q4_K", "Q6_K")
"""That MAX has products for on a CPU."""
BYTES_OF_256 = {name: block.bytes * 256 // block.elements for name, block in TABLE.items()}
"""Bytes of 256 quantised weights."""
FileType = Literal["Q8_0", "Q4_K_M"]
"""llama.cpp's name of a whole file, by the encodings of its matrices."""


@dataclass(frozen=True)
class LinearCase(Case):
    """`y = x w^T`: x `[rows, inner]`, w `[outer, inner]`."""

    problem = "problems:LinearProblem"
    ours = "ours:OursLinear"

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

    problem = "quantised:QuantisedProblem"
    ours = "quantised:OursQuantised"

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

    problem = "quantised:ExpertProblem"
    ours = "quantised:OursExperts"

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

    Its matrices may be in GGUF's blocks, and its layers may have experts: then it is a Qwen3-MoE.
    """

    problem = "steps:StepProblem"
    ours = "steps:OursStep"

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
    """Matrices are in blocks, and `dtype` is that of K and V alone."""
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
            shapes |= {f"{at}.{name}.weight": shape for name, shape in self.mlp_shapes().items()}
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's MLP or experts, by their names in the layer."""
        plain: dict[str, tuple[int, ...]] = {
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        if not self.experts:
            return {f"mlp.{name}": shape for name, shape in plain.items()}
        stacks: dict[str, tuple[int, ...]] = {
            f"mlp.experts.{name}": (self.experts, *shape) for name, shape in plain.items()
        }
        norms: dict[str, tuple[int, ...]] = {f"self_attn.{name}_norm": (self.head_dim,) for name in ("q", "k")}
        return stacks | {"mlp.gate": (self.experts, self.hidden)} | norms

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

    def share_met(self, name: str, tokens: int) -> float:
        """Return the share of the matrix of that name that so many tokens are multiplied with: of experts, where each
        token chooses at random.
        """
        return 1 - (1 - self.chosen / self.experts) ** tokens if ".experts." in name else 1

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
