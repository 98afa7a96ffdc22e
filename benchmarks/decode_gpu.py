"""Decode attention on one GPU: this package's kernels and their peers against the speed of a device-to-device copy.

    python benchmarks/decode_gpu.py [--csv] [--quick] [--only WORDS]

Each figure is the median of `--repeats` runs (25), timed by CUDA events on the stream that the system works on, after
a write of 512 MB that empties the L2 cache and covers what the host does to enqueue the run. The order of the systems
alternates. Bytes are those of K and V that must be read; `share` is bytes / time over the bandwidth of a copy in the
same run (bytes read and written). Every result is compared with torch's float32 attention over the gathered pages.

Peers: MAX's own paged flash attention (pages of 128, its least), FlashInfer where it can be imported, and torch's
scaled_dot_product_attention over contiguous K and V of equal lengths.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paged_kv.benchmarks.gpu_systems import FlashInfer, MaxFlashAttention, Ours, Point, Problem, Source, System, Torch

FLUSH_BYTES = 512 << 20


def points(quick: bool) -> Iterator[Point]:
    """What the targets speak of, and FlashInfer's own grid: pages of 16, groups of 4 and 8."""
    yield from (Point(32, 4096), Point(32, 4096, 64), Point(1, 131072), Point(8, 1024))
    yield Point(32, 4096, kv_dtype="float8_e4m3fn")
    if quick:
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


def copy_system() -> tuple[System, int]:
    """A device-to-device copy of 2 GB, and the bytes that it reads and writes."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return System("copy", lambda: target.copy_(source), torch.cuda.current_stream(), lambda o: o), 2 * source.numel()


def medians_ms(systems: list[System], repeats: int) -> list[float]:
    """Of each system, the median time of a run with a cold L2; forwards and backwards by turns."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in systems]
    for round_ in range(repeats + 3):
        order = list(enumerate(systems))
        for i, system in order if round_ % 2 else reversed(order):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(system.stream):
                flush.fill_(round_ % 7)
                begin.record()
                kept = system.run()
                end.record()
            torch.cuda.synchronize()
            del kept
            if round_ >= 3:
                times[i].append(begin.elapsed_time(end))
    return [statistics.median(of) for of in times]


def measure(point: Point, sources: Sequence[Source], repeats: int) -> list[dict[str, Any]]:
    """A row for each system that can do the point; the first row is the copy."""
    problem = Problem(point)
    copy, copied = copy_system()
    systems = [copy]
    for source in sources:
        try:
            for system in source.systems(problem):
                problem.check(system.name, system.result(system.run()))
                systems.append(system)
        except ImportError as error:
            print(f"  {type(source).__name__}: not there ({error})")
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"  {type(source).__name__}: {str(error).splitlines()[0][:200]}")
    times = medians_ms(systems, repeats)
    ceiling = copied / times[0]
    rows = []
    for system, time in zip(systems, times, strict=True):
        bytes_moved = copied if system is copy else point.kv_bytes
        rows.append(
            {
                "system": system.name,
                **{name: getattr(point, name) for name in ("batch", "length", "page_size", "heads", "kv_heads")},
                "kv_dtype": point.kv_dtype,
                "us": f"{time * 1e3:.1f}",
                "GB/s": f"{bytes_moved / time / 1e6:.0f}",
                "share": f"{bytes_moved / time / ceiling:.3f}",
            }
        )
    return rows


def provenance() -> dict[str, str]:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        written = Path(__file__).with_name("COMMIT")  # in a bundle
        commit = written.read_text().strip() if written.is_file() else ""
    return {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", action="store_true", help="also write results/decode_gpu.csv beside this script")
    parser.add_argument("--quick", action="store_true", help="five points instead of all")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--only", default="", help="of Ours, MaxFlashAttention, FlashInfer, Torch: those named")
    arguments = parser.parse_args()
    kinds = (Ours, MaxFlashAttention, FlashInfer, Torch)
    sources = [kind() for kind in kinds if not arguments.only or kind.__name__ in arguments.only]
    facts = provenance()
    rows: list[dict[str, Any]] = []
    for point in points(arguments.quick):
        print(point)
        try:
            found = measure(point, sources, arguments.repeats)
        except torch.cuda.OutOfMemoryError:
            print("  does not fit this GPU")
            continue
        finally:
            torch.cuda.empty_cache()
        for row in found:
            print(f"  {row['system']:<26} {row['us']:>10} us {row['GB/s']:>6} GB/s  {row['share']}")
        rows += [row | facts for row in found]
    if arguments.csv and rows:
        path = Path(__file__).parent / "results" / "decode_gpu.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
