"""Every variant that the array API loads: these are compiled ahead.

A float8 query is widened before the op and a float8 output rounded after it, so queries and outputs are of three
dtypes here; a cache has its queries' dtype or a float8 one.
"""

from __future__ import annotations

from paged_kv.graphs.ops import BITS, DTYPES, KV_DTYPES
from paged_kv.options import FLOAT8_DTYPES
from paged_kv.runtime import variants
from paged_kv.runtime.compile_key import CompileKey
from paged_kv.runtime.variants import Op, Variant

_ATTENTION: tuple[Op, ...] = ("attention", "masked_attention", "mla_attention")


def _families() -> dict[str, tuple[Variant, ...]]:
    families = {}
    for op in _ATTENTION:
        for q in DTYPES:
            for kv in KV_DTYPES:
                if kv == q or kv.name in FLOAT8_DTYPES:
                    outputs = (None, *(dtype for dtype in DTYPES if dtype != q))
                    members = tuple(Variant(op, q, kv, output) for output in outputs)
                    families[members[0].name] = members
    families["copies"] = tuple(variant for bits in BITS for variant in Variant("append", bits, bits).family())
    families["merges"] = tuple(Variant("merge", dtype, dtype) for dtype in DTYPES)
    return families


API_FAMILIES: dict[str, tuple[Variant, ...]] = _families()
"""The variants that lie in one file when they are compiled ahead, by the file's name.

A module of three graphs compiles in half the time of three modules, and loads in 15 ms where one takes 12 (for haswell,
on Zen 5, 2026-11-23).
"""

API_VARIANTS = frozenset(variant for family in API_FAMILIES.values() for variant in family)


def variant_key(variant: Variant, architecture: str = "") -> CompileKey:
    """What a variant depends on; `architecture` is a GPU's, with its number."""
    return CompileKey(variant.name, variants.__name__, (variants.REGISTERED[variant.op],), architecture)
