"""A batch of offline rows: how it is computed, and the file that holds its results. It knows nothing of Ray.

A batch is one file, which its engine writes whole or not at all and whose name is a digest of its rows: a batch that is
computed twice, because an engine died after it had written, gives the same file. What a run finds written it leaves
out. A row's text depends on the row and the options alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from paged_kv.engine import Engine, Sampling
from paged_kv.errors import PagedKVError
from paged_kv.ray.replica import Model

Format = Literal["json", "parquet"]

SUFFIXES: dict[Format, str] = {"json": ".jsonl", "parquet": ".parquet"}
_KINDS = {each.name: each.metadata["kind"] for each in fields(Sampling) if each.name != "form"}
OPTIONS = tuple(_KINDS)
"""Columns that say for a row what `sampling` says for all; a null leaves it."""


@dataclass(frozen=True)
class Work:
    """What the engines of a run need to know."""

    model: Model
    folder: str
    format: Format
    sampling: Sampling
    seed: int
    id_column: str
    prompt_column: str

    def sampling_of(self, row: Mapping[str, Any]) -> Sampling:
        """A row's options. Its seed comes from the run's and the row's id where the row has none."""
        own = {name: value for name, value in row.items() if name in OPTIONS and value is not None}
        for name, value in list(own.items()):
            if isinstance(value, float) and value != value:  # a null, as readers of JSON by way of pandas have it
                del own[name]
            elif isinstance(value, float) and _KINDS[name] == "integer" and value.is_integer():
                own[name] = int(value)
        if "seed" not in own:
            own["seed"] = seed_of(self.seed, row[self.id_column])
        return replace(self.sampling, **own)

    def file_of(self, ids: Sequence[Any]) -> Path:
        """Where the results of a batch go."""
        digest = blake2b(json.dumps(list(ids)).encode(), digest_size=12).hexdigest()
        return Path(self.folder) / f"part-{digest}{SUFFIXES[self.format]}"


def seed_of(seed: int, row_id: Any) -> int:
    """A row's seed: of the run's seed and its id."""
    return int.from_bytes(blake2b(json.dumps([seed, row_id]).encode(), digest_size=8).digest(), "little") >> 1


def written(folder: Path) -> set[Any]:
    """The ids whose results are in a folder."""
    found: set[Any] = set()
    for file in sorted(folder.glob("part-*")):
        if file.suffix == ".parquet":
            import pyarrow.parquet

            found.update(pyarrow.parquet.read_table(file, columns=["id"])["id"].to_pylist())
        elif file.suffix == ".jsonl":
            found.update(json.loads(line)["id"] for line in file.read_text().splitlines())
    return found


def compute(engine: Engine, work: Work, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of some rows, computed together, in their order."""
    results: list[dict[str, Any]] = []
    running: dict[int, dict[str, Any]] = {}
    for row in rows:
        result = {"id": row[work.id_column], "text": "", "tokens": [], "finish": "error", "error": None}
        results.append(result)
        try:
            running[engine.add_request(row[work.prompt_column], work.sampling_of(row))] = result
        except PagedKVError as error:
            result["error"] = str(error)
    while not engine.is_idle:
        for output in engine.step():
            result = running[output.request]
            result["text"] += output.text
            result["tokens"].extend(output.tokens)
            if output.finish is not None:
                result["finish"], result["error"] = output.finish, output.error
    return results


def write(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Writes a batch: a reader sees all of it or nothing."""
    made = file.with_name(f".{file.name}.{os.getpid()}")
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        ids = [result["id"] for result in results]
        columns = {
            "id": pa.array(ids),
            "text": pa.array([result["text"] for result in results], pa.string()),
            "tokens": pa.array([result["tokens"] for result in results], pa.list_(pa.int32())),
            "finish": pa.array([result["finish"] for result in results], pa.string()),
            "error": pa.array([result["error"] for result in results], pa.string()),
        }
        pyarrow.parquet.write_table(pa.table(columns), made)
    else:
        made.write_text("".join(json.dumps(result) + "\n" for result in results))
    with made.open("rb") as written_file:
        os.fsync(written_file.fileno())
    made.replace(file)
