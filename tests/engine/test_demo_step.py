"""The demo's step as a file of the kernels' folder: it is what the demo loads, and all that the demo compiles."""

import lzma

import pytest
from max.driver import get_virtual_cpu_target

from paged_kv.build_kernels import DEMO_STEP, kernel_bundles
from paged_kv.cli import _run
from paged_kv.engine import model
from paged_kv.runtime.artefacts import compile_ahead
from paged_kv.runtime.cache_folder import cache_path
from paged_kv.runtime.compile_key import Sources
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS
from paged_kv.runtime.kernel_build import KernelFile, _write_index
from paged_kv.runtime.libraries import Kernel, load
from paged_kv.runtime.session import default_runtime
from paged_kv.runtime.store import Store, seal, user_store
from support import kernels_ahead

BUNDLE = kernel_bundles()[DEMO_STEP]
STATISTICS = 3
"""Lines on stderr after the text."""


@pytest.fixture(scope="module")
def piece(tmp_path_factory):
    """The file as the builder writes it, of the step that the cache folder has; beside it the library that it calls."""
    session, target = default_runtime().session, get_virtual_cpu_target()
    if target is None:
        pytest.skip("no target is known that this CPU can run")
    folder, library = tmp_path_factory.mktemp("kernels"), Kernel("attention", ("float32",) * 3).library
    piece = KernelFile(folder, target, DEMO_STEP, BUNDLE)
    kernels = KernelFile(folder, target, library.file, library)
    compile_ahead(session, BUNDLE.keys, BUNDLE.build, None)
    load([library.kernel("attention")])
    piece.path.parent.mkdir()
    for file, store in ((piece, user_store()), (kernels, Store(cache_path() / "libraries", "{}.library"))):
        digests = list(file.digests(Sources.installed()).values())
        (artefact,) = store.find(digests)
        file.path.write_bytes(lzma.compress(artefact.content))
        seal(file.path, digests)
    _write_index([piece, kernels], Sources.installed())
    return piece


def test_the_demo_speaks_without_a_compile(piece, tmp_path, capsys):
    text, messages = kernels_ahead.run(kernels_ahead.DEMO, piece.folder, tmp_path)
    assert len(messages.splitlines()) == 1 + STATISTICS, messages  # no word of a compile, no warning
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"loaded"}  # the library, unpacked
    assert _run(["demo"]) == 0
    assert capsys.readouterr().out == text


def test_a_cpu_that_lacks_a_flag_compiles(piece, tmp_path):
    flag = min(REQUIRED_FLAGS[piece.target])
    assert kernels_ahead.run(kernels_ahead.DEMO, piece.folder, tmp_path, flag)[0] == "compiles\n"


def test_the_doctor_finds_it(piece, tmp_path):
    text, _ = kernels_ahead.run(kernels_ahead.DOCTOR, piece.folder, tmp_path)
    assert f"\ndemo      reads its step in 0.1 s: with the package, for {piece.target}\n" in text


def test_a_damaged_file_is_not_read(piece, tmp_path):
    whole = piece.path.read_bytes()
    piece.path.write_bytes(whole[: len(whole) // 2])
    try:
        text, messages = kernels_ahead.run(kernels_ahead.DEMO, piece.folder, tmp_path)
    finally:
        piece.path.write_bytes(whole)
    assert text == "compiles\n"
    assert f"{piece.path} is not read (it is damaged): reinstall it" in messages


def test_the_demo_asks_for_no_other_graphs(monkeypatch):
    class Asked(Exception): ...

    def load_graphs(_session, keys, *_, **__):
        raise Asked(keys)

    monkeypatch.setattr(model, "load_graphs", load_graphs)
    with pytest.raises(Asked) as asked:
        _run(["demo"])
    assert asked.value.args == (BUNDLE.keys,)
