"""FlashInfer's `rope` calls against their formula in float64, and Llama 3.1's frequencies against transformers'."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paged_kv import rope
from support.calls import ROWS, f32, i32
from support.kinds import WRITABLE, bytes_of, make

D, POSITIONS = 16, i32(7, 8, 90_000, 90_001, 90_002)
Q, K = f32(5, 4, D), f32(5, 2, D)[..., ::-1].copy()
FREQUENCIES = 1e4 ** (-np.arange(0, D, 2) / D) / 2
TABLE = np.concatenate([part(np.arange(200)[:, None] * FREQUENCIES) for part in (np.cos, np.sin)], 1).astype("f4")


def turned(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, interleave: bool) -> np.ndarray:
    """Each pair of dimensions as a complex number, times that of its angle."""
    x, n = x.astype(np.float64), len(frequencies)
    pairs = [(2 * i, 2 * i + 1) if interleave else (i, n + i) for i in range(n)]
    for frequency, (a, b) in zip(frequencies, pairs, strict=True):
        z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * positions * frequency)[:, None]
        x[..., a], x[..., b] = z.real, z.imag
    return x


def assert_rounded(rotated: Any, expected: np.ndarray, dtype: str) -> None:
    """Within one step of the dtype, or of float32 near 0."""
    assert rotated.dtype == dtype
    step = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(rotated.astype(np.float64), expected, rtol=step, atol=2e-6)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rotations_are_the_formulas(dtype: str, rotary_dim: int | None, interleave: bool) -> None:
    dim = rotary_dim or D
    q, k = Q.astype(dtype), K.astype(dtype)
    options = {"rotary_dim": rotary_dim, "interleave": interleave, "rope_scale": 2.0, "rope_theta": 1e4}
    frequencies = 1e4 ** (-np.arange(0, dim, 2) / dim) / 2
    for call, at in ((rope.apply_rope, (ROWS, i32(7, 90_000))), (rope.apply_rope_pos_ids, (POSITIONS,))):
        for rotated, x in zip(call(q, k, *at, *options.values()), (q, k), strict=True):
            assert_rounded(rotated, turned(x, POSITIONS, frequencies, interleave), dtype)
    config = LlamaConfig(
        head_dim=dim, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    theirs = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
    np.testing.assert_allclose(
        rope.Llama31Rotation().stretched(5e5 ** (-np.arange(0, dim, 2) / dim)), theirs, rtol=1e-6
    )
    near = POSITIONS % 100  # their frequencies are float32
    rotated = rope.apply_llama31_rope_pos_ids(q, k, near, rotary_dim, interleave)[0]
    np.testing.assert_allclose(rotated.astype("f8"), turned(q, near, theirs, interleave), rtol=2e-2, atol=2e-5)
    by_rows = rope.apply_llama31_rope(q, k, i32(0, 1, 2, 3, 4, 5), near, rotary_dim, interleave)
    assert bytes_of(by_rows[0]) == bytes_of(rotated)


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("is_neox", [True, False])
def test_tables_and_writes_in_place(kind: str, is_neox: bool) -> None:
    """Rows of heads and flat rows; q and k are parts of one array, of which nothing else changes."""
    at = POSITIONS % 200
    expected = [turned(x, at, FREQUENCIES, not is_neox) for x in (Q, K)]
    both = make(kind, np.concatenate([Q, K], 1)) if kind != "max" else None
    q, k = (make(kind, Q), make(kind, K)) if both is None else (both[:, :4], both[:, 4:])
    results = rope.apply_rope_with_cos_sin_cache(at, q, k, D, TABLE, is_neox)
    assert rope.apply_rope_with_cos_sin_cache_inplace(at, q, k, D, cos_sin_cache=TABLE, is_neox=is_neox) is None
    for rotated, inplace, exact in zip(results, (q, k), expected, strict=True):
        assert bytes_of(rotated) == bytes_of(inplace)
        np.testing.assert_allclose(np.from_dlpack(rotated), exact, rtol=1e-6, atol=1e-6)
    flat = rope.apply_rope_with_cos_sin_cache(at, Q.reshape(5, -1), K, D, TABLE, is_neox)[0]
    np.testing.assert_allclose(flat.reshape(Q.shape), expected[0], rtol=1e-6, atol=1e-6)
