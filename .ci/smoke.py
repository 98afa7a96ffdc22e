"""What a fresh installation must do: one decode call, within 1e-5 of NumPy in float64. Run it outside the checkout."""

import math
import sys
import time
from pathlib import Path

begin = time.perf_counter()
import numpy as np  # noqa: E402

import paged_kv  # noqa: E402

if Path(sys.prefix).resolve() not in Path(paged_kv.__file__).resolve().parents:
    sys.exit(f"paged_kv comes from {paged_kv.__file__}, not from the environment {sys.prefix}")

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((8, 64), (100, 2, 64), (100, 2, 64)))
o = paged_kv.single_decode_with_kv_cache(q, k, v)  # [8, 64]
seconds = time.perf_counter() - begin

rows, keys, values = q.astype(np.float64).reshape(2, 4, 64), k.astype(np.float64), v.astype(np.float64)
scores = np.einsum("hgd,lhd->hgl", rows, keys) / math.sqrt(64)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
weights /= weights.sum(axis=-1, keepdims=True)
expected = np.einsum("hgl,lhd->hgd", weights, values).reshape(8, 64)
off = float(np.abs(o - expected).max())
if not off <= 1e-5:
    sys.exit(f"the decode call is off by {off:.1e}")
print(
    f"paged_kv {paged_kv.__version__}: a decode call is within {off:.1e} of float64, {seconds:.1f} s from the import on"
)
