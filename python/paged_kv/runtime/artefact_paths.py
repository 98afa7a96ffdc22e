"""Places where compiled code may lie: with the package, or in the user's cache folder, for this CPU or for a lower
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from max.driver import get_virtual_cpu_target

from paged_kv.runtime.cpu_target import CpuInfo, usable_targets
from paged_kv.runtime.installed import InstalledStore, installed_stores
from paged_kv.runtime.store import Store


def places(
    cpu: CpuInfo, own: Callable[[], Store], *, exact: bool = False
) -> Iterator[tuple[str | None, Store | InstalledStore]]:
    """The stores that may have what is wanted, with the CPU target that it is for (None: the one in force), best first.

    What was compiled here for this very CPU is better than what came with the package for a lower target.

    Args:
        cpu: This one.
        own: Makes the user's, which is not asked for where it is not needed.
        exact: Whether code for a lower target is out of the question.
    """
    usable = usable_targets(get_virtual_cpu_target(), cpu)
    lower = [] if exact else usable[1:]
    for _, installed in installed_stores(usable[:1], cpu):
        yield None, installed
    yield None, own()
    yield from installed_stores(lower, cpu)


def origin(store: Store | InstalledStore, target: str | None) -> str:
    """Return where something in a store comes from, in words."""
    place = "with the package" if isinstance(store, InstalledStore) else "in the cache"
    return f"{place}, for {target or get_virtual_cpu_target() or 'this CPU'}"
