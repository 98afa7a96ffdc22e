"""Which artefact a CPU takes: one for its own target, then an installed one for a lower target, then a compile."""

import lzma

import pytest

from paged_kv.errors import ToolchainError
from paged_kv.graphs import ops
from paged_kv.runtime import artefacts, compile_key, compiled_ahead
from paged_kv.runtime.artefacts import load_graphs, where_graphs_lie
from paged_kv.runtime.compile_key import CompileKey, Sources, toolchain
from paged_kv.runtime.compiled_ahead import INDEX, Index
from paged_kv.runtime.cpu_target import REQUIRED_FLAGS, CpuInfo, choose_cpu_target, usable_targets
from paged_kv.runtime.seal import write_seal

KEY = CompileKey("graph", ops.__name__)
SOURCES = Sources.installed()
"""Read once."""
LEVELS = ("haswell", "skylake-avx512", "znver4", "znver5", "sapphirerapids")
"""What the package contains."""


class Compiled:
    def __init__(self, text):
        self.text = text

    def export_mef(self, path):
        with open(path, "w") as file:
            file.write(self.text)


class Session:
    def compile(self, module, custom_extensions):  # noqa: ARG002
        return Compiled("compiled here")

    def init_all(self, compiled, weights_registry):  # noqa: ARG002
        if compiled.text == "unreadable":
            raise RuntimeError
        return {"graph": compiled.text}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with kernels for LEVELS; the function makes its CPU and target, and says what a call gets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(artefacts, "read", lambda file: Compiled(file.read().decode()))
    monkeypatch.setattr(artefacts, "Module", list)
    monkeypatch.setattr(artefacts, "kernel_library", lambda sources: sources)
    monkeypatch.setattr(compiled_ahead, "kernel_roots", lambda: [tmp_path / "kernels"])
    monkeypatch.setattr(Sources, "installed", lambda: SOURCES)
    for target in LEVELS:
        ship(tmp_path / "kernels" / target, target, f"for {target}")

    def load(flags, target=None, **options):
        cpu = CpuInfo("x86_64", "znver5 by its name", frozenset(flags))
        in_force = target or choose_cpu_target(cpu) or ""
        monkeypatch.setattr(CpuInfo, "read", lambda: cpu)
        monkeypatch.setattr(artefacts, "get_virtual_cpu_target", lambda: in_force)
        monkeypatch.setattr(compile_key, "get_virtual_cpu_target", lambda: in_force)
        return load_graphs(Session(), {"graph": KEY}, lambda *_: None, **options)["graph"]

    load.kernels = tmp_path / "kernels"
    load.cache = tmp_path / "cache" / "paged-kv" / "compiled"
    return load


def ship(folder, target, text, versions=None):
    digest = KEY.digest(SOURCES, versions or toolchain(target))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "graph.graph.xz"
    path.write_bytes(lzma.compress(text.encode()))
    write_seal(path, [digest])
    Index(target, REQUIRED_FLAGS[target], {}, {digest: {"name": "graph", "file": path.name}}).write(folder / INDEX)


BEST = {
    "graniterapids": "sapphirerapids",
    "sapphirerapids": "sapphirerapids",
    "znver5": "znver5",
    "znver4": "znver4",
    "cooperlake": "skylake-avx512",
    "icelake-server": "skylake-avx512",
    "cascadelake": "skylake-avx512",
    "skylake-avx512": "skylake-avx512",
    "znver3": "haswell",
    "znver2": "haswell",
    "haswell": "haswell",
}


@pytest.mark.parametrize("cpu", REQUIRED_FLAGS)
def test_every_cpu_with_avx2_finds_kernels(machine, cpu):
    assert machine(REQUIRED_FLAGS[cpu]) == f"for {BEST[cpu]}"
    assert not machine.cache.exists() or not list(machine.cache.iterdir())  # nothing was compiled or kept


@pytest.mark.parametrize("level", LEVELS)
def test_no_artefact_is_taken_on_a_cpu_that_lacks_a_flag_of_it(machine, level):
    """Masked flags, one at a time: what is taken instead asks for no flag that is masked."""
    for flag in REQUIRED_FLAGS[level]:
        flags = REQUIRED_FLAGS[level] - {flag}
        got = machine(flags)
        assert got != f"for {level}", flag
        taken = got.removeprefix("for ")
        assert got == "compiled here" or REQUIRED_FLAGS[taken] <= flags, (flag, got)


@pytest.mark.parametrize("forced", REQUIRED_FLAGS)
def test_a_forced_target_takes_what_it_and_the_cpu_can_run(machine, forced):
    """On a CPU that can run it; elsewhere nothing is loaded, from nowhere, as it would end the process."""
    zen5 = REQUIRED_FLAGS["znver5"]
    if REQUIRED_FLAGS[forced] <= zen5:
        assert machine(zen5, forced) == f"for {BEST[forced]}"
    else:
        lacking = ", ".join(sorted(REQUIRED_FLAGS[forced] - zen5))
        with pytest.raises(ToolchainError, match=f"^CPU target {forced} is in force, .* does not report {lacking}: "):
            machine(zen5, forced)
        assert not machine.cache.exists()


@pytest.mark.parametrize("forced", ["x86-64", "x86-64-v3"])
def test_a_target_that_asks_for_nothing_known_takes_nothing(machine, forced):
    assert machine(REQUIRED_FLAGS["znver5"], forced) == "compiled here"


def test_a_cpu_without_a_target_takes_nothing(machine):
    assert machine(REQUIRED_FLAGS["haswell"] - {"avx2"}) == "compiled here"
    assert machine([]) == "compiled here"


def test_what_was_compiled_for_this_very_cpu_is_better_than_a_lower_target(machine):
    flags = REQUIRED_FLAGS["icelake-server"]
    assert machine(flags) == "for skylake-avx512"
    assert machine(flags, exact=True) == "compiled here"
    assert machine(flags) == "compiled here"
    assert machine(flags, "cascadelake") == "for skylake-avx512"


def test_where_graphs_lie_is_what_a_call_takes(machine):
    flags = REQUIRED_FLAGS["icelake-server"]
    machine(flags)
    assert where_graphs_lie({"graph": KEY}) == {"graph": "with the package, for skylake-avx512"}
    machine(flags, exact=True)
    assert where_graphs_lie({"graph": KEY}) == {"graph": "in the cache, for icelake-server"}
    machine(REQUIRED_FLAGS["znver5"])
    assert where_graphs_lie({"graph": KEY}) == {"graph": "with the package, for znver5"}
    assert where_graphs_lie({"graph": CompileKey("another", ops.__name__)}) == {}


@pytest.mark.parametrize(
    "versions", ["max 26.6.0 mojo 1.2.0 for znver5", "max 26.7.0 mojo 1.1.0 for znver5", toolchain("sapphirerapids")]
)
def test_an_artefact_of_another_version_or_target_is_not_taken(machine, versions):
    """Whole, sealed, in the right folder: its digest is not this machine's."""
    ship(machine.kernels / "znver5", "znver5", "of another", versions)
    assert machine(REQUIRED_FLAGS["znver5"]) == "for znver4"


def test_another_targets_folder_under_this_ones_name_is_not_taken(machine):
    for file in (machine.kernels / "sapphirerapids").iterdir():
        file.rename(machine.kernels / "haswell" / file.name)
    assert machine(REQUIRED_FLAGS["haswell"]) == "compiled here"


def test_another_targets_file_under_this_ones_name_is_not_taken(machine):
    name = "graph.graph.xz"
    (machine.kernels / "sapphirerapids" / name).replace(machine.kernels / "haswell" / name)
    with pytest.warns(RuntimeWarning, match="it holds other graphs"):
        assert machine(REQUIRED_FLAGS["haswell"]) == "compiled here"


def test_a_damaged_artefact_is_compiled_again(machine):
    path = machine.kernels / "haswell" / "graph.graph.xz"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.warns(RuntimeWarning, match="it is damaged"):
        assert machine(REQUIRED_FLAGS["haswell"]) == "compiled here"
    with pytest.warns(RuntimeWarning, match="it is damaged"):
        assert machine(REQUIRED_FLAGS["haswell"], "haswell") == "compiled here"
    assert len(list(machine.cache.iterdir())) == 1


def test_an_artefact_that_max_does_not_read_is_compiled_again(machine):
    ship(machine.kernels / "haswell", "haswell", "unreadable")
    with pytest.warns(RuntimeWarning, match="MAX refuses it"):
        assert machine(REQUIRED_FLAGS["haswell"]) == "compiled here"
    assert (machine.kernels / "haswell" / "graph.graph.xz").exists()


def test_usable_targets_begin_with_the_one_in_force():
    for target, flags in REQUIRED_FLAGS.items():
        cpu = CpuInfo("x86_64", "", flags)
        usable = usable_targets(target, cpu)
        assert usable[0] == target
        assert all(REQUIRED_FLAGS[lower] <= flags for lower in usable)
        assert len(set(usable)) == len(usable)
        for flag in flags:
            assert usable_targets(target, CpuInfo("x86_64", "", flags - {flag})) == []
    assert usable_targets(None, cpu) == usable_targets("", cpu) == usable_targets("pentium", cpu) == []
