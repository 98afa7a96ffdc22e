"""Offline rows: how they are read, how a batch of them is computed, and the file that holds its results. Without Ray.

A batch is one file, which its engine writes whole or not at all and whose name is a digest of its rows: a batch that is
computed twice, because an engine died after it had written, gives the same file. What a run finds written it leaves
out; a folder holds results of one model, seed and sampling. A row's text depends on the row and the options alone.

A batch whose engine dies is tried again by another one. A file beside the results counts that, so that a row which ends
every engine costs a few, and its result is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from paged_kv.arguments import shown
from paged_kv.engine import Engine, Sampling
from paged_kv.errors import ContractError, ContractTypeError, PagedKVError
from paged_kv.ray.replica import DEMO, Model

Format = Literal["json", "parquet"]

SUFFIXES: dict[Format, str] = {"json": ".jsonl", "parquet": ".parquet"}
_KINDS = {each.name: each.metadata["kind"] for each in fields(Sampling) if each.name != "structured_output"}
OPTIONS = tuple(_KINDS)
"""Columns that say for a row what `sampling` says for all; a null leaves it."""
TOGETHER, ALONE = 2, 2
"""Engines that a batch may end before its rows are computed one by one, and then a row before it is given up."""
STARTS = 3
"""The number of times that one engine may be ended while it loads; Ray alone would start it for ever."""
_RUN = ".run.json"


@dataclass(frozen=True)
class Work:
    """The work of a run's engines."""

    model: Model
    folder: str
    format: Format
    sampling: Sampling
    seed: int
    id_column: str
    prompt_column: str

    def sampling_of(self, row: Mapping[str, Any]) -> Sampling:
        """A row's options. Its seed comes from the run's and the row's id where the row has none."""
        own = _own(row)
        if "seed" not in own:
            own["seed"] = seed_of(self.seed, row[self.id_column])
        return replace(self.sampling, **own)

    def digest_of(self, row: Mapping[str, Any]) -> str:
        """Return the digest of all that a row says."""
        content = [row[self.id_column], row[self.prompt_column], sorted(_own(row).items())]
        return blake2b(json.dumps(content, default=repr).encode(), digest_size=12).hexdigest()

    def file_of(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Return where the results of a batch go."""
        digest = blake2b("".join(map(self.digest_of, rows)).encode(), digest_size=12).hexdigest()
        return Path(self.folder) / f"part-{digest}{SUFFIXES[self.format]}"

    def columns(self, names: Collection[str], where: str) -> list[str]:
        """Those that say something.

        Raises:
            ContractError: there is no id or no prompt.
        """
        for name in (self.id_column, self.prompt_column):
            if name not in names:
                raise ContractError(f"dataset {where}: expected a column {name!r}, got {', '.join(names)}")
        return [name for name in names if name in {self.id_column, self.prompt_column, *OPTIONS}]

    def enter(self) -> None:
        """Begins or resumes a run in its folder.

        Raises:
            ContractError: the folder has results of another model, dtype, seed or sampling.
        """
        folder, model = Path(self.folder), self.model
        where = str(model.folder.resolve()) if model.model != DEMO and model.folder.exists() else model.model
        mine = json.loads(
            json.dumps(
                asdict(self.sampling)
                | {"model": where, "dtype": model.dtype, "seed": self.seed}
                | {"cache_dtype": model.cache_dtype, "cache_rotation": model.cache_rotation}
                | ({"deterministic": True} if model.deterministic else {})
            )
        )
        try:
            there = json.loads((folder / _RUN).read_text())
        except (OSError, ValueError):
            if any(folder.glob("part-*")):
                raise ContractError(f"output: {folder} has results, but no {_RUN} that names their run") from None
            made = folder / f"{_RUN}.{os.getpid()}"
            made.write_text(json.dumps(mine))
            made.replace(folder / _RUN)
            there = mine
        for name in mine:
            if there.get(name) != mine[name]:
                raise ContractError(
                    f"output: {folder} has results of another run: {name}: expected {shown(there.get(name))},"
                    f" got {shown(mine[name])}"
                )
        for file in folder.glob(".tries-*"):  # who stopped a run has ended no engine
            file.unlink(missing_ok=True)


def _own(row: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a row, a number of either kind as its option has it."""
    own = {name: value for name, value in row.items() if name in OPTIONS and value is not None}
    for name, value in list(own.items()):
        if isinstance(value, float) and value != value:  # a null, as readers of JSON by way of pandas have it
            del own[name]
        elif isinstance(value, float) and _KINDS[name] == "integer" and value.is_integer():
            own[name] = int(value)
        elif type(value) is int and _KINDS[name] == "number":
            own[name] = float(value)
    return own


def seed_of(seed: int, row_id: Any) -> int:
    """A row's seed: of the run's seed and its id."""
    return int.from_bytes(blake2b(json.dumps([seed, row_id]).encode(), digest_size=8).digest(), "little") >> 1


def rows_of(path: Path, work: Work) -> Iterator[dict[str, Any]]:
    """The rows of a file or folder of JSON lines or Parquet, with the columns that say something.

    Raises:
        ContractError: there is no such file, a line is no JSON object, a row has no id or no prompt.
    """
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.is_file())
    kinds = {file.suffix for file in files}
    if kinds != {".parquet"} and not (kinds and kinds <= {".jsonl", ".json"}):
        raise ContractError(f"dataset: expected a file or folder of JSON lines or Parquet, got {path}")
    for file in files:
        yield from _parquet(file, work) if file.suffix == ".parquet" else _lines(file, work)


def _lines(file: Path, work: Work) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ContractError(f"dataset {file}, line {number}: expected a JSON object")
            yield {name: row[name] for name in work.columns(row, f"{file}, line {number}")}


def _parquet(file: Path, work: Work) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as source:
        columns = work.columns(source.schema_arrow.names, str(file))
        for batch in source.iter_batches(1024, columns=columns):
            yield from batch.to_pylist()


def left(work: Work, digests: Mapping[Any, str], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that are not written.

    Raises:
        ContractTypeError, ContractError: an id is neither an integer nor a text; a row is written, and said something
            else then.
    """
    for row in rows:
        name = row[work.id_column]
        if not isinstance(name, int | str):
            raise ContractTypeError(f"dataset: {work.id_column}: expected an integer or a text, got {shown(name)}")
        if name not in digests:
            yield row
        elif digests[name] != work.digest_of(row):
            raise ContractError(f"dataset: row {shown(name)} differs from the one whose result is in {work.folder}")


def written(folder: Path) -> dict[Any, str]:
    """The ids whose results are in a folder, each with the digest of its row."""
    return {result["id"]: result["row"] for file in sorted(folder.glob("part-*")) for result in _read(file)}


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """Return what a file has, but for texts and tokens."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file, columns=["id", "row", "error"]).to_pylist()
    elif file.suffix == ".jsonl":
        yield from map(json.loads, file.read_text().splitlines())


def finish(engine: Engine, work: Work, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Compute a batch and write its file, unless an engine that died later did; return for each row if it failed."""
    file = work.file_of(rows)
    if not file.exists():
        tries = Tries(file)
        if tries.open("batch") < TOGETHER:
            tries.begin("batch")
            results = compute(engine, work, rows)
        else:
            results = [_alone(engine, work, row, tries) for row in rows]
        write(file, results)
        tries.forget()
    return [result["error"] is not None for result in _read(file)]


def _alone(engine: Engine, work: Work, row: Mapping[str, Any], tries: Tries) -> dict[str, Any]:
    name = work.digest_of(row)
    if tries.open(name) >= ALONE:
        return _result(work, row) | {"error": f"{ALONE} engines ended while they computed it alone"}
    tries.begin(name)
    (result,) = compute(engine, work, [row])
    tries.end(name)
    return result


class Tries:
    """The rows that engines began with for a file of results, and those that ended; it outlives a process that is
    killed.

    Of an engine that loads too: the file is then one that is never written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.with_name(f".tries-{file.stem}")
        self._lines = self._file.read_text().split("\n") if self._file.exists() else []

    def open(self, name: str) -> int:
        """Return how often it was begun, and did not end."""
        return self._lines.count(f"begin {name}") - self._lines.count(f"end {name}")

    def begin(self, name: str) -> None:
        self._write(f"begin {name}")

    def end(self, name: str) -> None:
        self._write(f"end {name}")

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        with self._file.open("a") as file:
            file.write(line + "\n")


def _result(work: Work, row: Mapping[str, Any]) -> dict[str, Any]:
    digest = work.digest_of(row)
    return {"id": row[work.id_column], "text": "", "tokens": [], "finish": "error", "error": None, "row": digest}


def compute(engine: Engine, work: Work, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The results of some rows, computed together, in their order."""
    results: list[dict[str, Any]] = []
    running: dict[int, dict[str, Any]] = {}
    for row in rows:
        result = _result(work, row)
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
            "row": pa.array([result["row"] for result in results], pa.string()),
        }
        pyarrow.parquet.write_table(pa.table(columns), made)
    else:
        made.write_text("".join(json.dumps(result) + "\n" for result in results))
    with made.open("rb") as written_file:
        os.fsync(written_file.fileno())
    made.replace(file)
