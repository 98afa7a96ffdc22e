"""Offline batches on two engines of the demo's model, which are killed."""

import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
import ray.data
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.streaming_executor import StreamingExecutor

from paged_kv.engine import Engine, Sampling
from paged_kv.errors import ContractError
from paged_kv.ray import generate
from paged_kv.ray.batches import ALONE, STARTS, TOGETHER, Work, write
from paged_kv.ray.replica import Model

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve" / "offline.py"


def rows_of(folder: Path) -> dict:
    found = {}
    for file in folder.glob("part-*"):
        if file.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(file).to_pylist()
        else:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            assert row["id"] not in found, "a row twice"
            found[row["id"]] = row
    return found


@pytest.mark.usefixtures("cluster")
def test_the_example(tmp_path, monkeypatch, capsys):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "And"}\n{"id": 2, "prompt": "", "top_p": 7}\n')
    for said in (
        "2 rows computed, 1 of them failed, 0 were there\n",
        "0 rows computed, 0 of them failed, 2 were there\n",
    ):
        monkeypatch.setattr(sys, "argv", ["offline.py", str(tmp_path / "in.jsonl"), str(tmp_path / "out")])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert capsys.readouterr().out.endswith(said)


@dataclass(frozen=True)
class Deadly(Model):
    """Its engines are killed after a step that computed one of these prompts, by each so many times."""

    deadly: Mapping[str, int] = field(default_factory=dict)
    deaths: str = ""
    """A folder that gets a file for each."""

    def engine(self) -> Engine:
        engine = super().engine()
        add, step, here = engine.add_request, engine.step, set()

        def adding(prompt, *rest):
            here.add(prompt)
            return add(prompt, *rest)

        def stepping():
            outputs = step()
            for prompt in sorted(here & self.deadly.keys()):
                count = len(list(Path(self.deaths).glob(f"{prompt}*")))
                if count < self.deadly[prompt]:
                    (Path(self.deaths) / f"{prompt} {count}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return outputs

        engine.add_request, engine.step = adding, stepping
        return engine


@pytest.mark.usefixtures("cluster")
def test_each_row_once_though_engines_are_killed_and_the_same_as_without(tmp_path, offline_rows):
    lines = [
        {"id": number, "prompt": f"And the king {number} said", "max_tokens": 4 + number % 9, "temperature": number % 2}
        for number in range(offline_rows)
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"engines": 2, "batch_size": 16}
    calm = generate(source, "demo", tmp_path / "calm", **options)
    assert (calm.rows, calm.failed, calm.found) == (offline_rows, 0, 0)
    right = rows_of(tmp_path / "calm")
    assert sorted(right) == list(range(offline_rows))
    assert all(row["error"] is None and len(row["tokens"]) == 4 + row["id"] % 9 for row in right.values())
    # Three rows whose engine is killed once, and one that would kill every engine.
    (tmp_path / "deaths").mkdir()
    poison = offline_rows * 5 // 8
    deadly = {lines[offline_rows * eighth // 8]["prompt"]: 1 for eighth in (1, 3, 7)} | {lines[poison]["prompt"]: 99}
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    model = Deadly("demo", deadly=deadly, deaths=str(tmp_path / "deaths"))
    killed = generate(source, model, tmp_path / "killed", **options)
    assert (killed.rows, killed.failed) == (offline_rows, 1)
    assert len(list((tmp_path / "deaths").iterdir())) == 3 + TOGETHER + ALONE
    found = rows_of(tmp_path / "killed")
    assert found.pop(poison)["error"] == "2 engines ended while they computed it alone"
    assert found == {name: row for name, row in right.items() if name != poison}
    # What a run that was stopped has left undone, in other batches, from Parquet to Parquet.
    files = sorted((tmp_path / "killed").glob("part-*"))
    for file in {*files[::2], *(file for file in files if "engines ended" in file.read_text())}:
        file.unlink()
    table = pa.table({name: [line[name] for line in lines] for name in lines[0]})
    (tmp_path / "in").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "in" / "rows.parquet")
    left = len(rows_of(tmp_path / "killed"))
    again = generate(tmp_path / "in", "demo", tmp_path / "killed", format="parquet", batch_size=24)
    assert (again.rows, again.found) == (offline_rows - left, left)
    assert rows_of(tmp_path / "killed") == right
    lines[0]["prompt"] = "Another one"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ContractError, match="row 0 differs"):
        generate(source, "demo", tmp_path / "killed")


class Tasks(ExecutionCallback):
    """Notes how many tasks each operator of an execution had."""

    noted: ClassVar[list[dict[str, int]]] = []

    def after_execution_succeeds(self, executor: StreamingExecutor) -> None:
        operators = vars(executor)["_topology"]  # Ray's, which says it nowhere else
        self.noted.append({each.name: each.metrics.num_tasks_submitted for each in operators})


@pytest.mark.usefixtures("cluster")
def test_a_run_that_is_resumed_has_no_tasks_but_those_of_the_batches_that_are_left(tmp_path, monkeypatch):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "custom_execution_callback_classes", [Tasks])
    rows = [{"id": f"{number:04}", "prompt": str(number), "max_tokens": 1} for number in range(2040)]
    (tmp_path / "in").mkdir()
    for part in range(10):  # 204 rows each
        text = "".join(json.dumps(row) + "\n" for row in rows[part::10])
        (tmp_path / "in" / f"{part}.jsonl").write_text(text)
    folder = tmp_path / "out"
    folder.mkdir()
    work = Work(Model("demo"), str(folder), "json", Sampling(), 0, "id", "prompt")
    work.enter()
    for at in range(0, 2000, 16):
        some = rows[at : at + 16]
        done = {"text": "", "tokens": [], "finish": "length", "error": None}
        write(work.file_of(some), [done | {"id": row["id"], "row": work.digest_of(row)} for row in some])
    again = generate(tmp_path / "in", "demo", folder, batch_size=16)
    assert (again.rows, again.failed, again.found) == (40, 0, 2000)
    assert Tasks.noted == [{"Input": 0, "MapBatches(Worker)": 3}]
    assert len(list(folder.glob("part-*"))) == 125 + 3
    assert sorted(rows_of(folder)) == [row["id"] for row in rows]
    assert generate(tmp_path / "in", "demo", folder, batch_size=16).found == 2040
    assert len(Tasks.noted) == 1


@pytest.mark.usefixtures("cluster")
def test_a_dataset_of_ray_data_is_resumed(tmp_path):
    rows = [{"id": number, "prompt": f"And {number}", "max_tokens": 1} for number in range(40)]
    for count, found in ((24, 0), (40, 24), (40, 40)):
        done = generate(ray.data.from_items(rows[:count]), "demo", tmp_path / "out", batch_size=16)
        assert (done.rows, done.failed, done.found) == (count - found, 0, found)
    assert sorted(rows_of(tmp_path / "out")) == list(range(40))
    rows[3]["prompt"] = "Another one"
    with pytest.raises(ContractError, match="row 3 differs"):
        generate(ray.data.from_items(rows), "demo", tmp_path / "out")


@dataclass(frozen=True)
class Heavy(Model):
    """Its engines are killed while they load, as the system does where memory ends."""

    starts: str = ""
    """A folder that gets a file for each."""

    def engine(self) -> Engine:
        (Path(self.starts) / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.usefixtures("cluster")
def test_an_engine_that_is_killed_while_it_loads_is_not_started_for_ever(tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    (tmp_path / "starts").mkdir()
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "And"}\n')
    with pytest.raises(ray.exceptions.RayError, match="an engine was ended 3 times while it loaded demo"):
        generate(tmp_path / "in.jsonl", Heavy("demo", starts=str(tmp_path / "starts")), tmp_path / "out")
    assert len(list((tmp_path / "starts").iterdir())) == STARTS


@pytest.mark.usefixtures("cluster")
def test_what_is_wrong_with_a_dataset_is_said(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ContractError, match="expected a column 'id', got prompt"):
        generate(tmp_path / "in.jsonl", "demo", tmp_path / "out")
    with pytest.raises(ContractError, match="dataset: expected a file or folder of JSON lines"):
        generate(tmp_path / "none", "demo", tmp_path / "out", sampling=Sampling(3))
