"""Paths that the system refuses, and what lies under a file's name and is no file: a typed error of one line."""

import json
import os

import pytest

from paged_kv.checkpoint.config import load_config
from paged_kv.checkpoint.gguf import open_gguf
from paged_kv.checkpoint.source import open_source
from paged_kv.checkpoint.weights import open_checkpoint
from paged_kv.engine.demo import write_demo_checkpoint
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import ContractTypeError
from support.checkpoints import write_config
from support.refusals import refused


def tokenizer(folder):
    return Tokenizer(folder, load_config(folder))


PATHS = {
    "too long": "a" * 5000,
    "long name": "a" * 300,
    "NUL": "a\0b",
    "NUL in a folder": "a\0/b.gguf",
    "circle": "circle",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("ending", ["", ".gguf"])
def test_paths_that_the_system_refuses(tmp_path, path, ending):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "circle.gguf").symlink_to("circle.gguf")
    for call in (open_source, open_gguf, load_config, tokenizer):
        refused(call, tmp_path / (path + ending), match="cannot be read")


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        *(
            (call, "nowhere", "nowhere: no such folder$")
            for call in (open_source, open_checkpoint, load_config, tokenizer)
        ),
        *((call, "file", "file: not a folder$") for call in (open_checkpoint, load_config)),
        (open_source, "nowhere.gguf", r"nowhere\.gguf: cannot be read"),
        (load_config, "empty", r"config\.json: no such file"),
        (open_checkpoint, "empty", r"empty: neither model\.safetensors nor model\.safetensors\.index\.json"),
        (tokenizer, "config", r"tokenizer\.json: no such file"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, call, name, said):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    write_config(tmp_path / "config")
    refused(call, tmp_path / name, match=said)


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"]])
def test_what_is_no_path(path):
    for call in (open_source, open_gguf, load_config):
        with pytest.raises(ContractTypeError, match="path: expected a string"):
            call(path)


def test_shard_names_that_the_system_refuses(tmp_path):
    write_config(tmp_path)
    for name in ("a" * 300, "a\0b", "", "..", "a\nb"):
        index = {"weight_map": {"model.norm.weight": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(open_source, tmp_path, match="shard .* is missing")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "model.gguf"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_opened(tmp_path, name, kind):
    """Opening a pipe would wait for its writer; a device has no end."""
    folder = write_demo_checkpoint(tmp_path / "model")
    file = folder / name
    file.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](file)
    refused(lambda: (tokenizer(folder), open_source(file if name == "model.gguf" else folder)))
