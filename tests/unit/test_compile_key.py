"""Sources that a compiled graph's key depends on: they are changed in a copy of the package; nothing is compiled."""

import re
import shutil
import subprocess
import sys
from pathlib import PurePosixPath

import pytest

from paged_kv.engine.step import StepGraph
from paged_kv.errors import ToolchainError
from paged_kv.graphs import ops
from paged_kv.runtime import compile_key
from paged_kv.runtime.compile_key import MODELS, CompileKey, Sources, toolchain
from paged_kv.runtime.cpu_target import CpuInfo
from paged_kv.runtime.libraries import Kernel, program_of
from paged_kv.runtime.variants import Variant
from support.ci_modules import ci_module

GPU = "cuda sm_90a 0"
SERVED = CompileKey("served", (MODELS, "max_serve/graph.py"))


def keys(device):
    """A graph of each kind: a variant of the array API, and a model's step."""
    (step,) = StepGraph("a geometry", ops.DTYPES[0]).keys(device).values()
    return {"api": Variant("attention", *ops.DTYPES[:1] * 2).key(device), "step": step}


KEYS = {f"{kind} {name}": key for kind, device in (("cpu", ""), ("gpu", GPU)) for name, key in keys(device).items()}
EVERY = {*KEYS, "served"}
CPU, STEPS = {"cpu api", "cpu step", "served"}, {"cpu step", "gpu step", "served"}


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources."""
    for name, folder in Sources.installed().folders.items():
        shutil.copytree(folder, tmp_path / (name or "paged_kv"))
    return tmp_path


def digests(tree, toolchain="toolchain"):
    sources = Sources({"": tree / "paged_kv", "graphs": tree / "graphs", "mojo_ops": tree / "mojo_ops"})
    return {name: key.digest(sources, toolchain) for name, key in (KEYS | {"served": SERVED}).items()}


@pytest.fixture
def changed(tree):
    """Says which keys differ after a change of the tree."""
    before = digests(tree)
    assert len(set(before.values())) == len(before)

    def changed(change):
        change(tree)
        after = digests(tree)
        return {name for name in before if before[name] != after[name]}

    return changed


def edit(file):
    def change(tree):
        with (tree / file).open("a") as opened:
            opened.write("\n# another line\n")

    return change


def test_a_copy_has_the_keys_of_the_original(tree):
    sources = Sources.installed()
    assert digests(tree)["cpu api"] == KEYS["cpu api"].digest(sources, "toolchain")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("mojo_ops/ops.mojo", EVERY),
        ("mojo_ops/cache/page_table.mojo", EVERY),
        ("mojo_ops/attention/softmax.mojo", EVERY),
        ("mojo_ops/attention/cpu/vectors/segment.mojo", CPU),
        ("mojo_ops/linear/amx/blocks.mojo", CPU),
        ("mojo_ops/layers/__init__.mojo", CPU),
        ("mojo_ops/attention/gpu/hopper/consumer.mojo", EVERY - CPU),
        ("mojo_ops/transfer/gpu/append.mojo", EVERY - CPU),
        ("paged_kv/options.py", EVERY),
        ("graphs/ops.py", EVERY),
        ("graphs/layers.py", EVERY),
        ("graphs/models/decoder.py", STEPS),
        ("paged_kv/runtime/variants.py", EVERY - STEPS),
        ("paged_kv/max_serve/graph.py", {"served"}),
        ("paged_kv/engine/tokenizer.py", set()),
        ("paged_kv/runtime/session.py", set()),
        ("paged_kv/calls/plan.py", set()),
        ("mojo_ops/README.md", set()),
    ],
)
def test_a_change_of_a_file_changes_the_keys_of_what_is_made_of_it(changed, file, found):
    assert changed(edit(file)) == found


LIBRARIES = [
    *(Kernel(kind, dtypes).library for kind in ("attention", "latent") for dtypes in [("float32",) * 3]),
    *(Kernel(kind, ("float32",)).library for kind in ("program", "delta_rule", "gated_norm", "merge")),
    Kernel("quantised_linear", ("float32",), 1).library,
]


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_a_librarys_key_has_every_file_that_its_program_imports(library):
    imports_of = ci_module("check_mojo_imports").imports_of
    named = re.findall(r"^from mojo_ops\.([\w.]+)", program_of([library]), flags=re.MULTILINE)
    waiting, reached = [tuple(each.split(".")) for each in named], set()
    while waiting:
        module = waiting.pop()
        file = ops.kernels().joinpath(*module).with_suffix(".mojo")
        if module not in reached and file.is_file():
            reached.add(module)
            waiting += [target for _, target in imports_of(file)]
    files = [PurePosixPath("mojo_ops", *module).with_suffix(".mojo") for module in reached]
    assert len(files) > 5
    assert [file for file in files if not library.key().has(file)] == []
    assert not library.key().has(PurePosixPath("mojo_ops/attention/gpu/latent.mojo"))


def test_a_name_and_where_a_text_is_cut_count(changed):
    def rename(tree):
        shutil.move(tree / "mojo_ops/isa/convert.mojo", tree / "mojo_ops/isa/converts.mojo")

    def move(tree):
        first, second = sorted((tree / "mojo_ops/isa").glob("[!_]*.mojo"))[:2]
        text = first.read_text()
        first.write_text(text[:-10])
        second.write_text(text[-10:] + second.read_text())

    assert changed(rename) == EVERY
    assert changed(move) == EVERY


def test_no_list_of_parts_reads_as_another():
    lists = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [b"1\nab", b"c"]]
    assert len({compile_key.hash_of(parts) for parts in lists}) == len(lists)


def test_a_pattern_without_files_is_refused(tree):
    """A name that is wrong, or an installation that lacks files."""
    sources = Sources({"": tree / "paged_kv", "graphs": tree / "graphs", "mojo_ops": tree / "mojo_ops"})
    with pytest.raises(ToolchainError, match=r"serve/nothing\.py is missing; reinstall paged-kv"):
        CompileKey("", ("serve/nothing.py",)).digest(sources, "")


CLOSURE = """
import sys
import grimp
graph = grimp.build_graph("paged_kv", cache_dir=None)
for name in sys.argv[1:]:
    print(*sorted({name} | graph.find_upstream_modules(name)))
"""


def test_the_keys_have_every_module_that_builds_a_graph(tmp_path):
    """By Python's imports: a module that one of them begins to use has to be in the key."""
    ci_module("packages").lay_out(tmp_path)
    of_builders = {
        "paged_kv.runtime.variants": KEYS["cpu api"],
        "paged_kv.graphs.ops": CompileKey("an op"),
        "paged_kv.graphs.models.decoder": KEYS["cpu step"],
        "paged_kv.max_serve.graph": SERVED,
    }
    command = [sys.executable, "-c", CLOSURE, *of_builders]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    # These put nothing into a graph: names, checks of arguments, exceptions, opened files, and the key itself.
    of_none = {
        f"paged_kv{name}"
        for name in ("", ".arguments", ".errors", ".files", ".runtime.compile_key", ".runtime.cpu_target")
    }
    for key, line in zip(of_builders.values(), done.stdout.splitlines(), strict=True):
        named = [
            file for pattern in (*compile_key.PYTHON, *key.built_by) for file, _ in Sources.installed().files(pattern)
        ]
        modules = {
            f"paged_kv.{file.with_suffix('').as_posix().replace('/', '.')}".removesuffix(".__init__") for file in named
        }
        found = {name for name in line.split() if not name.endswith(".runtime")} - of_none
        assert found <= modules, sorted(found - modules)


def test_facts_device_and_toolchain_count():
    sources = Sources.installed()
    key = CompileKey("float32")
    others = [CompileKey("float16"), *(CompileKey("float32", (), f"cuda {gpu}") for gpu in ("sm_90a 0", "sm_90a 1"))]
    found = [each.digest(sources, "toolchain") for each in (key, *others)] + [key.digest(sources, "another")]
    assert len(set(found)) == len(found)
    assert all(len(digest) == 32 and set(digest) <= set("0123456789abcdef") for digest in found)
    assert key.digest(sources, "toolchain") == found[0]


def test_the_target_stands_for_the_cpu(monkeypatch):
    """Two CPUs that compile for one target share their artefacts."""
    monkeypatch.setattr(compile_key, "get_virtual_cpu_target", lambda: "znver4")
    told = []
    for flags in ("avx2", "avx2 fma"):
        cpu = CpuInfo("x86_64", "a CPU", frozenset(flags.split()))
        monkeypatch.setattr(CpuInfo, "read", classmethod(lambda _, cpu=cpu: cpu))
        told.append(toolchain())
    assert told[0] == told[1] == toolchain("znver4")
    monkeypatch.setattr(compile_key, "get_virtual_cpu_target", lambda: "znver5")
    assert toolchain() != told[0]


def test_a_choice_of_maxs_own_is_as_good_as_its_cpu(monkeypatch):
    monkeypatch.setattr(compile_key, "get_virtual_cpu_target", lambda: "")
    told = set()
    for machine, model, flags in [("aarch64", "", "asimd"), ("aarch64", "", "asimd sve"), ("x86_64", "Atom", "asimd")]:
        cpu = CpuInfo(machine, model, frozenset(flags.split()))
        monkeypatch.setattr(CpuInfo, "read", classmethod(lambda _, cpu=cpu: cpu))
        told.add(toolchain())
    assert len(told) == 3


@pytest.mark.parametrize(("package", "version"), [("max", "1.0"), ("mojo", "2.0")])
def test_the_compilers_versions_count(monkeypatch, package, version):
    before = toolchain()
    installed = compile_key.version
    monkeypatch.setattr(compile_key, "version", lambda name: version if name == package else installed(name))
    assert toolchain() != before
