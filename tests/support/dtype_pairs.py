"""The dtypes that tests take together, by name."""

from paged_kv.graphs.paged_cache import DTYPES, KV_DTYPES

PAIRS = [(q.name, kv.name) for q in DTYPES for kv in KV_DTYPES if kv == q or kv.name.startswith("float8")]
"""Dtypes of q and of the cache, as the API takes them."""
GPU_DTYPES = [dtype for dtype in DTYPES if dtype.name != "float16"]
GPU_PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
]
"""The pairs of which calls are compiled by MAX for a GPU that is not there; the Mojo compiler makes others too."""
GPU_CODE_PAIRS = [("float32", "uint8"), ("bfloat16", "int8")]
"""Dtypes of q and of the memory of codes of which the same is done."""

LINEAR_PAIRS: tuple[tuple[str, str], ...] = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
)
"""Dtypes of x and of w."""
