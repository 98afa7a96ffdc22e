"""Pages and the requests that own them: the only allocator of page ids, and the only order of eviction.

`state` is the allocator, `eviction` the order in which cached pages are taken, `page_pool` the operations on requests,
`prefix` the prefixes that requests share, `events` what listeners are told, `integrity` the proof that no page is lost.
"""

from paged_kv.pool.events import PageEvent
from paged_kv.pool.eviction import EvictionOrder
from paged_kv.pool.page_pool import Copy, Counts, PagePool, pages_needed
from paged_kv.pool.prefix import PrefixCache, WindowPages

__all__ = ["Copy", "Counts", "EvictionOrder", "PageEvent", "PagePool", "PrefixCache", "WindowPages", "pages_needed"]
