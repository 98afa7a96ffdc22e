"""The state of the pool, as the page is told it."""

import pytest

from paged_kv.engine import load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.sampling import Sampling
from paged_kv.serve import web_page


@pytest.mark.parametrize("cells", [8, 4])
def test_pages_by_owner_and_by_request(monkeypatch, cells):
    """Adjacent pages share a cell where there are more pages than cells; the cell is that of most owners."""
    monkeypatch.setattr(web_page, "MOST_CELLS", cells)
    engine = load(FOLDER, num_pages=8, page_size=4, dtype="float32")
    engine.pool.start("a", 9)
    engine.pool.fork("a", "b")
    engine.pool.start("c", 3)
    owned = {name: engine.pool.pages(name) for name in "abc"}
    told = web_page.pool_now(engine)
    counts = [sum(at in pages for pages in owned.values()) for at in range(8)]
    assert told["owners"] == [max(counts[at : at + 8 // cells]) for at in range(0, 8, 8 // cells)]
    shared = len(set(owned["a"]) & set(owned["b"]))
    assert told["requests"] == [
        {"name": "a", "pages": 3, "shared": shared},
        {"name": "b", "pages": 3, "shared": shared},
        {"name": "c", "pages": 1, "shared": 0},
    ]


def test_known_pages_are_told_apart_from_free_ones():
    engine = load(FOLDER, num_pages=8, page_size=4, dtype="float32")
    list(engine.stream(list(range(3, 12)), Sampling(max_tokens=1)))
    told = web_page.pool_now(engine)
    assert (told["owners"].count(-1), told["cached"], told["used"]) == (2, 2, 0)


def test_the_pools_of_replicas_are_one_after_the_other(monkeypatch):
    pools = {}
    for name, tokens in (("b", 9), ("a", 3)):
        engine = load(FOLDER, num_pages=4, page_size=4, dtype="float32")
        engine.pool.start(0, tokens)
        pools[name] = web_page.pool_now(engine)
    engine.pool.fork(0, 1)
    pools["a"] = web_page.pool_now(engine)
    assert web_page.together({"a": pools["a"]}) == pools["a"]
    told = web_page.together(pools)
    assert told["owners"] == pools["a"]["owners"] + pools["b"]["owners"]
    assert sorted(told["owners"]) == [0, 0, 0, 0, 1, 1, 1, 2]
    assert [each["name"] for each in told["requests"]] == ["a/0", "a/1", "b/0"]
    assert (told["pages"], told["used"], told["free"], len(told["shades"])) == (8, 4, 4, 2)
    counts = [[each[name] for name in ("name", "pages", "used")] for each in told["replicas"]]
    assert counts == [["a", 4, 1], ["b", 4, 3]]
    assert told.keys() - {"replicas"} == pools["a"].keys()
    monkeypatch.setattr(web_page, "MOST_CELLS", 4)
    monkeypatch.setattr(web_page, "MOST_REQUESTS", 2)
    less = web_page.together(pools)
    assert less["owners"] == [max(told["owners"][at : at + 2]) for at in (0, 2, 4, 6)]
    assert [each["name"] for each in less["requests"]] == ["a/0", "b/0"]
