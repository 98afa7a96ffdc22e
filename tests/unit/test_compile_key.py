"""What a compiled graph's key depends on: sources are changed in a copy of the package, and nothing is compiled."""

import shutil
from pathlib import Path

import pytest

from paged_kv.graphs import ops, trees
from paged_kv.graphs.models import decoder
from paged_kv.runtime import compile_key, variants
from paged_kv.runtime.compile_key import CompileKey, Sources, toolchain
from paged_kv.runtime.cpu_target import CpuInfo

GPU = "cuda sm_90a 0"


def keys(device):
    """A graph of each kind: the variants of the array API, one linear layer, and a model's step."""
    found = {
        op: CompileKey(op, variants.__name__, (registered,), device) for op, registered in variants.REGISTERED.items()
    }
    if not device:
        found["linear"] = CompileKey("linear", ops.__name__, (ops.LINEAR,))
        found["experts"] = CompileKey("experts", ops.__name__, (ops.EXPERT_LINEAR,))
    return found | {"step": CompileKey("step", decoder.__name__, device=device)}


KEYS = {f"cpu {name}": key for name, key in keys("").items()} | {f"gpu {name}": key for name, key in keys(GPU).items()}
CPU = {name for name in KEYS if name.startswith("cpu")}
CPU_ATTENTION = {"cpu attention", "cpu masked_attention", "cpu mla_attention", "cpu step"}


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources: python/, graphs/ and mojo/."""
    installed = Sources.installed()
    shutil.copytree(installed.mojo_root, tmp_path / "mojo")
    shutil.copytree(installed.packages["paged_kv"], tmp_path / "python")
    shutil.copytree(installed.packages["paged_kv.graphs"], tmp_path / "graphs")
    return tmp_path


def digests(tree: Path):
    sources = Sources(tree / "mojo", {"paged_kv": tree / "python", "paged_kv.graphs": tree / "graphs"})
    return {name: key.digest(sources, "toolchain") for name, key in KEYS.items()}


@pytest.fixture
def changed(tree):
    """Says which keys differ after a change of the tree."""
    before = digests(tree)
    assert len(set(before.values())) == len(before)

    def changed(change):
        change(tree)
        after = digests(tree)
        return {name for name in KEYS if before[name] != after[name]}

    return changed


def edit(file):
    def change(tree):
        with (tree / file).open("a") as opened:
            opened.write("\n# another line\n")

    return change


def test_a_copy_has_the_keys_of_the_original(tree):
    sources = Sources.installed()
    assert digests(tree) == {name: key.digest(sources, "toolchain") for name, key in KEYS.items()}


def test_a_gpus_kernel_changes_no_key_of_the_cpu(changed):
    assert changed(edit("mojo/attention/gpu/generic.mojo")) == {
        "gpu attention",
        "gpu masked_attention",
        "gpu mla_attention",
        "gpu step",
    }


def test_a_file_three_folders_deep_counts(changed):
    assert changed(edit("mojo/attention/gpu/hopper/consumer.mojo")) == {"gpu attention", "gpu step"}


def test_a_gpus_copy_of_rows_changes_no_key_of_the_cpu(changed):
    assert changed(edit("mojo/transfer/gpu/rows.mojo")) == {"gpu append", "gpu gather", "gpu step"}


@pytest.mark.parametrize("file", ["dispatch", "vectors/segment", "amx/prefill"])
def test_the_cpus_attention_changes_its_own_graphs(changed, file):
    assert changed(edit(f"mojo/attention/cpu/{file}.mojo")) == CPU_ATTENTION


def test_the_linear_layer_changes_its_own_graphs(changed):
    assert changed(edit("mojo/linear/amx/blocks.mojo")) == {"cpu linear", "cpu experts", "cpu step"}


def test_what_every_op_over_pages_uses_changes_them_all(changed):
    found = changed(edit("mojo/cache/page_table.mojo"))
    assert found >= {name for name in KEYS if name.split()[1] in ("append", "gather", "attention", "step")}


@pytest.mark.parametrize("file", ["ops.mojo", "linear_ops.mojo"])
def test_the_registered_ops_are_in_every_key(changed, file):
    assert changed(edit(f"mojo/{file}")) == set(KEYS)


def test_the_options_are_in_the_keys_of_what_is_built_with_them(changed):
    assert changed(edit("python/options.py")) == set(KEYS)


@pytest.mark.parametrize("file", ["graphs/ops.py", "graphs/checks.py", "graphs/paged_cache.py"])
def test_a_change_of_the_ops_wrappers_changes_every_key(changed, file):
    assert changed(edit(file)) == set(KEYS)


@pytest.mark.parametrize("file", ["models/decoder.py", "models/config.py", "layers.py", "rope.py", "inputs.py"])
def test_a_change_of_the_step_changes_steps_alone(changed, file):
    assert changed(edit(f"graphs/{file}")) == {"cpu step", "gpu step"}


def test_a_change_of_the_variants_changes_no_step(changed):
    found = changed(edit("python/runtime/variants.py"))
    assert found == {name for name in KEYS if name.split()[1] in variants.REGISTERED}


@pytest.mark.parametrize(
    "file",
    [
        "python/engine/tokenizer.py",
        "python/checkpoint/weights.py",
        "python/engine/model.py",
        "python/runtime/session.py",
        "python/calls/plan.py",
        "python/errors.py",
        "python/__init__.py",
        "mojo/README.md",
    ],
)
def test_what_is_in_no_graph_changes_no_key(changed, file):
    assert changed(edit(file)) == set()


@pytest.mark.parametrize(
    ("room", "found"),
    [
        ("attention/gpu/hopper", {"gpu attention", "gpu step"}),
        ("attention/cpu/vectors", CPU_ATTENTION),
    ],
)
def test_a_new_file_changes_its_room(changed, room, found):
    assert changed(lambda tree: (tree / "mojo" / room / "new.mojo").write_text("")) == found


def test_a_name_counts(changed):
    def rename(tree):
        room = tree / "mojo/attention/cpu/vectors"
        (room / "new.mojo").write_text("")
        first = digests(tree)
        (room / "new.mojo").rename(room / "newer.mojo")
        assert {name for name in KEYS if first[name] != digests(tree)[name]} == CPU_ATTENTION

    assert changed(rename) == CPU_ATTENTION


def test_text_that_moves_between_files_counts(changed):
    """The same bytes in the same order, cut elsewhere."""

    def move(tree):
        room = tree / "mojo/attention/cpu/vectors"
        first, second = sorted(room.glob("[!_]*.mojo"))[:2]
        text = first.read_text()
        first.write_text(text[:-10])
        second.write_text(text[-10:] + second.read_text())

    assert changed(move) == CPU_ATTENTION


def test_a_new_import_brings_its_room(changed):
    """The room that an op begins to use counts from then on."""

    def use(tree):
        file = tree / "mojo/transfer/append.mojo"
        file.write_text("from ..linear.dispatch import (\n    linear,  # (for a test)\n)\n" + file.read_text())
        first = digests(tree)
        edit("mojo/linear/amx/blocks.mojo")(tree)
        second = digests(tree)
        assert first["cpu append"] != second["cpu append"]
        assert first["cpu merge"] == second["cpu merge"]

    changed(use)


@pytest.mark.parametrize(
    "statement",
    [
        "from paged_kv.engine import tokenizer",
        "from paged_kv.engine.tokenizer import (\n    StreamDecoder,  # (a comment)\n    Tokenizer as T,\n)",
        "import numpy, paged_kv.engine.tokenizer as t",
        "from ..engine.tokenizer import Tokenizer",
        "def late():\n    from paged_kv.engine.tokenizer import Tokenizer",
    ],
)
def test_a_new_import_brings_its_module(tree, statement):
    file = tree / "python/runtime/variants.py"
    file.write_text(f"{file.read_text()}\n{statement}\n")
    first = digests(tree)
    edit("python/engine/tokenizer.py")(tree)
    assert first["cpu merge"] != digests(tree)["cpu merge"]


@pytest.mark.parametrize("statement", ["from .nowhere import x", "from ....above import x"])
def test_an_import_that_leads_nowhere_makes_every_room_count(changed, statement):
    def use(tree):
        file = tree / "mojo/transfer/append.mojo"
        file.write_text(f"{statement}\n{file.read_text()}")
        first = digests(tree)
        edit("mojo/attention/gpu/hopper/kernel.mojo")(tree)
        assert {name for name in CPU if first[name] != digests(tree)[name]} == {"cpu append", "cpu step"}

    changed(use)


def test_every_room_is_in_some_key():
    """A form of import that is not understood would show here."""
    sources = Sources.installed()
    reached = sources.rooms("cpu", None) | sources.rooms("gpu", None)
    assert reached == {file.parent for file in sources.mojo_root.rglob("*.mojo")}


def test_every_registered_op_has_a_text_of_its_own():
    blocks = {}
    for file in Sources.installed().mojo_root.glob("*.mojo"):
        shared, of_file = compile_key._split(file.read_text())
        assert "def " not in shared
        blocks |= of_file
    registered = {*variants.REGISTERED.values(), ops.COPY_PAGES, ops.RAGGED_ROWS, ops.LINEAR, ops.EXPERT_LINEAR}
    registered |= {trees.TREE_ROWS, trees.MOVE_TOKENS}
    registered |= {ops.TAKE_ROWS, ops.RMS_NORM, ops.ROTATE, ops.ROTARY_TABLES, ops.ADD_SCALED, ops.GATE_UNITS}
    registered |= {ops.WIDEN, ops.STEP_ROWS}
    assert set(blocks) == registered
    assert all(text.count("def execute") == 1 for text in blocks.values())


def test_code_beside_the_ops_counts_for_each_of_them():
    """A function between two ops may be called by either."""
    text = """from .a import one
from .b import two
@extensibility.register("first")
struct First[
    dtype: DType
]:
    def execute(): helper()
def helper(): one()
@extensibility.register("second")
struct Second:
    def execute(): two()
"""
    shared, blocks = compile_key._split(text)
    assert "one" in shared
    assert "two" not in shared
    assert "helper" in blocks["first"]
    assert "two" in blocks["second"]


def test_facts_device_and_toolchain_count():
    sources = Sources.installed()
    key = CompileKey("float32", variants.__name__, (ops.ATTENTION,))
    others = [
        CompileKey("float16", variants.__name__, (ops.ATTENTION,)),
        CompileKey("float32", variants.__name__, (ops.ATTENTION,), GPU),
        CompileKey("float32", variants.__name__, (ops.ATTENTION,), "cuda sm_90a 1"),
        CompileKey("float32", variants.__name__, (ops.ATTENTION,), "cuda sm_100a 0"),
    ]
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
    assert told[0] == told[1]
    assert "znver4" in told[0]
    monkeypatch.setattr(compile_key, "get_virtual_cpu_target", lambda: "znver5")
    assert toolchain() != told[0]


def test_a_choice_of_maxs_own_is_as_good_as_its_cpu(monkeypatch):
    monkeypatch.setattr(compile_key, "get_virtual_cpu_target", lambda: "")
    told = set()
    for machine, model, flags in [("aarch64", "", "asimd"), ("aarch64", "", "asimd sve"), ("x86_64", "Atom", "sse2")]:
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
