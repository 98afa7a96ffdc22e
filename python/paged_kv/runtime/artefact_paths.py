"""The stores that compiled code may be in: with the package or in the user's cache, for this CPU or a lower one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from max.driver import get_virtual_cpu_target

from paged_kv.runtime.cpu_target import CpuInfo, usable_targets
from paged_kv.runtime.installed import InstalledStore, installed_stores
from paged_kv.runtime.store import Store


def places(
    cpu: CpuInfo, own: Callable[[], Store], *, exact: bool = False
) -> Iterator[tuple[str | None, Store | InstalledStore]]:
    """The stores to search, each with its CPU target (None: the one in force), best first.

    Code compiled here for this very CPU comes before the package's for a lower target.

    Args:
        cpu: This one.
        own: Makes the user's store; called only when the search reaches it.
        exact: Leave out code for lower targets.
    """
    usable = usable_targets(get_virtual_cpu_target(), cpu)
    lower = [] if exact else usable[1:]
    for _, installed in installed_stores(usable[:1], cpu):
        yield None, installed
    yield None, own()
    yield from installed_stores(lower, cpu)


def origin(store: Store | InstalledStore, target: str | None) -> str:
    """The place of an artefact in words: its store and CPU target."""
    place = "with the package" if isinstance(store, InstalledStore) else "in the cache"
    return f"{place}, for {target or get_virtual_cpu_target() or 'this CPU'}"
