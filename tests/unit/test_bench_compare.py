"""`paged-kv bench --compare`: what became slower, by ratios of turns where there are any."""

from pathlib import Path

import pytest

from paged_kv.bench import provenance
from paged_kv.bench.compare import changes, slower
from paged_kv.bench.results import read_results, write_results
from paged_kv.bench.run import Run
from paged_kv.cli import _run
from paged_kv.errors import ContractError


def row(case="a", *, ms=1.0, share=None, right=True, note=None, other_work=None, **ratios):
    """As `results.row_of` makes it; a peer of ratio 0 was wrong."""
    figures = {"note": None, "ms": None, "rate": None, "gb_per_s": None, "error": None}
    peers = [
        figures | {"key": name, "name": name, "ratio": ratio or 99.0, "right": bool(ratio)}
        for name, ratio in ratios.items()
    ]
    return {
        "case": case,
        "ms": ms,
        "share": share,
        "share_target": None,
        "right": right,
        "note": note,
        "other_work": other_work,
        "versus": [{"label": "others", "at_least": None, "peers": peers}],
    }


@pytest.mark.parametrize(
    ("old", "new", "measure", "factor"),
    [
        (row(share=0.8, ms=1, x=2), row(share=0.6, ms=0.5, x=4), "share", 0.75),
        (row(ms=1, x=2), row(ms=9, x=3), "x", 1.5),
        (row(x=2, y=4, z=1), row(x=3, y=5, z=9), "median of 3 peers; x", 1.5),
        (row(x=2, y=0), row(x=2, y=7), "x", 1),  # y was wrong then
        (row(x=2), row(x=0, y=3, ms=2), "time", 0.5),
        (row(share=0.8, ms=3), row(ms=2), "time", 1.5),
    ],
    ids=["share", "factor", "factors", "wrong peer", "no common peer", "no share now"],
)
def test_a_case_is_compared_by_what_is_surest(old, new, measure, factor):
    (change,) = changes([old], [new])
    assert (change.measure, change.factor) == (measure, pytest.approx(factor))


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.7, "SLOWER"), (0.755, "SLOWER"), (0.765, "same"), (0.83, "same"), (0.85, "faster")]
)
def test_a_tolerance_separates_slower_from_the_same(share, verdict):
    found = changes([row(share=0.8)], [row(share=share)])
    assert found[0].verdict(0.05) == verdict
    assert slower(found, 0.05) == (found if verdict == "SLOWER" else [])
    assert slower(found, 0.2) == []


@pytest.mark.parametrize(
    ("then", "now", "sides", "verdict"),
    [
        (0.2, 0.0, "then", "not comparable"),
        (None, 0.2, "now", "not comparable"),
        (0.2, 0.2, "then and now", "not comparable"),
        (None, 0.05, "", "SLOWER"),
    ],
)
def test_a_marked_row_is_not_slower_but_not_comparable(then, now, sides, verdict):
    slow = changes([row(share=0.8, other_work=then)], [row(share=0.4, other_work=now)])
    assert (slow[0].other_work, slow[0].verdict(0.05)) == (sides, verdict)
    assert slower(slow, 0.05) == (slow if verdict == "SLOWER" else [])
    fast = changes([row(share=0.4, other_work=then)], [row(share=0.8, other_work=now)])
    assert (fast[0].other_work, fast[0].verdict(0.05)) == (sides, "faster")
    wrong = changes([row(other_work=then)], [row(right=False, other_work=now)])
    assert wrong[0].verdict(0.05) == "LOST"


def test_a_figure_that_is_gone_counts_as_slower():
    old = [row("a"), row("b"), row("c", ms=None, note="crashed"), row("unmeasured now")]
    new = [row("a", right=False), row("b", ms=None, note="crashed: SIGSEGV"), row("c"), row("d")]
    found = changes(old, new)
    assert [change.verdict(0.05) for change in found] == ["LOST", "LOST", "new", "new"]
    assert [change.new for change in found[:2]] == ["wrong result", "crashed: SIGSEGV"]
    assert slower(found, 0.05) == found[:2]


def test_files_that_are_no_results_are_refused(tmp_path):
    for text in ("", "{", "family\n", "a,b\n1,2\n", "family,case,key\nznver5,bf16,ours\n", "family,\0\n"):
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(ContractError, match=r"x\.csv: expected a CSV file of results"):
            read_results(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ContractError, match=r"x\.csv: expected a CSV file of results"):
        read_results(tmp_path / "x.csv")
    with pytest.raises(ContractError, match="No such file"):
        read_results(tmp_path / "y.csv")


@pytest.mark.parametrize("family", ["cooperlake", "sapphirerapids", "znver3", "znver4", "znver5"])
def test_a_committed_file_stays_as_it_is_when_it_is_read_and_written(family, tmp_path):
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "decode_cpu" / f"{family}.csv"
    write_results(read_results(path), tmp_path / "copy.csv")
    assert (tmp_path / "copy.csv").read_text() == path.read_text()


# --- the command


def written(path, family, *rows):
    write_results({"family": family, "versions": {}, "peaks": {}, "rows": rows}, path)
    return str(path)


def test_two_files_are_compared(tmp_path, capsys):
    old = written(tmp_path / "old.csv", "znver5", row("hnd", share=0.8), row("f16", x=2), row("f32", x=4))
    new = written(
        tmp_path / "new.csv", "znver5", row("hnd", share=0.7), row("f16", x=3), row("f32", x=3, other_work=0.5)
    )
    assert _run(["bench", "--compare", old, "--measured", new]) == 1
    out = capsys.readouterr().out
    for words in ("by more than 5%", "share", "0.80", "0.70", "0.87", "SLOWER", "faster", "not comparable", "now"):
        assert words in out
    assert _run(["bench", "--compare", old, "--measured", new, "--tolerance", "0.2"]) == 0
    assert _run(["bench", "--compare", old, "--measured", old]) == 0


def test_a_run_is_compared_with_what_its_file_held_before(tmp_path, monkeypatch, capsys):
    result = {
        "ours": {"name": "paged-kv", "seconds": [1e-2] * 3, "error": 0.0, "right": True},
        "read": {"seconds": [1e-3] * 3, "bytes": 10**8},
    }
    monkeypatch.setattr(Run, "job", lambda *_: result)
    monkeypatch.setattr(provenance, "cpu_family", lambda: "znver5")
    command = ["bench", "--cases", "hnd", "--no-peers", "--out", str(tmp_path)]
    assert _run(command) == 0
    command += ["--compare", str(tmp_path / "znver5.csv")]
    assert _run(command) == 0
    result["ours"]["seconds"] = [1.2e-2] * 3
    assert _run(command) == 1
    assert "SLOWER" in capsys.readouterr().out


def test_families_are_not_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(provenance, "cpu_family", lambda: "znver5")
    monkeypatch.setattr(Run, "job", lambda *_: pytest.fail("measured before it was refused"))
    old = written(tmp_path / "old.csv", "sapphirerapids", row("hnd", share=0.8))
    new = written(tmp_path / "new.csv", "znver5", row("hnd", share=0.8))
    for command in (["--cases", "hnd"], ["--measured", new]):
        assert _run(["bench", "--compare", old, *command]) == 2
        assert "of CPU family sapphirerapids, and these are of znver5" in capsys.readouterr().err
    assert _run(["bench", "--measured", new]) == 2
    assert "--measured: requires --compare" in capsys.readouterr().err
