"""Hostile operations on a page pool and on a cache manager, against a dictionary of what they should hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hostile.objects import NUMBERS, Refuses
from paged_kv.errors import PagedKVError
from paged_kv.page import PagedKVCacheManager
from paged_kv.pool import PagePool

IDS: tuple[Any, ...] = (0, 1, "a", (1, "b"), None, True, 10**400, b"x", frozenset({1}), [], {}, np.zeros(2), math.nan)
COUNTS: tuple[Any, ...] = (0, 1, 2, 3, 5, 9, 30, None, "3", [], *NUMBERS)


def valid_id(request_id: Any) -> bool:
    try:
        hash(request_id)
        return bool(request_id == request_id)
    except Exception:
        return False


def valid_count(count: Any) -> bool:
    return isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 0


def check(condition: Any, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def attempt(call: Any, *arguments: Any) -> tuple[bool, Any]:
    """Return whether a call returned, and what; a typed error is no return, any other one is raised."""
    try:
        return True, call(*arguments)
    except PagedKVError as error:
        check(str(error) and "\n" not in str(error) and len(str(error)) < 1000, "a message of one line")
        return False, error


class Pool:
    """`PagePool`: a sequence of operations, each of which does all or nothing."""

    name = "pool"

    def run(self, rng: np.random.Generator) -> None:
        pages, size = (
            NUMBERS[rng.integers(len(NUMBERS))] if rng.random() < 0.1 else int(rng.integers(1, 12)) for _ in "12"
        )
        made, pool = attempt(PagePool, pages, size)
        valid = valid_count(pages) and valid_count(size) and size >= 1 and max(pages, size) < 2**31
        check(made == valid, f"PagePool({type(pages)}, {type(size)}): {made}")
        if not made:
            return
        held: dict[Any, tuple[int, tuple[int, ...]]] = {}
        for _ in range(30):
            request_id, count = (source[rng.integers(len(source))] for source in (IDS, COUNTS))
            request_id = Refuses() if rng.random() < 0.02 else request_id
            call = str(rng.choice(["start", "reserve", "free", "extend"]))
            known = valid_id(request_id) and request_id in held
            length, old = held[request_id] if known else (0, ())
            valid = known if call in ("reserve", "free") else valid_id(request_id) and (call == "extend" or not known)
            if call == "free":
                done, _ = attempt(pool.free, request_id)
                check(done == valid, f"free: {done}")
                if done:
                    del held[request_id]
            else:
                valid = valid and valid_count(count) and count < 2**63
                needed = -(-(length + int(count)) // size) - len(old) if valid else 0
                valid = valid and needed <= pages - sum(len(used) for _, used in held.values())
                writes = [] if call != "extend" else [lambda *_: None]
                done, added = attempt(getattr(pool, call), request_id, count, *writes)
                check(done == valid, f"{call}({type(request_id)}, {type(count)}): {done}")
                if done:
                    held[request_id] = length + int(count), pool.pages(request_id)
                    check(call == "extend" or old + added == pool.pages(request_id), "pages")
                    check(len(pool.pages(request_id)) == len(old) + needed, "as many pages")
            pool.check_integrity()
            check(all((pool.length(r), pool.pages(r)) == of for r, of in held.items()), "requests")
            check(pool.num_used == sum(len(used) for _, used in held.values()), "pages in use")


class Manager:
    """`PagedKVCacheManager`: appends and frees, each of which does all or nothing."""

    name = "manager"

    def run(self, rng: np.random.Generator) -> None:
        sizes: list[Any] = [int(rng.integers(1, 8)), int(rng.integers(1, 5)), 2, 8]
        if rng.random() < 0.2:
            sizes[rng.integers(4)] = NUMBERS[rng.integers(len(NUMBERS))]
        kind = str(rng.choice(["numpy", "torch"]))
        made, it = attempt(lambda: PagedKVCacheManager(*sizes, "float32", kind=kind))
        if not all(valid_count(size) and size >= least for size, least in zip(sizes, (0, 1, 1, 1), strict=True)):
            check(not made, "sizes that are none")
        if not made or it.kv_cache.nbytes > 1 << 20:
            return
        held: dict[Any, np.ndarray] = {}
        storage = np.asarray(it.kv_cache)
        for _ in range(12):
            request_id = IDS[rng.integers(len(IDS))]
            if rng.random() < 0.2:
                done, _ = attempt(it.free, request_id)
                check(done == (valid_id(request_id) and request_id in held), "free")
                if done:
                    del held[request_id]
                continue
            count = int(rng.integers(0, 9))
            new = rng.standard_normal((2, count, int(sizes[2]), int(sizes[3])), np.float32)
            rows = [new[0], new[1]]
            if rng.random() < 0.2:
                rows[rng.integers(2)] = [None, 3, new[0].astype("f8"), new[0][:, :1], new[:, None], storage][
                    rng.integers(6)
                ]
            before = storage.tobytes()
            done, _ = attempt(it.append, request_id, *rows)
            if not done:
                check(storage.tobytes() == before, "a refused append wrote")
            else:
                check(all(type(row) is np.ndarray and row.dtype == np.float32 for row in rows), "rows that are none")
                check(valid_id(request_id), "an id that is none")
                old = held.get(request_id, np.zeros((2, 0, *new.shape[2:]), np.float32))
                held[request_id] = np.concatenate([old, np.stack(rows)], 1)
            it.pool.check_integrity()
            for request, wanted in held.items():
                pages = np.asarray(it.get_page_table(request))
                found = storage[pages].swapaxes(0, 1).reshape(2, -1, *new.shape[2:])[:, : it.get_seq_len(request)]
                check(found.tobytes() == wanted.tobytes(), "what a request holds")
