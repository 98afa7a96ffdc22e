"""Libraries of kernels: which kernel lies where; on disk, with a compiler that writes a line and a loader of lines."""

import inspect
import re
import stat
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_kv.arrays.dtypes import CACHE_DTYPES, DTYPES
from paged_kv.call_layouts import CALLS
from paged_kv.calls.latent import LatentPlan
from paged_kv.calls.plan import AttentionPlan
from paged_kv.errors import ContractError, ContractTypeError, ToolchainError
from paged_kv.options import Q_DTYPES, AttentionOptions
from paged_kv.runtime import libraries as module
from paged_kv.runtime.host_calls import variant_kernel
from paged_kv.runtime.libraries import Kernel, api_libraries, kernel_named
from support.permissions import permissions_count

check_layouts = module._check_layouts


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_FUNCTIONS", {})
    monkeypatch.setattr(module, "_paths", inspect.unwrap(module._paths))  # as it is where no tests run
    load = module.ctypes.CDLL
    monkeypatch.setattr(module.ctypes, "CDLL", lambda path, **_: Path(path).read_text() if path else load(path))
    monkeypatch.setattr(module, "_check_layouts", lambda *_: None)
    monkeypatch.setattr(module, "_function", lambda library, name: f"{name} of {library}")
    monkeypatch.setattr(module, "kernel_library", lambda sources: tmp_path / "packed" / sources.name)
    monkeypatch.setattr(module._STATE, "has_built", False)
    return tmp_path / "cache" / "paged-kv" / "libraries"


@pytest.fixture
def compiler(monkeypatch):
    """The arguments that it was given, and how it ends."""
    seen = SimpleNamespace(given=[], programs=[], errors="")

    def build(arguments, *_, **__):
        seen.given.append(arguments)
        if not seen.errors:
            program = Path(arguments[-3]).read_text()
            Path(arguments[-1]).write_text(" ".join(exports(program)))
            seen.programs.append(program)
        return SimpleNamespace(returncode=int(bool(seen.errors)), stderr=seen.errors)

    def link(command, **_):
        source, target = command[command.index("-shared") + 2], command[command.index("-o") + 1]
        Path(target).write_text(Path(source).read_text())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(module, "_run_mojo", build)
    monkeypatch.setattr(module.subprocess, "run", link)
    return seen


def exports(program):
    return re.findall(r'@export\("paged_kv_(?!layouts)(\w+)"', program)


def attend():
    return module.kernel("attention", "bfloat16", "int8", "bfloat16")


def again(monkeypatch):
    """Return what another process gets."""
    monkeypatch.setattr(module, "_FUNCTIONS", {})
    return attend()


def test_every_kernel_of_the_api_comes_along_but_for_other_outputs():
    """All that `plan` may ask for lies in a library that wheels bring, where o has the dtype of the op's q."""
    shipped = {library.kernel(kind) for library in api_libraries() for kind in library.kinds}
    queries = [DTYPES[name] for name in Q_DTYPES]
    asked = set()
    for q, kv in product(queries, CACHE_DTYPES.values()):
        try:
            plan = AttentionPlan(8, 2, 64, 16, q, kv, "NONE", AttentionOptions())
        except ContractTypeError:
            continue
        asked |= {variant_kernel(plan.variant(op)) for op in ("attention", "masked_attention")}
    for q, kv in product(queries, DTYPES.values()):
        try:
            asked.add(variant_kernel(LatentPlan(8, 64, 0, 16, 0.1, q, kv).variant()))
        except ContractTypeError:
            continue
    assert asked <= shipped
    assert len({library.file for library in api_libraries()}) == len(api_libraries())


def test_a_name_tells_the_kernel():
    libraries = [*api_libraries(), Kernel("quantised_linear", ("float32",), 5).library]
    for library in libraries:
        for kind in library.kinds:
            wanted = library.kernel(kind)
            assert kernel_named(wanted.name) == wanted
            assert wanted.library == library
    with pytest.raises(ContractError, match="name: expected a kernel of this package"):
        kernel_named("paged_kv_other_float32")


def test_kernels_of_a_cache_are_built_together_and_once(compiler, folder, monkeypatch):
    found = attend()
    assert again(monkeypatch) == found
    assert module.kernel("append", "bfloat16", "int8").endswith(found.partition(" of ")[2])
    assert len(compiler.given) == 1
    kernels = ["attention_bfloat16_int8_bfloat16", "append_bfloat16_int8", "gather_bfloat16_int8"]
    assert exports(compiler.programs[0]) == ["team_start", "team_run", *kernels]
    assert "linear" in module.kernel("linear", "float32", "float32")
    assert len(compiler.given) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / "loaded").stat().st_mode) == 0o700


def test_the_first_library_of_a_process_does_not_wait_for_the_package(compiler, tmp_path):
    def includes():
        return Path(compiler.given[-1][compiler.given[-1].index("-I") + 1])

    attend()
    assert (includes() / "mojo_ops" / "attention").is_dir()
    module.kernel("merge", "float32")
    assert includes() == tmp_path / "packed"


def test_a_kernel_of_other_sources_is_built_from_them_and_not_kept(compiler, folder, tmp_path):
    found = attend()
    other = module.kernel("attention", "bfloat16", "int8", "bfloat16", sources=tmp_path / "changed")
    assert f"-I {tmp_path / 'packed'}" in " ".join(compiler.given[-1])
    assert len(compiler.given) == 2
    assert "bfloat16" in other
    assert attend() == found
    assert len([*folder.glob("*.library")]) == 1


def test_a_file_that_is_damaged_or_not_the_users_own_is_not_loaded(compiler, folder, monkeypatch):
    found = attend()
    (loaded,) = (folder / "loaded").glob("*.so")
    loaded.write_text("damaged")
    assert again(monkeypatch) == found
    loaded.unlink()
    loaded.symlink_to(__file__)
    assert again(monkeypatch) == found
    assert not loaded.is_symlink()
    loaded.chmod(0o666)
    assert again(monkeypatch) == found
    assert stat.S_IMODE(loaded.stat().st_mode) == 0o600
    (kept,) = folder.glob("*.library")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert again(monkeypatch) == found
    assert len(compiler.given) == 2
    (folder / "loaded").chmod(0o777)
    with pytest.raises(ToolchainError, match="no other user can write to"):
        again(monkeypatch)


@pytest.mark.usefixtures("compiler")
def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    found = attend()
    with permissions_count():
        for path in (folder / "loaded", folder):
            path.chmod(0o500)
        assert again(monkeypatch) == found
        with pytest.warns(RuntimeWarning, match="Permission denied.*each start builds them"):
            assert "linear_float32_float32" in module.kernel("linear", "float32", "float32")


def test_a_build_that_loses_a_file_is_tried_again(compiler, folder, monkeypatch):
    build, left = module._run_mojo, iter([False, True])

    def lose(arguments, *rest, **options):
        done = build(arguments, *rest, **options)
        if not next(left, False):
            Path(arguments[-3]).unlink()  # the source, which is removed after the build
        return done

    monkeypatch.setattr(module, "_run_mojo", lose)
    attend()
    assert len(compiler.given) == 2
    assert list(folder.glob("*.library"))
    with (
        pytest.warns(RuntimeWarning, match=r"not kept \(.*No such file or directory: .*\.mojo\)"),
        pytest.raises(FileNotFoundError),  # lost for the third time
    ):
        module.kernel("linear", "float32", "float32")


def test_sources_that_do_not_compile_are_an_error_each_time(compiler):
    compiler.errors = "library.mojo:12:1: error: no such name"
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"does not compile: library.mojo:12:1: error: no such name"):
            attend()


def test_a_source_that_is_edited_meanwhile_is_an_error(compiler, monkeypatch):
    monkeypatch.setattr(
        module, "digests_of", lambda keys, *_: dict.fromkeys(keys, ("b" if compiler.given else "a") * 32)
    )
    with pytest.raises(ToolchainError, match="edited while it was compiled"):
        attend()


def test_what_a_kernel_says_is_raised(monkeypatch):
    buffer = module.ctypes.create_string_buffer(b"row_lengths: row 0 has length -3")
    freed = []
    monkeypatch.setattr(module, "_FREE", freed.append)
    assert module.text_at(module.ctypes.addressof(buffer)) == "row_lengths: row 0 has length -3"
    assert freed == [module.ctypes.addressof(buffer)]


def test_a_library_whose_kernels_take_other_operands_is_refused(monkeypatch):
    """Its fields in another order, or without one of them."""
    monkeypatch.setattr(module, "_FREE", lambda _: None)
    merge = Kernel("merge", ("float32",)).library

    def library(text):
        buffer = module.ctypes.create_string_buffer(f"\nappend ()\nmerge {text}".encode())
        return {
            "paged_kv_layouts": module.ctypes.CFUNCTYPE(module.ctypes.c_void_p)(lambda: module.ctypes.addressof(buffer))
        }

    check_layouts(library(CALLS["merge"].text), merge)
    for wrong in ("s v", "s", "v s more"):
        with pytest.raises(ToolchainError, match=rf"merge: .* takes \(merged_v merged_s v s .*, got \(.* {wrong} num"):
            check_layouts(library(CALLS["merge"].text.replace("v s", wrong)), merge)


def test_what_is_missing_is_built_together(compiler, folder, monkeypatch):
    """Also two dtypes of one kernel; a file serves each of its libraries, and they are loaded from one file."""
    merge = [Kernel("merge", (dtype,)) for dtype in ("float32", "bfloat16", "float16")]
    module.load(merge[:1])
    module.load([*merge, merge[1]])
    assert [exports(program)[2:] for program in compiler.programs] == [
        ["merge_float32"],
        ["merge_bfloat16", "merge_float16"],
    ]
    assert len([*(folder / "loaded").glob("*.so")]) == 2
    monkeypatch.setattr(module, "_FUNCTIONS", {})
    module.load(merge[2:])
    assert len(compiler.given) == len([*(folder / "loaded").glob("*.so")]) == 2


@pytest.mark.usefixtures("compiler")
def test_what_is_loaded_is_not_looked_for_again(monkeypatch):
    attend()
    monkeypatch.setattr(module, "_there", None)
    module.load([Kernel("attention", ("bfloat16", "int8", "bfloat16"))])


@pytest.mark.usefixtures("compiler")
def test_a_new_process_looks_for_the_files_of_its_target(monkeypatch):
    """MAX knows none before `apply_cpu_target`."""
    applied = []
    find = module.digests_of

    def digests_of(*given):
        assert applied
        return find(*given)

    monkeypatch.setattr(module, "apply_cpu_target", lambda: applied.append("haswell"))
    monkeypatch.setattr(module, "digests_of", digests_of)
    attend()
