"""Offline batches without Ray: rows, seeds, files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paged_kv.engine import Engine, Sampling
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.ray.batches import ALONE, TOGETHER, Work, compute, finish, left, rows_of, seed_of, written
from paged_kv.ray.replica import Model
from support.engine_runs import Letters
from support.fake_model import VOCAB, FakeModel

ROWS = [
    {"id": number, "prompt": np.random.default_rng(number).integers(0, VOCAB, 1 + number % 9).tolist()}
    | ({"max_tokens": 3 + number % 5} if number % 3 else {"max_tokens": None})
    for number in range(40)
]


def work(folder, **options) -> Work:
    given = {"format": "json", "sampling": Sampling(8, 1.0), "seed": 5, "id_column": "id", "prompt_column": "prompt"}
    return Work(Model("demo"), str(folder), **given | options)


def engine() -> Engine:
    return Engine(FakeModel(60, 4), Letters())


def test_a_rows_text_depends_on_nothing_but_the_row(tmp_path):
    mine = work(tmp_path)
    together = compute(engine(), mine, ROWS)
    assert [result["id"] for result in together] == list(range(40))
    alone = [compute(engine(), mine, [row])[0] for row in ROWS]
    turned = compute(engine(), mine, ROWS[::-1])[::-1]
    assert together == alone == turned
    assert [len(result["tokens"]) for result in together] == [row["max_tokens"] or 8 for row in ROWS]
    assert together != compute(engine(), work(tmp_path, seed=6), ROWS)


def test_each_row_has_its_own_seed_and_may_name_one(tmp_path):
    seeds = {seed_of(run, row) for run in (0, 1) for row in (0, 1, "0", "a")}
    assert len(seeds) == 8
    assert work(tmp_path).sampling_of({"id": 3, "prompt": "x", "seed": 9}).seed == 9
    assert work(tmp_path).sampling_of({"id": 3, "prompt": "x", "seed": None}).seed == seed_of(5, 3)
    nulls = {"id": 3, "prompt": "x", "max_tokens": 7.0, "top_k": float("nan")}
    assert work(tmp_path).sampling_of(nulls) == Sampling(7, 1.0, seed=seed_of(5, 3))


def test_a_row_that_is_wrong_fails_alone(tmp_path):
    rows = [ROWS[0], {"id": "wrong", "prompt": [VOCAB]}, {"id": "hot", "prompt": [1], "temperature": -1.0}, ROWS[1]]
    first, wrong, hot, last = compute(engine(), work(tmp_path), rows)
    assert [first, last] == compute(engine(), work(tmp_path), ROWS[:2])
    assert (wrong["finish"], hot["finish"]) == ("error", "error")
    assert "vocabulary" in wrong["error"]
    assert "temperature" in hot["error"]


def test_what_is_written_is_found_and_a_batch_has_one_file(tmp_path):
    mine = work(tmp_path)
    for rows in (ROWS[:20], ROWS[20:], ROWS[:20]):
        assert finish(engine(), mine, rows) == [False] * 20
    (tmp_path / ".part-x.jsonl.123").write_text("{half of a li")
    assert written(tmp_path) == {row["id"]: mine.digest_of(row) for row in ROWS}
    files = list(tmp_path.glob("part-*"))
    assert len(files) == 2
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(rows, key=lambda row: row["id"]) == compute(engine(), mine, ROWS)


def test_a_row_is_known_by_all_that_it_says_and_a_folder_by_its_run(tmp_path):
    mine = work(tmp_path)
    row = {"id": 1, "prompt": "x", "temperature": 1, "max_tokens": 7.0, "x": "a"}
    assert mine.digest_of(row) == mine.digest_of(row | {"temperature": 1.0, "max_tokens": 7, "top_k": None, "x": "b"})
    others = [row | change for change in ({"id": 2}, {"prompt": "y"}, {"temperature": 0.5}, {"seed": 3})]
    assert len({mine.file_of([each]) for each in (row, *others)}) == 5
    mine.enter()
    mine.enter()
    for name, other in (
        ("seed", work(tmp_path, seed=6)),
        ("temperature", work(tmp_path, sampling=Sampling(8, 0.5))),
        ("model", replace(mine, model=Model("elsewhere"))),
        ("dtype", replace(mine, model=Model("demo", "bfloat16"))),
        ("cache_dtype", replace(mine, model=Model("demo", cache_dtype="int8"))),
    ):
        with pytest.raises(ContractError, match=f"results of another run: {name}: expected"):
            other.enter()
    (tmp_path / ".run.json").unlink()
    finish(engine(), mine, ROWS[:1])
    with pytest.raises(ContractError, match=r"no \.run\.json"):
        mine.enter()


def test_rows_are_read_as_they_are_written_and_without_columns_that_say_nothing(tmp_path):
    rows = [
        {"id": "007", "prompt": "12", "seed": (1 << 62) + 1},
        {"id": 7, "prompt": [3, 4], "max_tokens": None},
        {"id": "2026-11-24", "prompt": "", "temperature": 1},
    ]
    (tmp_path / "in").mkdir()
    lines = [json.dumps(row | {"more": "x" * 99}) + "\n" for row in rows]
    (tmp_path / "in" / "a.jsonl").write_text(lines[0] + "\n" + lines[1])
    (tmp_path / "in" / "b.json").write_text(lines[2])
    mine = work(tmp_path)
    assert list(rows_of(tmp_path / "in", mine)) == rows
    (tmp_path / "in" / "b.json").write_text("[1]\n")
    for file, text, reason in (
        ("b.json", "[1]\n", "line 1: expected a JSON object"),
        ("b.json", lines[0] + "{half", "line 2: expected a JSON object"),
        ("b.json", '{"prompt": "x"}', "line 1: expected a column 'id', got prompt"),
        ("c.txt", "x", "dataset: expected a file or folder of JSON lines"),
    ):
        (tmp_path / "in" / file).write_text(text)
        with pytest.raises(ContractError, match=reason):
            list(rows_of(tmp_path / "in", mine))


def test_what_is_left_are_the_rows_that_are_not_written_and_say_what_they_said(tmp_path):
    mine = work(tmp_path)
    finish(engine(), mine, ROWS[:20])
    found = written(tmp_path)
    assert list(left(mine, found, ROWS)) == ROWS[20:]
    assert list(left(mine, {}, ROWS)) == ROWS
    with pytest.raises(ContractError, match="row 3 differs"):
        list(left(mine, found, [ROWS[0], ROWS[3] | {"max_tokens": 1}]))
    for wrong in (None, [1], 1.5):
        with pytest.raises(ContractTypeError, match="id: expected an integer or a text"):
            list(left(mine, found, [ROWS[0] | {"id": wrong}]))


class Killed(BaseException):
    """In place of a signal, which leaves what was written."""


def test_a_row_that_ends_its_engines_becomes_an_error_and_the_others_their_texts(tmp_path):
    class Deadly(FakeModel):
        def step(self, tokens, *rest):
            if any(new[:3] == [9, 9, 9] for new in tokens):
                raise Killed
            return super().step(tokens, *rest)

    mine, deaths, failed = work(tmp_path), 0, []
    rows = [*ROWS[:5], {"id": "poison", "prompt": [9, 9, 9, 1]}, *ROWS[5:9]]
    while not failed and deaths < 9:
        try:
            failed = finish(Engine(Deadly(60, 4), Letters()), mine, rows)
        except Killed:
            deaths += 1
    assert deaths == TOGETHER + ALONE
    assert failed == [row["id"] == "poison" for row in rows]
    (file,) = tmp_path.iterdir()
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert (results[5]["finish"], results[5]["error"]) == ("error", "2 engines ended while they computed it alone")
    assert results[:5] + results[6:] == compute(engine(), mine, ROWS[:9])
    assert finish(engine(), mine, rows) == failed
