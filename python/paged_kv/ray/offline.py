"""Many prompts, none of which anybody waits for: Ray Data hands them to a pool of engines, results go to files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from paged_kv.arguments import integer, shown
from paged_kv.engine import Sampling
from paged_kv.errors import ContractError, ContractTypeError
from paged_kv.ray.batches import SUFFIXES, Format, Work, finish, written
from paged_kv.ray.replica import Model


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    rows: int
    """That it computed."""
    failed: int
    """Of these, rows whose `error` says why there is no text."""
    found: int
    """That were written before it."""


def generate(
    dataset: ray.data.Dataset | Path | str,
    model: Model | str,
    output: Path | str,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    engines: int | tuple[int, int] = 1,
    batch_size: int = 64,
    format: Format = "json",  # noqa: A002 (the word for it)
    id_column: str = "id",
    prompt_column: str = "prompt",
) -> Summary:
    """Computes a text for each row and writes it; returns when all are written. Started again, it does what is left.

    A row that ends the processes of engines, a few of them, becomes a result with an error.

    Args:
        dataset: A file or folder of JSON lines (`.jsonl`, `.json`) or Parquet, or a dataset of Ray Data. Its rows have
            an id, an integer or a text that no other row has, and a prompt, a text or token ids; `OPTIONS` may be
            columns as well.
        model: What each engine loads and runs on; a folder or "demo" with the defaults of `Model`.
        output: A folder that all machines see at this path, of one model, seed and sampling. Its files have the
            columns `id`, `text`, `tokens`, `finish`, `error` and `row`, a digest of the row.
        sampling: For all rows; greedy with 64 tokens where None.
        seed: Of the run; rows draw from streams of their own.
        engines: How many at once, or the fewest and the most, between which Ray chooses. The cluster needs a CPU
            more than the fewest take: Ray reads on it, and waits for it without end.
        batch_size: Rows that an engine computes together, and of a file.
        format: Of the output's files.
        id_column, prompt_column: Names of columns.

    Raises:
        ContractTypeError, ContractError: an argument has the wrong type or is out of range, or a column is missing; the
            output has results of another model, seed or sampling, or of a row that says something else now.
        ray.exceptions.RayError: what an engine raised, but for rows that it refuses; what is written stays.
    """
    if format not in SUFFIXES:
        raise ContractError(f"format must be 'json' or 'parquet', not {shown(format)}")
    if sampling is not None and (not isinstance(sampling, Sampling) or sampling.form is not None):
        raise ContractTypeError(f"sampling must be a Sampling without a form, not {shown(sampling)}")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    model = model if isinstance(model, Model) else Model(model)
    work = Work(
        model, str(folder.resolve()), format, sampling or Sampling(), integer("seed", seed, 0), id_column, prompt_column
    )
    batch_size = integer("batch_size", batch_size, 1)
    low, high = engines if isinstance(engines, tuple) else (engines, engines)
    pool = ray.data.ActorPoolStrategy(min_size=integer("engines", low, 1), max_size=integer("engines", high, low))
    rows = dataset if isinstance(dataset, ray.data.Dataset) else _read(Path(dataset))
    names = rows.columns() or []
    missing = [name for name in (id_column, prompt_column) if name not in names]
    if names and missing:
        raise ContractError(f"dataset has no column {missing[0]!r}; it has {', '.join(names)}")
    work.enter()
    found = written(folder)
    if found:
        done = ray.put(found)
        ways: dict[str, Any] = {"fn_args": (done, work), "batch_format": "pyarrow", "zero_copy_batch": True}
        if changed := rows.map_batches(_changed, **ways).take(1):
            raise ContractError(
                f"dataset: row {shown(changed[0]['id'])} says something else than that whose result is in {folder}"
            )
        rows = rows.map_batches(_without, **ways)
    counted = rows.repartition(target_num_rows_per_block=batch_size).map_batches(
        Worker,
        fn_constructor_args=(work,),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=model.cpus,
    )
    done_now = failed = 0
    for batch in counted.iter_batches(batch_format="pyarrow", batch_size=None):
        done_now += batch.num_rows
        failed += pc.sum(batch["failed"]).as_py() or 0 if batch.num_rows else 0
    return Summary(done_now, failed, len(found))


class Worker:
    """One engine of the pool."""

    def __init__(self, work: Work) -> None:
        self._work, self._engine = work, work.model.engine()

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Computes a batch and writes its file. Its ids, and which failed."""
        failed = finish(self._engine, self._work, batch.to_pylist())
        return pa.table({"id": batch[self._work.id_column], "failed": pa.array(failed, pa.bool_())})


def _read(path: Path) -> ray.data.Dataset:
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.is_file())
    kinds = {file.suffix for file in files}
    if kinds == {".parquet"}:
        return ray.data.read_parquet([str(file) for file in files])
    if kinds and kinds <= {".jsonl", ".json"}:
        return ray.data.read_json([str(file) for file in files], lines=True)
    raise ContractError(f"dataset {path}: is no file or folder of JSON lines or Parquet")


def _changed(batch: pa.Table, done: ray.ObjectRef, work: Work) -> pa.Table:
    """The ids whose results came from other rows."""
    found = ray.get(done)
    rows = [(row[work.id_column], work.digest_of(row)) for row in batch.to_pylist()]
    return pa.table({"id": pa.array([name for name, digest in rows if found.get(name, digest) != digest])})


def _without(batch: pa.Table, done: ray.ObjectRef, work: Work) -> pa.Table:
    found = ray.get(done)
    return batch.filter(pa.array([each not in found for each in batch[work.id_column].to_pylist()], pa.bool_()))
