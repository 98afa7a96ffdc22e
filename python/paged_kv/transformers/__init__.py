"""Hugging Face transformers on paged caches: `generate` and `generate_batch` of models with full or sliding attention.

    import paged_kv.transformers

    paged_kv.transformers.enable()
    model.generate(...)  # and model.generate_batch(...): as before, on this package's pages and kernels

`disable()` puts transformers' own code back, and `with paged_kv.transformers.enabled():` does so at its end.
"""

from __future__ import annotations

from paged_kv.transformers.cache import PagedCache
from paged_kv.transformers.switch import TESTED, disable, enable, enabled

__all__ = ["TESTED", "PagedCache", "disable", "enable", "enabled"]
