"""The graphs that MAX's server asks for: found among the artefacts, or compiled once; nothing is served."""

import logging

import pytest
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from paged_kv import cli
from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.runtime import compile_key
from paged_kv.serve import ahead, compiled_graphs
from paged_kv.serve.ahead import GraphsAhead
from paged_kv.serve.compiled_graphs import CompiledGraphs, GraphOfMax, store_for_max
from paged_kv.serve.launch import COMPILED
from support import fake_compiler
from support.fake_compiler import Compiled
from support.permissions import permissions_count


class Session(fake_compiler.Session):
    """Compiles whole graphs."""

    def compile(self, graph, custom_extensions):
        assert not custom_extensions
        self.compiles.append([graph.name])
        return Compiled([graph.name])


@pytest.fixture
def session(monkeypatch):
    made = Session()
    for module in (compiled_graphs, ahead):
        monkeypatch.setattr(module, "session_of_cpu", lambda: made)
    return made


@pytest.fixture
def cache(tmp_path, monkeypatch, session):
    del session
    return fake_compiler.install(monkeypatch, tmp_path / "caches")


@pytest.fixture
def copies(tmp_path):
    (tmp_path / "copies").mkdir()
    return tmp_path / "copies"


def sampler(constant=1.0):
    """What MAX might ask for."""
    with Graph("sampler", input_types=[TensorType(DType.float32, [2], DeviceRef.CPU())]) as graph:
        graph.output(graph.inputs[0].tensor + constant)
    return graph


def test_a_graph_of_max_is_compiled_once_and_kept(cache, session, copies, caplog):
    caplog.set_level(logging.INFO, "paged_kv.serve")
    path = CompiledGraphs(None, copies).claim_import(sampler())
    assert path.read_text().split() == ["sampler"]  # without the seal
    assert "compiling sampler" in caplog.text
    (kept,) = cache.iterdir()
    assert kept.stat().st_size > path.stat().st_size
    caplog.clear()
    assert CompiledGraphs(None, copies).claim_import(sampler()).read_text().split() == ["sampler"]
    assert session.compiles == [["sampler"]]
    assert not caplog.text


@pytest.mark.usefixtures("cache")
def test_another_graph_of_the_same_name_and_types_is_compiled(session, copies):
    for constant in (1.0, 2.0, 1.0):
        CompiledGraphs(None, copies).claim_import(sampler(constant))
    assert len(session.compiles) == 2


@pytest.mark.usefixtures("cache")
def test_a_graph_of_another_version_or_target_is_compiled(session, copies, monkeypatch):
    CompiledGraphs(None, copies).claim_import(sampler())
    monkeypatch.setattr(compile_key, "toolchain", lambda target=None: f"the next MAX for {target}")
    CompiledGraphs(None, copies).claim_import(sampler())
    assert len(session.compiles) == 2


def test_what_the_text_does_not_say_is_left_to_max(cache, copies, monkeypatch):
    monkeypatch.setattr(Graph, "kernel_libraries_paths", property(lambda _: ["other.mojoc"]))
    assert GraphOfMax.of(sampler()) is None
    assert CompiledGraphs(None, copies).claim_import(sampler()) is None
    assert GraphsAhead(None, copies).claim_import(sampler()) is None
    assert not cache.exists()


def test_where_nothing_can_be_kept_max_compiles_and_a_line_says_why(cache, copies, caplog):
    cache.mkdir(parents=True)
    cache.chmod(0o500)
    with permissions_count():
        assert CompiledGraphs(None, copies).claim_import(sampler()) is None
    assert "cannot be kept" in caplog.text


def test_what_is_compiled_ahead_is_found_in_its_folder(tmp_path, cache, session, copies):
    graphs = GraphsAhead(tmp_path / "ahead", copies)
    assert graphs.claim_import(sampler()).read_text().split() == ["sampler"]
    (file,) = graphs.files
    assert [*(tmp_path / "ahead").iterdir()] == [file]
    assert CompiledGraphs(tmp_path / "ahead", copies).claim_import(sampler()).read_text().split() == ["sampler"]
    assert session.compiles == [["sampler"]]
    assert not list(cache.iterdir())


def test_max_asks_while_it_makes_a_pipeline_for_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv(COMPILED, str(tmp_path))
    assert InferenceSession.default_mef_store is None
    with store_for_max(on_the_cpu=False):
        assert InferenceSession.default_mef_store is None
    with store_for_max(on_the_cpu=True):
        store = InferenceSession.default_mef_store
        assert CompiledGraphs.in_force() is store
        assert store._folder == tmp_path
        copies = store._copies
        with store_for_max(on_the_cpu=True):
            assert InferenceSession.default_mef_store is store
    assert InferenceSession.default_mef_store is None
    assert not copies.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compile"], "name one folder or GGUF file"),
        (["compile", "DIR", "other"], "name one folder or GGUF file"),
        (["compile", "DIR", "--page-size", "128"], "--page-size is for --serve"),
        (["compile", "DIR", "--", "--enable-echo"], "--enable-echo is for --serve"),
        (["compile", "DIR", "--serve", "--target", "pentium"], "target must be one of"),
        (["serve", "DIR", "--port", "0", "--compiled", "none"], "none is no folder of compiled steps"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    folder = write_demo_checkpoint(tmp_path / "demo")
    monkeypatch.setattr("paged_kv.serve.launch.check_environment", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main([str(folder) if word == "DIR" else word for word in arguments])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_an_environment_without_the_server_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paged_kv.serve.environment.metadata.requires", lambda _: ["no-such-thing"])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compile", str(tmp_path), "--serve"])
    assert "no-such-thing is missing" in capsys.readouterr().err
