"""Decode attention on one GPU: this package's kernels and their peers against the speed of a device-to-device copy.

    python -m benchmarks.decode_gpu [--points one|pages|few|all] [--csv [FILE]] [--only WORDS]

Each figure is the median of `--repeats` runs (25), timed as `gpu_timing.py` says. The order of the systems alternates.
Bytes are those of K and V that must be read; `share` is bytes / time over the bandwidth of a copy in the same run
(bytes read and written). Every result is compared with torch's float32 attention over the gathered pages. A point is
a line of the file, written the moment it is measured; what fails is among its errors, and costs the others nothing.

Peers: MAX's own paged flash attention (pages of 128, its least), FlashInfer where it can be imported, and torch's
scaled_dot_product_attention over contiguous K and V of equal lengths.

MAX takes 90 % of a GPU's memory with its first context, and the others would find none: here it gets 10 %, unless
MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT says otherwise.

`--device cpu` runs a few small points on the CPU: it tries this program, and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_kv.bench.provenance import commit

if TYPE_CHECKING:
    from benchmarks.gpu_systems import Point, Source
    from benchmarks.gpu_timing import Clock, System

MEMORY_PERCENT = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"
SIZES = ("batch", "length", "page_size", "heads", "kv_heads", "kv_dtype")
SYSTEMS = (
    "paged-kv",
    "paged-kv plain",
    "MAX (pages of 128)",
    "FlashInfer",
    "FlashInfer, tensor cores",
    "torch, contiguous",
)
"""Those of `gpu_systems`; the file has a column of microseconds of each, and one of its share."""
FACTS = ("device", "date", "commit")
FIELDS = (
    *(*SIZES, "copy: us", "copy: GB/s"),
    *(f"{system}: {figure}" for system in SYSTEMS for figure in ("us", "share")),
    *("errors", *FACTS),
)
IMPOSSIBLE = 1.1
"""A share of the copy's bandwidth that no run from cold caches reaches."""
POINTS = ("one", "pages", "few", "all")


def points(which: str, device: str = "cuda") -> Iterator[Point]:
    """Return what the targets speak of, and FlashInfer's own grid: pages of 16, groups of 4 and 8."""
    from benchmarks.gpu_systems import Point

    batch, length = (64, 4096) if device == "cuda" else (4, 1024)
    if which == "one":
        yield Point(batch, length)
    elif which == "pages":
        yield from (Point(batch, length, page_size) for page_size in (8, 16, 64, 128))
    else:
        yield from (Point(32, 4096), Point(32, 4096, 64), Point(1, 131072), Point(8, 1024))
        yield Point(32, 4096, kv_dtype="float8_e4m3fn")
    if which != "all":
        return
    for page_size in (16, 64):
        for batch in (32, 64, 128, 256):
            for length in (4096, 16384, 32768):
                yield Point(batch, length, page_size)
    for batch, length in ((32, 16384), (128, 4096)):
        yield Point(batch, length, kv_dtype="float8_e4m3fn")
    for heads in (32, 64):
        for batch in (1, 4, 16, 64, 256, 512):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                yield Point(batch, length, heads=heads)


def measure(point: Point, sources: Sequence[Source], repeats: int, clock: Clock, device: str) -> list[dict[str, Any]]:
    """A row for each system that can do the point, and for each that failed; the first row is the copy."""
    from benchmarks.gpu_systems import Problem, copy_system
    from benchmarks.gpu_timing import medians_ms

    sizes = {name: getattr(point, name) for name in SIZES}
    try:
        problem = Problem(point, device)
        copy, copied = copy_system(device)
    except Exception as error:  # mostly of memory; whatever it is, the next point may do
        return [{"system": "", **sizes, "error": reason(error)}]
    systems: list[System] = [copy]
    failed: list[tuple[str, Exception]] = []
    for source in sources:
        try:
            for system in source.systems(problem):
                problem.check(system.name, system.result(system.run()))
                systems.append(system)
        except Exception as error:  # a library that is not there or cannot do this: the others can
            failed.append((type(source).__name__, error))
    times = medians_ms(systems, repeats, clock)
    rows = []
    for system, time in zip(systems, times, strict=True):
        if isinstance(time, Exception):
            failed.append((system.name, time))
            continue
        speed = (copied if system is copy else point.kv_bytes) / time
        row = {"system": system.name, **sizes, "us": f"{time * 1e3:.1f}", "GB/s": f"{speed / 1e6:.0f}"}
        if not isinstance(times[0], Exception):
            share = speed / (copied / times[0])
            row["share"] = f"{share:.3f}"
            if share > IMPOSSIBLE:
                row["error"] = "faster than memory: was all of the run between the events?"
        rows.append(row)
    return rows + [{"system": name, **sizes, "error": reason(error)} for name, error in failed]


def reason(error: Exception) -> str:
    """An error in one line; one of memory with what there is of it and who may hold it."""
    import torch

    text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    words = text.lower()
    if not isinstance(error, torch.cuda.OutOfMemoryError) and "memory" not in words:
        return text
    if not torch.cuda.is_available():
        return f"does not fit: {text}"
    free, total = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    gib = [f"{number / 2**30:.1f}" for number in (free, total, ours, total - free - ours)]
    held = "{} of {} GiB free, torch holds {}, MAX and the rest {}".format(*gib)
    return f"does not fit: {held}; {MEMORY_PERCENT}={os.environ.get(MEMORY_PERCENT)}; {text}"


def provenance(device: str) -> dict[str, str]:
    import torch

    written = Path(__file__).with_name("COMMIT")  # in a bundle
    found = written.read_text().strip() if written.is_file() else commit()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "date": datetime.date.today().isoformat(), "commit": found}


def line_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A point as a line of the file, from the rows of its systems: the copy's rate, the others' shares, all errors.

    Tested without a GPU; it has not yet run on one.
    """
    line = {name: rows[0][name] for name in (*SIZES, *FACTS) if name in rows[0]}
    for row in rows:
        figures = ("us", "GB/s") if row["system"] == "copy" else ("us", "share")
        line |= {f"{row['system']}: {figure}": row[figure] for figure in figures if figure in row}
    return line | {"errors": "; ".join(f"{row['system']}: {row['error']}" for row in rows if row.get("error"))}


class Table:
    """The CSV file, to which points are added as they come; None writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n", restval="")
            if is_new:
                writer.writeheader()
            writer.writerow(line_of(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "decode_gpu.csv"
    parser.add_argument("--csv", type=Path, nargs="?", const=default, help="also write a file; results/decode_gpu.csv")
    parser.add_argument("--points", choices=POINTS, default="all")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--only", default="", help="of Ours, MaxFlashAttention, FlashInfer, Torch: those named")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--cpu-target", help="what the host's code is compiled for, where that is not this CPU")
    arguments = parser.parse_args()
    os.environ.setdefault(MEMORY_PERCENT, "10")  # read when MAX makes its first context
    if arguments.cpu_target:
        from max.driver import set_virtual_cpu_target

        set_virtual_cpu_target(arguments.cpu_target)
    from benchmarks.gpu_systems import FlashInfer, MaxFlashAttention, Ours, Torch
    from benchmarks.gpu_timing import clock_of

    device = "cuda" if arguments.device == "gpu" else "cpu"
    clock, facts, table = clock_of(device), provenance(device), Table(arguments.csv)
    kinds = (Ours, MaxFlashAttention, FlashInfer, Torch) if device == "cuda" else (Ours, Torch)
    sources = [kind() for kind in kinds if not arguments.only or kind.__name__ in arguments.only]
    measured = 0
    for point in points(arguments.points, device):
        print(point, flush=True)
        rows = measure(point, sources, arguments.repeats, clock, device)
        table.add([row | facts for row in rows])
        for row in rows:
            figures = f"{row['us']:>10} us {row['GB/s']:>6} GB/s  {row.get('share', '')}  " if "us" in row else ""
            print(f"  {row['system']:<26} {figures}{row.get('error', '')}", flush=True)
            measured += "us" in row and row["system"].startswith("paged-kv")
        empty_cache(device)
    if not measured:
        raise SystemExit("none of this package's kernels was measured")
    print(f"{measured} figures of this package's kernels")


def empty_cache(device: str) -> None:
    """Gives back what torch keeps of a point's memory."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
