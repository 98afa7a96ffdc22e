"""The calls of FlashInfer's `rope` module that quantise, against the formula in float64 and the appends."""

import ml_dtypes
import numpy as np
import pytest

from api.test_rope import FREQUENCIES, POSITIONS, TABLE, D, K, Q, turned
from paged_kv import page, rope
from support.calls import NEW, f32
from support.kinds import bytes_of


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_quantised_parts_and_their_append(dtype: str, is_mla: bool) -> None:
    """What is rounded is the formula's, or its neighbour; the cache gets what `append_paged_kv_cache` writes of it."""
    at, largest = POSITIONS % 200, float(ml_dtypes.finfo(dtype).max)
    q_nope, k_rope, k_nope, v = f32(5, 4, 8), K, f32(5, 2, 8), f32(5, 2, 24)
    q_nope[0, 0, :2] = 1e6, -1e6  # past the largest number
    if is_mla:
        k_rope, k_nope = k_rope[:, 0], k_nope[:, 0]
    arrays = (Q, k_rope, q_nope, k_nope)
    outs = {"q_nope_out": np.zeros(q_nope.shape, dtype)}
    parts = rope.rope_quantize_fp8(*arrays, TABLE, at, False, None, 2.0, 0.5, **outs)
    assert parts[2] is outs["q_nope_out"]
    heads = k_rope.reshape(5, -1, D)
    exact = (turned(Q, at, FREQUENCIES, True) * 2, turned(heads, at, FREQUENCIES, True) / 2, q_nope * 2, k_nope / 2)
    for part, limited, x in zip(parts, exact, arrays, strict=True):
        assert (part.dtype, part.shape) == (dtype, x.shape)
        step = float(ml_dtypes.finfo(dtype).eps)
        limited = np.clip(limited.reshape(x.shape), -largest, largest)
        np.testing.assert_allclose(part.astype("f8"), limited, rtol=step / 2 + 1e-5, atol=2e-3)
    assert bytes_of(rope.mla_rope_quantize_fp8(*arrays, TABLE, at, False, dtype, 2.0, 0.5)) == bytes_of(parts)

    shapes = ((4, 4, 8), (4, 4, D)) if is_mla else [(4, 4, 2, 24)] * 2
    caches, expected = ([np.zeros(shape, dtype) for shape in shapes] for _ in range(2))
    table = {name: NEW[name] for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")}
    q = rope.rope_quantize_fp8_append_paged_kv_cache(
        *arrays, None if is_mla else v, TABLE, at, tuple(caches), **table, is_neox=False, quantize_dtype=dtype,
        quant_scale_q=2.0, quant_scale_kv=0.5, page_size=4,
    )  # fmt: skip
    assert bytes_of(q) == bytes_of((parts[0], parts[2]))
    if is_mla:
        page.append_paged_mla_kv_cache(parts[3], parts[1], ckv_cache=expected[0], kpe_cache=expected[1], **NEW)
    else:
        keys = np.concatenate([parts[1], parts[3]], -1)
        page.append_paged_kv_cache(keys, (v / 2).astype(dtype), paged_kv_cache=tuple(expected), **NEW)
    assert bytes_of(caches) == bytes_of(expected)
