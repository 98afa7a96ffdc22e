"""The test of a fresh installation: one decode call, within 1e-5 of NumPy in float64. Run it outside the checkout."""

import sys
import time
from pathlib import Path

begin = time.perf_counter()
import numpy as np  # noqa: E402

import paged_kv  # noqa: E402
from paged_kv import reference  # noqa: E402

if Path(sys.prefix).resolve() not in Path(paged_kv.__file__).resolve().parents:
    sys.exit(f"paged_kv comes from {paged_kv.__file__}, not from the environment {sys.prefix}")

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((8, 64), (100, 2, 64), (100, 2, 64)))
o = paged_kv.single_decode_with_kv_cache(q, k, v)  # [8, 64]
seconds = time.perf_counter() - begin

page, row = np.zeros((1, 1), np.uint32), np.zeros(1, np.int32)
expected, _ = reference.attention(q[None], k[None], v[None], page, row, row + 100)
off = float(np.abs(o - expected[0]).max())
if not off <= 1e-5:
    sys.exit(f"the decode call is off by {off:.1e}")
print(
    f"paged_kv {paged_kv.__version__}: a decode call is within {off:.1e} of float64, {seconds:.1f} s from the import on"
)
