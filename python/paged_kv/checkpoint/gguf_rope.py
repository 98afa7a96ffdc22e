"""The rotary scaling of a GGUF file as `rope_scaling` of config.json: keys and tensors, as llama.cpp reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_kv.checkpoint.gguf_header import GgufHeader
from paged_kv.checkpoint.gguf_keys import Metadata
from paged_kv.errors import CheckpointError
from paged_kv.graphs.models.config import THETA
from paged_kv.graphs.models.family import FREQUENCIES, LONG_ROPE
from paged_kv.graphs.models.fields import Fields
from paged_kv.graphs.rope import Llama3, Rope, Yarn

_LONG_ROPE = tuple(LONG_ROPE.values())
_MAX_DIVISOR = 1e9


def rope_tensors(metadata: Metadata, allowed: Sequence[str]) -> tuple[str, ...]:
    """The file's tensors that are a part of its scaling, of those that its family may have."""
    present = tuple(name for name in allowed if name in metadata.header.tensors)
    if not set(allowed).issuperset((FREQUENCIES, *_LONG_ROPE)):
        return present
    # With both kinds llama.cpp goes by the type.
    kind = _LONG_ROPE if metadata.scalar("rope.scaling.type") == "longrope" else (FREQUENCIES,)
    return tuple(name for name in present if name in kind)


def read_scaling(metadata: Metadata, tensors: Sequence[str], rotated: int, theta: float) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, None where there is no scaling.

    Args:
        tensors: Those of `rope_tensors`.
        rotated: The dimensions of a head that are rotated.
        theta: The base of their frequencies.

    Raises:
        CheckpointError: a value is none that is computed here, or contradicts another one.
    """
    kind = metadata.scalar("rope.scaling.type")
    kind = "linear" if kind is None else kind  # llama.cpp's, where none is said
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.error("rope.scaling.type", "expected none, linear, yarn or longrope")
    # Files of 2023 have the older name.
    name = "rope.scaling.factor" if metadata.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = metadata.number(name, 1.0) or 1.0
    if factor != 1 and (kind == "none" or tensors):
        raise metadata.error(
            name, f"expected one scaling: there is also {tensors[0] if tensors else 'rope.scaling.type none'}"
        )
    if kind == "yarn" and tensors:
        raise metadata.error("rope.scaling.type", f"expected one scaling: there is also tensor {tensors[0]}")
    is_long = bool(tensors) and tensors[0] in _LONG_ROPE
    if kind == "longrope" or is_long:
        missing = [tensor for tensor in _LONG_ROPE if tensor not in tensors]
        if missing:
            raise metadata.error("rope.scaling.type", f"requires tensor {missing[0]}")
    sharpening = metadata.number("rope.scaling.attn_factor", 1.0)
    if sharpening != 1 and not is_long:
        raise metadata.error("rope.scaling.attn_factor", "expected 1 without factors for long contexts")
    # The converter writes YaRN's own value of it; what others would mean, llama.cpp and transformers disagree about.
    own = Yarn.sharpening(factor) if kind == "yarn" else 1.0
    if not math.isclose(metadata.number("rope.scaling.yarn_attn_factor", own), own, rel_tol=1e-5):
        raise metadata.error("rope.scaling.yarn_attn_factor", f"expected {own:g}")

    context = None
    if metadata.scalar("rope.scaling.original_context_length") is not None:
        context = metadata.integer("rope.scaling.original_context_length")
    if is_long:
        factors = {key: _float32(metadata.header, name).tolist() for key, name in LONG_ROPE.items()}
        scaling: dict[str, Any] = {"rope_type": "longrope", "attention_factor": sharpening}
        return scaling | {"original_max_position_embeddings": context} | factors
    if tensors:
        pairs = _turning_pairs(metadata.header, rotated)
        if pairs is not None:  # readers take the integer below
            return {"rope_type": "proportional", "partial_rotary_factor": (2 * pairs + 0.5) / rotated}
        return _llama3_scaling(metadata.header, rotated, theta)
    if kind == "yarn":
        turns = {"beta_fast": 32.0, "beta_slow": 1.0}
        scaling = {name: metadata.number(f"rope.scaling.yarn_{name}", turn) for name, turn in turns.items()}
        return scaling | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _turning_pairs(header: GgufHeader, rotated: int) -> int | None:
    """The number of pairs of dimensions that turn, where the others are kept still by a divisor of 1e30; None where the
    divisors are others.
    """
    divisors = _float32(header, FREQUENCIES)
    pairs = int((divisors == 1).sum())
    expected = np.where(np.arange(rotated // 2) < pairs, np.float32(1), np.float32(1e30))
    return pairs if 0 < pairs < rotated // 2 and np.array_equal(divisors, expected) else None


def _llama3_scaling(header: GgufHeader, rotated: int, theta: float) -> dict[str, Any]:
    """The parameters of Llama 3's scaling from the divisors that the file has in their place.

    Every Llama of this scaling has 1, 4 and 8192; the factor is the largest divisor. Others are refused.
    """
    divisors = _float32(header, FREQUENCIES)
    factor = float(divisors.max(initial=1))
    theta = Fields(header.file, {"rope_theta": theta}).number("rope_theta", None, *THETA)
    if divisors.shape != (rotated // 2,) or not np.all((divisors > 0) & (divisors < _MAX_DIVISOR)):
        matches = False
    else:
        rope = Rope(rotated, theta, Llama3(factor, 1.0, 4.0, 8192))
        expected = Rope(rotated, theta).inverse_frequencies() / rope.inverse_frequencies()
        matches = np.allclose(divisors, expected, rtol=1e-4, atol=0)
    if not matches:
        raise CheckpointError(f"{header.file}: tensor {FREQUENCIES} is not Llama 3's scaling of {rotated} "
                              f"dimensions by {factor:g}")  # fmt: skip
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _float32(header: GgufHeader, name: str) -> np.ndarray:
    tensor = header.tensors[name]
    if tensor.encoding != "F32":
        raise CheckpointError(f"{header.file}: tensor {name}: expected encoding F32, got {tensor.encoding}")
    return tensor.data.view(np.float32)
