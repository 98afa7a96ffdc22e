"""The demo with the libraries of the kernels' folder: it loads them, and compiles nothing."""

import lzma

import pytest

from paged_kv.cli import _run
from paged_kv.engine import model
from paged_kv.engine.step import demo_libraries
from paged_kv.runtime.compile_key import Sources
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, apply_cpu_target
from paged_kv.runtime.kernel_build import KernelFile, _write_index
from paged_kv.runtime.libraries import load, user_libraries
from paged_kv.runtime.store import seal
from support import kernels_ahead

STATISTICS = 3
"""Lines on stderr after the text."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files as the builder writes them, of the libraries that the cache folder has."""
    target = apply_cpu_target()
    if target is None:
        pytest.skip("no target is known that this CPU can run")
    folder, libraries = tmp_path_factory.mktemp("kernels"), demo_libraries()
    load([library.kernel(library.kinds[0]) for library in libraries])
    (folder / target).mkdir()
    files = [KernelFile(folder, target, library.file, (library,)) for library in libraries]
    for file in files:
        digests = list(file.digests(Sources.installed()).values())
        (artefact,) = user_libraries().find(digests)
        file.path.write_bytes(lzma.compress(artefact.content))
        seal(file.path, digests)
    _write_index(files, Sources.installed())
    return files


@pytest.mark.slow
def test_the_demo_speaks_without_a_compile(files, tmp_path, capsys):
    text, messages = kernels_ahead.run(kernels_ahead.DEMO, files[0].folder, tmp_path)
    assert len(messages.splitlines()) == 1 + STATISTICS, messages  # no word of a compile, no warning
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"loaded"}  # libraries, unpacked
    assert _run(["demo"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_a_cpu_that_lacks_a_flag_compiles(files, tmp_path):
    flag = min(REQUIRED_FLAGS[files[0].target])
    assert kernels_ahead.run(kernels_ahead.DEMO, files[0].folder, tmp_path, flag)[0] == "compiles\n"


@pytest.mark.slow
def test_the_doctor_finds_them(files, tmp_path):
    text, _ = kernels_ahead.run(kernels_ahead.DOCTOR, files[0].folder, tmp_path)
    assert f"\ndemo      reads its kernels in 0.1 s: with the package, for {files[0].target}\n" in text


@pytest.mark.slow
def test_a_damaged_file_is_not_read(files, tmp_path):
    path = files[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        text, messages = kernels_ahead.run(kernels_ahead.DEMO, files[0].folder, tmp_path)
    finally:
        path.write_bytes(whole)
    assert text == "compiles\n"
    assert f"{path} is not read (it is damaged): reinstall it" in messages


def test_max_compiles_no_graph_for_the_demo(monkeypatch):
    def load_graphs(*_, **__):
        raise AssertionError("a graph is compiled")

    monkeypatch.setattr(model, "load_graphs", load_graphs)
    assert _run(["demo"]) == 0
