"""Pages and the requests that own them: the pool, and the prefixes that requests share."""

from paged_kv.pool.events import PageEvent
from paged_kv.pool.eviction import EvictionOrder
from paged_kv.pool.page_pool import Copy, Counts, PagePool, pages_needed
from paged_kv.pool.prefix import PrefixCache

__all__ = ["Copy", "Counts", "EvictionOrder", "PageEvent", "PagePool", "PrefixCache", "pages_needed"]
