"""The dtypes of q and of the cache that the API takes together, by name."""

from paged_kv.graphs.paged_cache import DTYPES, KV_DTYPES

PAIRS = [(q.name, kv.name) for q in DTYPES for kv in KV_DTYPES if kv == q or kv.name.startswith("float8")]
