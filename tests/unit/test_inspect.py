"""Traces of pages: what `generate --trace` writes, and what `paged-kv inspect` reads from it and refuses."""

import json
import re

import numpy as np
import pytest

from paged_kv.cli import _run
from paged_kv.commands.page_history import read_history
from paged_kv.commands.trace import output_file, traced
from paged_kv.engine.engine import Engine
from paged_kv.engine.requests import Sampling
from paged_kv.errors import ContractError
from paged_kv.options import NO_PAGE
from support.fake_model import FakeModel

HEAD = {"format": "paged-kv page events 1", "pages": 8, "page_size": 4}


def event(kind, *pages, seconds=1.0, request="0.0"):
    return {"seconds": seconds, "event": kind, "request": request, "pages": list(pages)}


@pytest.fixture
def read(tmp_path):
    def read(*records, **options):
        path = tmp_path / "trace"
        path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
        return read_history(path, **options)

    return read


def test_a_trace_says_what_the_pool_says(tmp_path):
    """After each event the pages that are used and cached are those that the pool counts."""
    path, counts = tmp_path / "trace", []
    engine = Engine(FakeModel(30, 4), max_running=6)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 20, 30).tolist()
    with output_file("--trace", path) as file, traced(engine.pool, file):
        for turn in range(30):
            prompt = prefix[: rng.integers(1, 30)] + rng.integers(0, 20, 3).tolist()
            engine.add_request(prompt, Sampling(12, 1.0, seed=turn), int(rng.choice([1, 3])))
        while not engine.is_idle:
            engine.step()
            counts.append(engine.pool.count())
    history = read_history(path)
    assert set(zip(history.used.tolist(), history.cached.tolist(), strict=True)) >= {(c.used, c.cached) for c in counts}
    assert (history.free >= 0).all()
    assert history.owners.max() > 1
    assert history.copied > 0
    assert history.hits > 0
    assert (history.used[-1], history.cached[-1]) == (0, counts[-1].cached)


def test_the_map_shows_owners_over_time(read):
    history = read(
        HEAD,
        event("allocated", 0, 1, seconds=0),
        event("stored", 0, seconds=2),
        event("hit", 0, seconds=4, request="1.0"),
        event("released", 0, 1, seconds=6),
        event("released", 0, seconds=8, request="1.0"),
        event("evicted", 0, seconds=10, request=None),
        bins=10,
    )
    assert history.owners[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 1, 1, -1]
    assert history.owners[1].tolist() == [1] * 7 + [0] * 3
    assert history.owners[2:].max() == 0
    assert history.used.tolist() == [2, 2, 2, 1, 0, 0]
    assert history.cached.tolist() == [0, 0, 0, 0, 1, 0]
    assert (history.requests, history.hits, history.evicted) == (2, 1, 1)


def test_many_pages_share_rows(read):
    history = read(HEAD | {"pages": 1000}, event("allocated", 999), rows=10, bins=4)
    assert history.owners.shape == (10, 4)
    assert history.owners[9].max() == 1
    assert history.owners[:9].max() == 0


def test_a_trace_without_events_is_read(read):
    history = read(HEAD)
    assert (len(history.used), history.owners.max()) == (0, 0)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "is empty"),
        (["{\n"], "line 1: no JSON"),
        (["[]\n"], "line 1: no JSON object"),
        ([HEAD | {"format": "other"}], "line 1: format is 'other'"),
        ([HEAD | {"pages": 0}], "line 1: pages: expected at least 1"),
        ([HEAD | {"pages": 10**9}], "line 1: pages: expected at most"),
        ([HEAD | {"page_size": "4"}], "line 1: page_size: expected an integer"),
        ([HEAD, event("allocated", 8)], "line 2: pages: a page: expected at most 7"),
        ([HEAD, event("allocated", 0) | {"pages": 0}], "line 2: pages: expected a list"),
        ([HEAD, event("allocated", 0, seconds="1")], "line 2: seconds: expected a number"),
        ([HEAD, event("allocated", 0), event("released", 0, seconds=0.5)], "line 3: seconds: expected a number of at"),
        ([HEAD, event("copied", 0)], "line 2: event 'copied' of 1 pages is unknown"),
        ([HEAD, event("painted", 0)], "event 'painted' is unknown"),
        ([HEAD, event("released", 0)], "page 0 has no owner to lose"),
        ([HEAD, event("allocated", NO_PAGE)], "line 2: pages: a page: expected at most 7"),
    ],
)
def test_what_is_no_trace_is_refused(read, records, message):
    with pytest.raises(ContractError, match=message):
        read(*records)


def test_the_command_prints_and_writes(tmp_path, capsys):
    trace, png, html = tmp_path / "trace", tmp_path / "a.png", tmp_path / "a.html"
    trace.write_text("".join(json.dumps(r) + "\n" for r in (HEAD, event("allocated", 0, 1), event("stored", 0))))
    assert _run(["inspect", str(trace), "--png", str(png), "--html", str(html)]) == 0
    assert capsys.readouterr().out == (
        "8 pages of 4 tokens, 1 samples in 1.00 s\n"
        "used at most: 2 pages; owners of a page at most: 1\n"
        "found: 0 pages of prompts; copied: 0; evicted: 0\n"
    )
    assert png.read_bytes().startswith(b"\x89PNG")
    data = json.loads(re.search(r"const data = (.*);\n", html.read_text())[1])
    assert (data["pages"], data["used"]) == (8, [2, 2])
    assert not re.search(r"(src|href)=|https?:|import ", html.read_text())  # nothing else to load


@pytest.mark.parametrize("option", ["--png", "--html"])
def test_what_cannot_be_written_or_read_is_one_line(tmp_path, capsys, option):
    trace = tmp_path / "trace"
    trace.write_text(json.dumps(HEAD) + "\n")
    assert _run(["inspect", str(trace), option, str(tmp_path / "missing" / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert _run(["inspect", str(tmp_path / "none")]) == 2
    assert re.fullmatch(r"error: [^\n]+cannot be read[^\n]+\n", capsys.readouterr().err)
