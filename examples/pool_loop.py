"""A serving loop over a page pool: requests start, append, attend, extend and free, and no token is ever moved.

The pool says which pages a request owns; the cache is one array that the program allocates.
"""

import numpy as np

from paged_kv import BatchDecodeWithPagedKVCacheWrapper, PagePool, append_paged_kv_cache
from paged_kv.errors import PoolExhausted

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 2, 64, 16, 12
PROMPTS = {"a": 40, "b": 15, "c": 90, "d": 64}  # tokens
NEW_TOKENS = 20


def page_table(pool: PagePool, running: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The CSR table of the running requests: indptr `[B + 1]`, indices, last_page_len `[B]`."""
    pages = [pool.pages(name) for name in running]
    indptr = np.cumsum([0, *map(len, pages)]).astype(np.int32)
    last = [(pool.length(name) - 1) % PAGE_SIZE + 1 for name in running]
    return indptr, np.concatenate(pages).astype(np.int32), np.array(last, np.int32)


def main() -> None:
    rng = np.random.default_rng(0)
    pool, wrapper = PagePool(PAGES, PAGE_SIZE), BatchDecodeWithPagedKVCacheWrapper(None)
    # NaN at first: a slot that was read before it was written would show.
    cache = np.full((PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    waiting, running, generated = list(PROMPTS), [], dict.fromkeys(PROMPTS, 0)
    while waiting or running:
        new: list[tuple[str, int]] = []  # (request, position) of the tokens of this step
        for name in running:  # a decode step needs a slot for one more token
            pool.reserve(name)
            new.append((name, pool.length(name) - 1))
        # Admit while the pool has the pages for all that the request and those before it may still need.
        while waiting and fits(pool, [*running, waiting[0]]):
            name = waiting.pop(0)
            pool.start(name, PROMPTS[name])
            running.append(name)
            new += [(name, position) for position in range(PROMPTS[name])]

        indptr, indices, last_page_len = page_table(pool, running)
        requests = np.array([running.index(name) for name, _ in new], np.int32)
        positions = np.array([position for _, position in new], np.int32)
        k, v = rng.standard_normal((2, len(new), KV_HEADS, HEAD_DIM), np.float32)  # a model projects them
        append_paged_kv_cache(k, v, requests, positions, cache, indices, indptr, last_page_len)

        wrapper.plan(indptr, indices, last_page_len, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type="float32")
        o = wrapper.run(rng.standard_normal((len(running), HEADS, HEAD_DIM), np.float32), cache)
        assert np.isfinite(o).all()

        for name in list(running):
            generated[name] += 1
            if generated[name] == NEW_TOKENS:
                print(f"{name}: {pool.length(name)} tokens in {len(pool.pages(name))} pages, freed")
                pool.free(name)
                running.remove(name)
    pool.check_integrity()
    print(f"{pool.num_free} of {pool.num_pages} pages are free")
    try:
        pool.start("too long", PAGES * PAGE_SIZE + 1)
    except PoolExhausted as error:  # nothing has changed
        print(error)


def fits(pool: PagePool, names: list[str]) -> bool:
    """Return whether the pool can hold these requests until each is done."""
    return sum(-(-(PROMPTS[name] + NEW_TOKENS) // PAGE_SIZE) for name in names) <= pool.num_pages


if __name__ == "__main__":
    main()
