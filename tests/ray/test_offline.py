"""Offline batches on two engines of the demo's model, one of which is killed."""

import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest

from paged_kv.engine import Sampling
from paged_kv.errors import ContractError
from paged_kv.ray import generate
from support.ray_load import SECONDS

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


class KillWhenWritten(threading.Thread):
    """Kills an engine of the pool after so many more files, again and again."""

    def __init__(self, folder: Path, kills: int, every: int) -> None:
        super().__init__(daemon=True)
        self.stop, self.done = threading.Event(), 0
        self._folder, self._kills, self._every = folder, kills, every

    def run(self) -> None:
        while self.done < self._kills and not self.stop.wait(0.05):
            written = len(list(self._folder.glob("part-*")))
            if written < 1 + self.done * self._every:
                continue
            names = ((process.pid, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
            engines = [pid for pid, words in names if words and words[0].startswith("ray::") and "Worker" in words[0]]
            if engines:
                os.kill(engines[0], signal.SIGKILL)
                self.done += 1


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
    killer = KillWhenWritten(tmp_path / "killed", 3, max(1, offline_rows // 16 // 5))
    killer.start()
    generate(source, "demo", tmp_path / "killed", **options)
    killer.stop.set()
    killer.join(SECONDS)
    assert killer.done == 3
    right = rows_of(tmp_path / "calm")
    assert rows_of(tmp_path / "killed") == right
    assert sorted(right) == list(range(offline_rows))
    assert all(row["error"] is None and len(row["tokens"]) == 4 + row["id"] % 9 for row in right.values())
    # What a run that was stopped has left undone, in other batches, from Parquet to Parquet.
    for file in sorted((tmp_path / "killed").iterdir())[::2]:
        file.unlink()
    table = pa.table({name: [line[name] for line in lines] for name in lines[0]})
    (tmp_path / "in").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "in" / "rows.parquet")
    left = len(rows_of(tmp_path / "killed"))
    again = generate(tmp_path / "in", "demo", tmp_path / "killed", format="parquet", batch_size=24)
    assert (again.rows, again.found) == (offline_rows - left, left)
    assert rows_of(tmp_path / "killed") == right


@pytest.mark.usefixtures("cluster")
def test_what_is_wrong_with_a_dataset_is_said(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ContractError, match="no column 'id'; it has prompt"):
        generate(tmp_path / "in.jsonl", "demo", tmp_path / "out")
    with pytest.raises(ContractError, match="no file or folder of JSON lines"):
        generate(tmp_path / "none", "demo", tmp_path / "out", sampling=Sampling(3))
