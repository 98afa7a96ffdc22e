"""GGUF models in several files, as the `gguf` package splits them: the same as in one, and every part that is wrong."""

import os
import shutil
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from max.dtype import DType

from paged_kv.checkpoint.gguf import open_gguf
from paged_kv.checkpoint.source import open_source
from support.gguf_files import finish, make_model, write_gguf
from support.refusals import refused

MEMORY = 16 << 20
"""Bytes that a refusal may take at most; the model's own tensors have more."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One file, and the folder with the same model in parts of 8 tensors."""
    folder = tmp_path_factory.mktemp("parts")
    model = make_model("llama")
    whole = write_gguf(folder / "whole.gguf", model, lambda _: "Q4_0")
    (folder / "parts").mkdir()
    write_gguf(folder / "parts" / "tiny.gguf", model, lambda _: "Q4_0", part_tensors=8)
    return whole, folder / "parts"


@pytest.fixture
def parts(written, tmp_path):
    """The parts in order, which a test may damage."""
    shutil.copytree(written[1], tmp_path / "model")
    return sorted((tmp_path / "model").iterdir())


def test_all_parts_are_read_whichever_is_named(written):
    whole, folder = written
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"tiny-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    expected = open_source(whole)
    weights = expected.load(DType.float32)
    for named in (folder, *files):
        found = open_source(named)
        assert (found.folder, found.config) == (folder, expected.config)
        assert found.checkpoint.header.parts == tuple(files)
        loaded = found.load(DType.float32)
        assert list(loaded) == list(weights)
        for name, array in loaded.items():
            np.testing.assert_array_equal(array, weights[name], err_msg=name)


def test_two_models_in_a_folder(parts):
    shutil.copy(parts[0], parts[0].with_name("other-00001-of-00003.gguf"))
    refused(
        open_source, parts[0].parent, match=r"2 GGUF files: name one of other-00001-of-00003\.gguf, tiny-00001-of-00003"
    )


def renumber(file, **values):
    """Other values of `split.no`, `split.count` (uint16) and `split.tensors.count` (int32), in place."""
    data = bytearray(file.read_bytes())
    for key, value in values.items():
        name = {"no": b"split.no", "count": b"split.count", "tensors": b"split.tensors.count"}[key]
        at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
        data[at : at + (4 if key == "tensors" else 2)] = struct.pack("<i" if key == "tensors" else "<H", value)
    file.write_bytes(data)


def rename_tensor(file, old, new):
    assert len(old) == len(new)
    file.write_bytes(file.read_bytes().replace(old.encode(), new.encode(), 1))


def swap(one, other):
    content = one.read_bytes()
    shutil.copy(other, one)
    other.write_bytes(content)


def of_another_model(file):
    """The same part of a model that says more of itself."""
    tensors = open_gguf(file).header.tensors
    writer = gguf.GGUFWriter(file, "qwen2")
    for key, value in (("no", 1), ("count", 3)):
        writer.add_uint16(f"split.{key}", value)
    writer.add_int32("split.tensors.count", len(tensors))
    finish(writer)


FAULTS = {
    # what is done, the part that is named, the words
    "missing": (lambda parts: parts[1].unlink(), 2, "cannot be read: .*No such file"),
    "first missing": (lambda parts: parts[0].unlink(), 1, "cannot be read"),
    "no file": (lambda parts: (parts[1].unlink(), os.mkfifo(parts[1])), 2, "cannot be read: .*not a regular file"),
    "cut": (lambda parts: os.truncate(parts[2], 2000), 3, "cut short"),
    "wrong order": (lambda parts: swap(*parts[1:]), 2, r"split\.no: expected 1, got 2"),
    "twice": (lambda parts: shutil.copy(parts[0], parts[1]), 2, r"split\.no: expected 1, got 0"),
    "tensors twice": (lambda parts: (shutil.copy(parts[1], parts[2]), renumber(parts[2], no=2)),
                      3, r"tensor blk\.\S+ is there, and in an earlier part"),
    "other count": (lambda parts: renumber(parts[1], count=4), 2, r"split\.count: expected 3, got 4"),
    "all counts": (lambda parts: [renumber(part, count=4) for part in parts],
                   r"\d", r"name: expected NAME-00001-of-00004\.gguf for a part of split\.count = 4$"),
    "no count": (lambda parts: renumber(parts[0], count=0),
                 1, r"split\.count: expected a number of parts or tensors, got 0$"),
    "one": (lambda parts: renumber(parts[0], count=1), 1, r"split\.tensors\.count: expected 8, got 21$"),
    "other tensors": (lambda parts: renumber(parts[2], tensors=20),
                      3, r"split\.tensors\.count: expected that of tiny-00001-of-00003\.gguf, got 20"),
    "lying tensors": (lambda parts: [renumber(part, tensors=22) for part in parts],
                      1, r"split\.tensors\.count: expected 21, got 22$"),
    "negative tensors": (lambda parts: [renumber(part, tensors=-1) for part in parts],
                         1, r"split\.tensors\.count: expected a number of parts or tensors, got -1$"),
    "other model": (lambda parts: of_another_model(parts[1]),
                    2, r"general\.architecture: expected that of .*, got 'qwen2': a part of another model"),
    "renamed": (lambda parts: parts[0].rename(parts[0].with_name("model.gguf")),
                None, r"name: expected .* for a part of split\.count = 3$"),
    "other name": (lambda parts: parts[1].rename(parts[1].with_name("other-00002-of-00003.gguf")), 2, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_parts_are_refused(parts, fault):
    damage, part, words = FAULTS[fault]
    message = rf"{'model' if part is None else f'tiny-0000{part}-of-00003'}\.gguf: {words}"
    damage(parts)
    first, *others = sorted(file for file in parts[0].parent.iterdir() if file.name != "other-00002-of-00003.gguf")
    tracemalloc.start()
    refused(open_gguf, first, match=message)
    assert tracemalloc.get_traced_memory()[1] < MEMORY
    tracemalloc.stop()
    for file in others:
        refused(open_gguf, file)
