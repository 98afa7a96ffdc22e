"""Offline batches without Ray: rows, seeds, files."""

import json

import numpy as np

from paged_kv.engine import Engine, Sampling
from paged_kv.ray.batches import Work, compute, seed_of, write, written
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
        results = compute(engine(), mine, rows)
        write(mine.file_of([row["id"] for row in rows]), results)
    (tmp_path / ".part-x.jsonl.123").write_text("{half of a li")
    assert written(tmp_path) == set(range(40))
    files = list(tmp_path.glob("part-*"))
    assert len(files) == 2
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(rows, key=lambda row: row["id"]) == compute(engine(), mine, ROWS)
