"""Steps of models in files of blocks, and of mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.decode_cpu.blocks import random_blocks
from benchmarks.decode_cpu.quantised import BYTES_OF_256
from paged_kv.bench.case_kinds import DTYPE_BYTES, StepCase
from paged_kv.bench.ours import OursStep, decoder_config
from paged_kv.bench.problems import Array, StepProblem
from paged_kv.graphs.encodings import Encoding
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.graphs.models.mixture import Experts

FileType = Literal["Q8_0", "Q4_K_M"]
"""llama.cpp's name of a whole file, by the encodings of its matrices."""
BLOCKS_TOLERANCE = 0.1
"""The error of logits where weights are in blocks: x is rounded to int8 for their products, which the oracle does not
do."""
MIXTURE_TOLERANCE = 0.3
"""The same of a mixture: where two experts are nearly as good, that rounding chooses."""
_LINE = 64  # bytes, at whose multiples matrices of blocks begin


@dataclass(frozen=True)
class FileStepCase(StepCase):
    """A step of a model whose matrices may be in GGUF's blocks, and whose layers may have experts: then Qwen3-MoE's."""

    problem = "benchmarks.decode_cpu.steps:FileStepProblem"
    ours = "benchmarks.decode_cpu.steps:OursFileStep"

    file_type: FileType | None = None
    """Matrices are in blocks, and `dtype` is that of K and V alone."""
    experts: int = 0
    """Experts of each layer, in place of its MLP; 0: none. `intermediate` is the inner dimension of each."""
    chosen: int = 0
    """Experts of a token."""

    def mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        plain = super().mlp_shapes()
        if not self.experts:
            return plain
        stacks = {name.replace("mlp.", "mlp.experts."): (self.experts, *shape) for name, shape in plain.items()}
        norms = {f"self_attn.{name}_norm": (self.head_dim,) for name in ("q", "k")}
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
        encoding = self.encoding(name)
        if encoding is None:
            return elements * DTYPE_BYTES[self.dtype if self.file_type is None else "float32"]
        return elements // 256 * BYTES_OF_256[encoding]

    def share_met(self, name: str, tokens: int) -> float:
        """The experts that so many tokens choose where each chooses at random."""
        return 1 - (1 - self.chosen / self.experts) ** tokens if ".experts." in name else 1


class FileStepProblem(StepProblem):
    case: FileStepCase

    def __init__(self, case: FileStepCase, seed: int) -> None:
        super().__init__(case, seed)
        if case.file_type is not None:
            self.tolerance = BLOCKS_TOLERANCE
        if case.experts:
            self.tolerance = MIXTURE_TOLERANCE

    def _fill(self, rng: np.random.Generator) -> Array:
        """Matrices of blocks `[..., N, bytes]`; norms and routers in float32. Blocks come from one row of them, from
        another place each; its length is prime, so that no two rows of a matrix are equal.
        """
        case = self.case
        if case.file_type is None:
            self._encodings: dict[str, Encoding] = {}
            return super()._fill(rng)
        self._shapes = shapes = case.shapes()
        found = {name: case.encoding(name) for name in case.matrices}
        self._encodings = {name: encoding for name, encoding in found.items() if encoding is not None}
        sizes = {
            name: math.prod(shapes[name][:-1]) * case.row_bytes(name, shapes[name][-1]) for name in self._encodings
        }
        memory = np.empty(sum(-(-size // _LINE) * _LINE for size in sizes.values()), np.uint8)
        self._rows = {encoding: random_blocks(encoding, rng, 16381, 256) for encoding in set(self._encodings.values())}
        self._starts = {name: int(rng.integers(16381)) for name in sizes}
        begin = 0
        for name, shape in shapes.items():
            if name not in sizes:
                plain = rng.standard_normal(shape, dtype=np.float32)
                norm = len(shape) == 1
                self.weights[name] = 1 + np.float32(0.1) * plain if norm else np.float32(shape[-1] ** -0.5) * plain
                continue
            weight = memory[begin : begin + sizes[name]]
            begin += -(-weight.size // _LINE) * _LINE
            weight[:] = self._taken(name, 0).reshape(-1)
            self.weights[name] = weight.reshape(*shape[:-1], -1)
        return memory

    def _taken(self, name: str, what: int, expert: int | None = None) -> Array:
        """Return what a matrix, or one of a stack, takes for 256 elements each of the row: its bytes (0) or its
        values (1).
        """
        row, shape = self._rows[self._encodings[name]][what], self._shapes[name]
        count = math.prod(shape if expert is None else shape[1:]) // 256
        start = self._starts[name] + (expert or 0) * count
        taken: Array = np.take(row, np.arange(start, start + count) % len(row), axis=0)
        return taken

    def values(self, name: str, expert: int | None = None) -> Array:
        """Return the numbers of a weight, or of one matrix of a stack."""
        name = f"{name}.weight"
        if name not in self._encodings:
            return self.weights[name] if expert is None else self.weights[name][expert]
        return self._taken(name, 1, expert).reshape(self._shapes[name] if expert is None else self._shapes[name][1:])

    def heads(self, h: Array, at: str) -> tuple[Array, Array, Array]:
        q, k, v = super().heads(h, at)
        if self.case.experts:
            q, k = self.norm(q, f"{at}.self_attn.q_norm"), self.norm(k, f"{at}.self_attn.k_norm")
        return q, k, v

    def mlp(self, h: Array, at: str) -> Array:
        if not self.case.experts:
            return super().mlp(h, at)
        scores = h @ self.weight(f"{at}.mlp.gate").T
        chosen = np.argsort(-scores, axis=1)[:, : self.case.chosen]
        weights = np.exp(np.take_along_axis(scores, chosen, 1))
        weights /= weights.sum(1, keepdims=True)
        out = np.zeros_like(h)
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            matrices = (
                self.values(f"{at}.mlp.experts.{name}_proj", expert).astype(np.float64)
                for name in ("gate", "up", "down")
            )
            out[rows] += weights[rows, places, None] * self.gated(h[rows], *matrices)
        return out


class OursFileStep(OursStep):
    def _config(self, case: StepCase) -> DecoderConfig:
        assert isinstance(case, FileStepCase)
        found = {name: case.encoding(name) for name in case.matrices}
        encodings = tuple((name, encoding) for name, encoding in found.items() if encoding is not None)
        config = replace(decoder_config(case), encodings=encodings, float32_activations=bool(encodings))
        if not case.experts:
            return config
        experts = Experts(
            count=case.experts,
            chosen=case.chosen,
            inner=case.intermediate,
            layers=(True,) * case.layers,
            sums_to_one=True,
            apart=True,
        )
        return replace(config, qk_norm="head", experts=experts)
