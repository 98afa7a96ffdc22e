"""The GPU benchmark without a GPU: how a run is timed, what an error costs, what a row says."""

import csv
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decode_gpu, gpu_timing
from benchmarks.gpu_timing import LEAST_DELAY, WARM_UP, System, medians_ms

POINT = SimpleNamespace(batch=2, length=32, page_size=16, heads=4, kv_heads=2, kv_dtype="bfloat16", kv_bytes=1 << 20)


class Ticks:
    """A clock on which every run of a system takes what its name says."""

    def milliseconds(self, system):
        system.run()
        return float(system.name)


def system(name, run=lambda: None):
    return System(name, run, None, lambda o: o)


def test_a_system_that_fails_leaves_the_others_their_figures():
    turns = []

    def fails_at_last():
        turns.append("2")
        if len(turns) > 4:
            raise RuntimeError("illegal address")

    found = medians_ms([system("1"), system("2", fails_at_last), system("3")], 5, Ticks())
    assert found[0] == 1.0
    assert found[2] == 3.0
    assert isinstance(found[1], RuntimeError)
    assert len(turns) == 5


def test_the_order_of_systems_alternates_and_first_runs_do_not_count():
    order, times = [], iter([9.0] * 2 * WARM_UP + [1.0, 2.0, 4.0, 3.0])
    clock = SimpleNamespace(milliseconds=lambda of: (order.append(of.name), next(times))[1])
    assert medians_ms([system("a"), system("b")], 2, clock) == [2.0, 3.0]
    assert order == list("baabbaabba")[: 2 * (WARM_UP + 2)]


def test_l2_is_read_and_the_wait_covers_what_the_host_does(monkeypatch):
    """In the order of the stream: a read of more than L2, a wait, then the run between the events."""
    done, now = [], iter([0.0, 0.5, 1.0, 1.25])
    flush = SimpleNamespace(max=lambda: done.append("read"))
    event = lambda **_: SimpleNamespace(record=lambda: done.append("event"), elapsed_time=lambda _: 7.0)  # noqa: E731
    monkeypatch.setattr(gpu_timing.torch, "ones", lambda count, **_: (done.append(4 * count), flush)[1])
    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(("wait", cycles)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronise"))
    clock, timed = gpu_timing.GpuClock(), system("ours", lambda: done.append("run"))
    assert clock.milliseconds(timed) == 7.0
    assert done.pop(0) == gpu_timing.FLUSH_BYTES
    assert done == ["read", ("wait", int(LEAST_DELAY * 2e9)), "event", "run", "event", "synchronise"]
    done.clear()
    clock.milliseconds(timed)
    assert done[1] == ("wait", int(2 * 0.5 * 2e9))  # twice what the host took the last time


class Fake:
    """A library; `run` is what its only system does."""

    def __init__(self, run, error=None):
        self.run, self.error = run, error

    def systems(self, _):
        if self.error is not None:
            raise self.error
        yield System("paged-kv", self.run, None, lambda o: o)


@pytest.fixture
def measured(monkeypatch):
    """Rows of a point, for some sources."""
    from benchmarks import gpu_systems

    monkeypatch.setattr(gpu_systems, "Problem", lambda *_: SimpleNamespace(check=lambda *_: None))
    monkeypatch.setattr(gpu_systems, "copy_system", lambda _: (system("2"), 4 << 20))
    ticks = SimpleNamespace(milliseconds=lambda of: (of.run(), 1.0)[1])
    return lambda *sources: decode_gpu.measure(POINT, sources, 3, ticks, "cpu")


def test_what_fails_has_a_row_with_its_reason(measured):
    def breaks():
        raise RuntimeError("two\nlines")

    rows = measured(
        Fake(lambda: None),
        Fake(breaks),
        Fake(None, ImportError("no flashinfer")),
        Fake(None, MemoryError("out of memory")),
    )
    assert [row["system"] for row in rows] == ["2", "paged-kv", "Fake", "Fake", "Fake"]
    assert rows[1]["us"] == "1000.0"
    assert rows[1]["GB/s"] == "1"
    assert rows[1]["share"] == "0.250"
    assert [row["error"] for row in rows[2:4]] == ["RuntimeError: two lines", "ImportError: no flashinfer"]
    assert rows[4]["error"].startswith("does not fit: ")
    assert all(row["length"] == 32 for row in rows)


def test_a_figure_that_cannot_be_is_marked(monkeypatch, measured):
    """A library that enqueues its kernels after the second event has the time that of nothing."""
    from benchmarks import gpu_systems

    monkeypatch.setattr(gpu_systems, "copy_system", lambda _: (system("2"), POINT.kv_bytes // 2))
    assert "faster than memory" in measured(Fake(lambda: None))[1]["error"]
    monkeypatch.setattr(gpu_systems, "copy_system", lambda _: (system("2"), POINT.kv_bytes))
    assert "error" not in measured(Fake(lambda: None))[1]


def test_a_problem_that_does_not_fit_is_a_row_of_its_own(monkeypatch, measured):
    from benchmarks import gpu_systems

    def too_large(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_systems, "Problem", too_large)
    (row,) = measured(Fake(lambda: None))
    assert row["error"].startswith("does not fit: ")
    assert row["batch"] == 2


def test_memory_that_others_hold_is_named(monkeypatch):
    monkeypatch.setenv(decode_gpu.MEMORY_PERCENT, "10")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 9 << 30)
    said = decode_gpu.reason(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert "1.0 of 140.0 GiB free, torch holds 9.0, MAX and the rest 130.0" in said
    assert "SIZE_PERCENT=10" in said


def test_rows_are_in_the_file_as_they_come(tmp_path):
    table = decode_gpu.Table(tmp_path / "results" / "decode.csv")
    sizes = {name: getattr(POINT, name) for name in decode_gpu.SIZES}
    copy, ours = {"system": "copy", "us": "3.0", "GB/s": "8"}, {"system": "paged-kv", "us": "4.0", "GB/s": "6"}
    table.add([row | sizes for row in (copy, ours | {"share": "0.750", "error": "odd"})])
    assert "0.750" in (tmp_path / "results" / "decode.csv").read_text()
    table.add([{"system": "", "error": "no memory"} | sizes | {"date": "2026-11-26"}])
    with (tmp_path / "results" / "decode.csv").open() as file:
        first, second = csv.DictReader(file)
    figures = [first[name] for name in ("copy: us", "copy: GB/s", "paged-kv: us", "paged-kv: share", "errors", "batch")]
    assert figures == ["3.0", "8", "4.0", "0.750", "paged-kv: odd", "2"]
    assert (second["copy: us"], second["errors"], second["date"]) == ("", ": no memory", "2026-11-26")
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        table.add([{"system": "a name that is wrong", "us": "1"} | sizes])


def test_the_committed_file_has_these_fields():
    path = Path(decode_gpu.__file__).parent / "results" / "decode_gpu.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == decode_gpu.FIELDS
    assert all(float(row["paged-kv: us"]) > 0 for row in rows)


def test_pages_are_compared_at_equal_bytes():
    found = list(decode_gpu.points("pages"))
    assert [point.page_size for point in found] == [8, 16, 64, 128]
    assert len({point.kv_bytes for point in found}) == 1
    assert found[1] in list(decode_gpu.points("one"))
