"""Many prompts, none of which anybody waits for: Ray Data hands them to a pool of engines, results go to files.

Files are read here, in the driver, and so is what is written of a run that is resumed: Ray Data gets the rows that are
left, a block for each batch, and has no tasks but those of the engines. A task of its own may need a new process, which
Ray starts at niceness 15: on a busy machine a resumed run stood for minutes before it had read one file. Its reader of
JSON also makes numbers of texts that look like them, "007" of an id or a prompt.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from paged_kv.arguments import integer, shown
from paged_kv.engine import Sampling
from paged_kv.errors import ContractError, ContractTypeError, ToolchainError
from paged_kv.ray.batches import STARTS, SUFFIXES, Format, Tries, Work, finish, left, rows_of, written
from paged_kv.ray.replica import Model


@dataclass(frozen=True)
class Summary:
    """The summary of a run."""

    rows: int
    """That it computed."""
    failed: int
    """Rows among these whose `error` says why there is no text."""
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
        dataset: A file or folder of JSON lines (`.jsonl`, `.json`) or Parquet, which this process reads and hands on in
            Ray's object store; or a dataset of Ray Data, which the cluster reads, and twice where a run is resumed. Its
            rows have an id, an integer or a text that no other row has, and a prompt, a text or token ids; `OPTIONS`
            may be columns as well.
        model: What each engine loads and runs on; a folder or "demo" with the defaults of `Model`.
        output: A folder that all machines see at this path, of one model, seed and sampling. Its files have the
            columns `id`, `text`, `tokens`, `finish`, `error` and `row`, a digest of the row.
        sampling: For all rows; greedy with 64 tokens where None.
        seed: The seed of the run; rows draw from streams of their own.
        engines: How many at once, or the fewest and the most, between which Ray chooses. For a dataset of Ray Data the
            cluster needs a CPU more than the fewest take: Ray reads on it, and waits for it without end.
        batch_size: Rows that an engine computes together, and of a file.
        format: The format of the output's files.
        id_column, prompt_column: Names of columns.

    Raises:
        ContractTypeError, ContractError: an argument has the wrong type or is out of range, or a column is missing; the
            output has results of another model, seed or sampling, or of a row that says something else now.
        ray.exceptions.RayError: what an engine raised, but for rows that it refuses, or that it was ended three times
            while it loaded; what is written stays.
    """
    if format not in SUFFIXES:
        raise ContractError(f"format: expected 'json' or 'parquet', got {shown(format)}")
    if sampling is not None and (not isinstance(sampling, Sampling) or sampling.structured_output is not None):
        raise ContractTypeError(f"sampling: expected a Sampling without a structure, got {shown(sampling)}")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    model = model if isinstance(model, Model) else Model(model)
    work = Work(
        model, str(folder.resolve()), format, sampling or Sampling(), integer("seed", seed, 0), id_column, prompt_column
    )
    batch_size = integer("batch_size", batch_size, 1)
    low, high = engines if isinstance(engines, tuple) else (engines, engines)
    pool = ray.data.ActorPoolStrategy(min_size=integer("engines", low, 1), max_size=integer("engines", high, low))
    if isinstance(dataset, ray.data.Dataset):
        rest, num_written = _of_dataset(dataset, work, batch_size)
    else:
        rest, num_written = _of_files(Path(dataset), work, batch_size)
    if rest is None:
        return Summary(0, 0, num_written)
    counted = rest.map_batches(
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
    return Summary(done_now, failed, num_written)


class Worker:
    """One engine of the pool."""

    def __init__(self, work: Work) -> None:
        tries = Tries(Path(work.folder) / f"engine-{ray.get_runtime_context().get_actor_id()}")
        if tries.open("load") >= STARTS:
            raise ToolchainError(f"an engine was ended {STARTS} times while it loaded {work.model.model}")
        tries.begin("load")
        self._work, self._engine = work, work.model.engine()
        tries.forget()

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Computes a batch and writes its file. Which rows failed."""
        rows = [pickle.loads(row) for row in batch["row"].to_pylist()]
        return pa.table({"failed": pa.array(finish(self._engine, self._work, rows), pa.bool_())})


def _of_files(path: Path, work: Work, batch_size: int) -> tuple[ray.data.Dataset | None, int]:
    """Return what is left of the rows of files, a block for each batch, and how many are written."""
    rows = rows_of(path, work)
    first = next(rows, None)  # what is wrong with it is said before the run begins
    work.enter()
    digests = written(Path(work.folder))
    rest = list(left(work, digests, chain(() if first is None else (first,), rows)))
    blocks = [_table(rest[at : at + batch_size]) for at in range(0, len(rest), batch_size)]
    return ray.data.from_blocks(blocks) if blocks else None, len(digests)


def _of_dataset(rows: ray.data.Dataset, work: Work, batch_size: int) -> tuple[ray.data.Dataset, int]:
    if names := rows.columns():
        work.columns(names, "of Ray Data")
    work.enter()
    digests = written(Path(work.folder))
    if digests:  # all of it is read before anything is computed
        batches = rows.iter_batches(batch_format="pyarrow", batch_size=None)
        for _ in left(work, digests, (row for batch in batches for row in batch.to_pylist())):
            pass
    rest = rows.map_batches(_rest, fn_args=(ray.put(digests), work), batch_format="pyarrow", zero_copy_batch=True)
    return rest.repartition(target_num_rows_per_block=batch_size), len(digests)


def _rest(batch: pa.Table, digests: ray.ObjectRef, work: Work) -> pa.Table:
    return _table(left(work, ray.get(digests), batch.to_pylist()))


def _table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as they are: columns of Arrow have one type, and an id may be a number or a text."""
    return pa.table({"row": pa.array([pickle.dumps(row) for row in rows], pa.binary())})
