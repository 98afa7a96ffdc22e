"""The doctor: right about this installation, clear about a wrong one, and never a traceback."""

import sys
from types import SimpleNamespace

import pytest

from paged_kv.cli import _run
from paged_kv.graphs.encodings import ENCODINGS
from paged_kv.runtime import doctor, installed
from paged_kv.runtime.cpu_target import CpuInfo
from paged_kv.runtime.doctor import Report, collect, list_compiled, render
from paged_kv.runtime.libraries import api_libraries
from paged_kv.versions import PINNED


def test_this_installation_is_well():
    report = collect()
    assert report.problems == []
    assert report.exit_status == 0
    assert report.versions == PINNED
    assert report.default_target
    assert report.kernels is not None
    assert (report.kernels / "ops.mojo").is_file()
    text = render(report)
    for name in ("max", "mojo", "python", "cpu", "features", "target", "gpu", "kernels", "cache", "compiled", "call"):
        assert f"\n{name} " in f"\n{text}"
    assert text.endswith("all is well")


@pytest.mark.parametrize(
    ("target", "kernel"),
    [
        ("sapphirerapids", "for each 16 rows of x AMX's tdpbsud"),
        ("znver4", "vpdpbusd of 512 bits, dense"),
        ("skylake-avx512", "vpmaddubsw of 512"),
        ("haswell", "vpmaddubsw of 256"),
    ],
)
def test_the_kernel_of_every_encoding_is_named(target, kernel):
    text = render(Report(CpuInfo("x86_64", "", frozenset()), 2, target=target))
    (line,) = (line for line in text.splitlines() if line.startswith("weights"))
    assert kernel in line
    assert all(f" {encoding}" in line for encoding in ENCODINGS)


@pytest.mark.parametrize(
    ("installed", "said", "install"),
    [
        ({"max": "26.6.0", "mojo": PINNED["mojo"]}, ["26.6.0"], [f"max=={PINNED['max']}"]),
        ({"max": PINNED["max"]}, ["none is installed"], [f"mojo=={PINNED['mojo']}"]),
        ({}, ["none is installed"], [f"max=={PINNED['max']}", f"mojo=={PINNED['mojo']}"]),
    ],
)
def test_a_wrong_version_names_the_command_that_mends_it(monkeypatch, installed, said, install):
    monkeypatch.setattr(doctor, "_installed", installed.get)
    report = collect()
    assert report.exit_status == 1
    command = " ".join([sys.executable, "-m pip install", *install])
    assert len(report.problems) == len(install)
    for problem in report.problems:
        assert problem.endswith(f"run: {command}")
        assert all(word in problem for word in said)
        assert f"error: {problem}" in render(report)


def test_a_cache_that_cannot_be_made_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    report = collect()
    assert report.exit_status == 1
    assert report.cache is None
    assert "error: cache: no cache folder" in render(report)


def test_a_driver_that_fails_is_a_problem_on_one_line(monkeypatch):
    def fail() -> int:
        raise RuntimeError("driver\nis too old")

    monkeypatch.setattr("max.driver.accelerator_count", fail)
    assert collect().problems == ["GPU: driver is too old"]


def test_gpus_are_listed(monkeypatch):
    monkeypatch.setattr("max.driver.accelerator_count", lambda: 2)
    gpu = SimpleNamespace(model_name="H100", api="cuda", architecture_name="sm_90a")
    monkeypatch.setattr("max.driver.Accelerator", lambda _: gpu)
    assert "gpu       H100 (cuda, sm_90a), H100 (cuda, sm_90a)" in render(collect())


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("sm_90a", "gpu/hopper, or gpu/generic where it takes no such call\n"),
        ("gfx942", "gpu/generic\n"),
        ("sm_120a", "gpu/generic, if it compiles: sm_120a is none of sm_80, sm_90a, sm_100a, gfx942\n"),
    ],
)
def test_the_kernels_of_a_gpu_are_named(monkeypatch, architecture, said):
    """A GPU that nobody compiled for is not passed over in silence."""
    monkeypatch.setattr(doctor, "_gpus", lambda: [(f"GPU ({architecture})", architecture)] * 2)
    assert f"\nattention {architecture}: {said}" in render(collect())


def test_what_is_compiled_is_counted_by_place():
    """The numbers of a first call are measured: docs/getting-started.md."""
    places = ["with the package, for znver4"] * 3 + ["in the cache, for znver5"] + [None] * 2
    report = Report(CpuInfo("x86_64", "", frozenset()), 1, compiled=dict(zip("abcdef", places, strict=True)))
    lines = render(report).splitlines()
    assert "compiled  4 of 6 libraries of kernels: 3 with the package, for znver4, 1 in the cache, for znver5" in lines
    read = "call      the first one of a process waits 0.1 s where its kernel is compiled, "
    assert f"{read}some 25 s for each of the other 2, once on this machine" in lines
    report.compiled = dict.fromkeys("ab", "with the package, for znver4")
    assert f"{read}as all are" in render(report).splitlines()
    report.compiled["c"] = None
    assert list_compiled(report).splitlines() == [
        "  a: with the package, for znver4",
        "  b: with the package, for znver4",
        "  c: compiled by the first call",
    ]


def test_a_step_has_a_row_of_its_own():
    report = Report(CpuInfo("x86_64", "", frozenset()), 1, compiled={"a": None})
    assert "\ndemo " not in render(report)
    report.steps = {"demo": ["with the package, for haswell"] * 2}
    lines = render(report).splitlines()
    assert "demo      reads its kernels in 0.1 s: with the package, for haswell" in lines
    assert "compiled  0 of 1 libraries of kernels" in lines
    report.steps["demo"].append(None)
    expected = "demo      builds 1 libraries of kernels in some 19 s, once on this machine"
    assert expected in render(report).splitlines()


def test_every_kernel_of_the_api_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(installed, "kernel_roots", list)
    report = collect()
    assert report.compiled == {library.file: None for library in api_libraries()}
    assert f"\ncompiled  0 of {len(api_libraries())} libraries of kernels\n" in render(report)


def test_the_command_looks_for_the_demo_s_libraries(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(installed, "kernel_roots", list)
    assert _run(["doctor"]) == 0
    assert "\ndemo      builds 2 libraries of kernels" in capsys.readouterr().out


def test_steps_that_cannot_be_asked_for_are_a_problem():
    def fail():
        raise OSError("no\nconfig.json")

    report = collect(fail)
    assert report.problems == ["compiled kernels: no config.json"]
    assert (report.compiled, report.steps) == ({}, {})


def test_missing_kernels_are_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.resources, "files", lambda _: tmp_path)
    report = collect()
    assert report.problems == [f"Mojo sources: {tmp_path / 'ops.mojo'} is missing; reinstall paged-kv"]
    assert report.kernels is None


def test_an_empty_report_renders():
    text = render(Report(cpu=CpuInfo("aarch64", "", frozenset()), cores=1))
    assert "unknown model, aarch64, 1 core\n" in text
    assert "target    MAX's own choice\n" in text
    assert "compiled  unknown\ncall      unknown\n" in text
