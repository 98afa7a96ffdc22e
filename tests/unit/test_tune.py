"""The tuning table: parsed and written without a compiler; the search for its values, on speeds that are made up."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tune import CHOICES, SOURCES, TABLE, Choice, Trial, descend, mean, write_trials
from benchmarks.tune_job import TUNE_CASES
from benchmarks.tuning_table import Row, TuningTable
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS

TEXT = '''"""A table."""


@fieldwise_init
struct CpuTuning(TrivialRegisterPassable):
    """Choices."""

    var dot: Bool
    """var not_a_field: Bool"""
    var rows: Int
    """Return how many."""


def tuning_of(family: StringSlice) -> CpuTuning:
    """The row."""
    # A machine,
    # a date
    if family == "znver5":
        return CpuTuning(dot=True, rows=4)
    if family == "skylake-avx512":
        return CpuTuning(
            rows=8,
            dot=False,
        )
    # Safe everywhere.
    return CpuTuning(dot=False, rows=1)
'''


def test_a_table_is_parsed():
    table = TuningTable.parse(TEXT)
    assert table.fields == ("dot", "rows")
    assert table.rows == {
        "znver5": Row({"dot": "True", "rows": "4"}, "A machine,\na date"),
        "skylake-avx512": Row({"dot": "False", "rows": "8"}),
    }
    assert table.default == Row({"dot": "False", "rows": "1"}, "Safe everywhere.")
    assert table.row("haswell") is table.default


def test_a_row_is_replaced_and_the_rest_stays():
    table = TuningTable.parse(TEXT)
    text = table.with_row("znver5", Row({"dot": "True", "rows": "16"}, "B")).render()
    again = TuningTable.parse(text)
    assert again.rows["znver5"] == Row({"dot": "True", "rows": "16"}, "B")
    assert again.rows["skylake-avx512"] == table.rows["skylake-avx512"]
    assert again.default == table.default
    assert text.startswith(TEXT[: TEXT.index("    # A machine")])
    assert again.render() == text
    assert list(TuningTable.parse(table.with_row("new", table.default).render()).rows)[-1] == "new"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("rows=4", "lines=4", "the row of znver5 has fields"),
        (", rows=4", "", "the row of znver5 has fields"),
        ("    # Safe", "    print()\n    # Safe", "something else before the row of the default"),
        ("    # Safe everywhere.\n    return CpuTuning(dot=False, rows=1)\n", "", "does not end with"),
        ("CpuTuning(", "Other(", "no rows"),
        ('"skylake-avx512"', '"znver5"', "something else before the row of znver5"),
    ],
)
def test_what_is_no_table_is_refused(old, new, why):
    with pytest.raises(ValueError, match=why):
        TuningTable.parse(TEXT.replace(old, new))


def test_the_table_of_the_package_can_be_written(tmp_path):
    table = TuningTable.read(SOURCES / TABLE)
    written = table.render()
    assert TuningTable.parse(written) == table
    assert set(table.rows) <= set(REQUIRED_FLAGS)
    assert set(table.default.values) == set(table.fields)
    (tmp_path / "table.mojo").write_text(written)
    formatter = Path(sys.executable).with_name("mblack")
    assert (
        subprocess.run([formatter, "-q", "--check", "-l", "120", tmp_path / "table.mojo"], timeout=300).returncode == 0
    )


def test_candidates_are_of_fields_and_cases_that_exist():
    table = TuningTable.read(SOURCES / TABLE)
    assert set(CHOICES) <= set(table.fields)
    for name, choice in CHOICES.items():
        assert set(choice.cases) <= set(TUNE_CASES), name
        assert len(choice.candidates) > 1, name


# --- the search


def landscape(time):
    """Speeds of rows whose time on a case is `time(case, **values)`; None: it fails there."""
    asked = []

    def speeds(rows, cases):
        asked.append((rows, cases))
        times = [{case: time(case, **row) for case in cases} for row in rows]
        return [{c: None if one[c] is None else times[0][c] / one[c] for c in cases} for one in times]

    return speeds, asked


CHOICE = {"a": Choice(("1", "2", "3"), ("x", "y")), "b": Choice(("1", "2"), ("x",))}


def test_the_search_takes_what_is_faster_over_all_cases():
    speeds, asked = landscape(lambda case, a, b: {"1": 10, "2": 8, "3": 7 if case == "x" else 20}[a] + int(b == "1"))
    best, trials = descend({"a": "1", "b": "1"}, CHOICE, speeds)
    assert best == {"a": "2", "b": "2"}
    assert [row["a"] for row in asked[0][0]] == ["1", "2", "3"]
    assert asked[0][1] == ("x", "y")
    assert [(t.value, t.taken) for t in trials if t.round == 0 and t.field == "a"] == [
        ("1", False),
        ("2", True),
        ("3", False),
    ]


def test_a_second_round_sees_what_the_first_one_changed():
    """Value 2 of b is worth it only where a is 1, and that only beside it."""
    cost = {("3", "1"): 10, ("3", "2"): 8, ("2", "2"): 7, ("1", "2"): 5}
    speeds, asked = landscape(lambda case, a, b: cost.get((a, b), 20))  # noqa: ARG005
    start = {"a": "3", "b": "1"}
    assert descend(start, CHOICE, speeds, rounds=1)[0] == {"a": "3", "b": "2"}
    assert descend(start, CHOICE, speeds)[0] == {"a": "1", "b": "2"}
    asked.clear()
    descend({"a": "1", "b": "2"}, CHOICE, speeds)
    assert len(asked) == 2  # nothing changed: no second round


def test_noise_and_failures_change_nothing():
    speeds, _ = landscape(lambda case, a, b: 1.0 if a == "1" else 0.985)  # noqa: ARG005
    assert descend({"a": "1", "b": "1"}, CHOICE, speeds)[0] == {"a": "1", "b": "1"}
    speeds, _ = landscape(lambda case, a, b: 1.0 if a == "1" else None if case == "y" else 0.1)  # noqa: ARG005
    assert descend({"a": "1", "b": "1"}, CHOICE, speeds)[0] == {"a": "1", "b": "1"}
    assert mean([2.0, 0.5]) == pytest.approx(1)
    assert mean([2.0, None]) == mean([]) == 0


def test_trials_are_written(tmp_path):
    path = tmp_path / "tuning" / "znver5.csv"
    write_trials([Trial(0, "a", "2", {"x": 1.25, "y": None}, True)], path, {"date": "2026-11-22"})
    assert (
        path.read_text()
        == "round,field,value,case,speed,taken,date\n1,a,2,x,1.25,yes,2026-11-22\n1,a,2,y,,yes,2026-11-22\n"
    )
