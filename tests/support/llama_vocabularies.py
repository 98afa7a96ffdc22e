"""Compares tokenizers of GGUF vocabularies with llama.cpp: `python -m support.llama_vocabularies FOLDER` in tests.

FOLDER has llama.cpp's vocabularies, its `models/ggml-vocab-*.gguf` and the texts beside them. Each is compared on these
texts and on generated ones, and its tokens that end a text; then each rule of `tokenizer.ggml.pre`, written into the
vocabulary of qwen2. It needs llama-cpp-py-sync, whose library loads vocabularies alone.
"""

import struct
import sys
import tempfile
import unicodedata
from pathlib import Path

from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

from paged_kv.checkpoint.end_tokens import end_tokens
from paged_kv.checkpoint.gguf_header import read_header
from paged_kv.checkpoint.gguf_splits import SPLITS
from paged_kv.checkpoint.gguf_tokenizer import end_texts, make_tokenizer
from paged_kv.errors import CheckpointError
from support.llama_splits import LLAMA_SPLITS
from support.odd_strings import odd_strings

FFI, LIBRARY = get_ffi(), get_lib()
MARK = "\n__ggml_vocab_test__\n"
GENERATED = odd_strings(700, seed=41)[-600:]


@FFI.callback("void(enum ggml_log_level, const char *, void *)")
def silent(*_):
    pass


class LlamaVocabulary:
    """The vocabulary of a file, as llama.cpp reads it."""

    def __init__(self, file):
        options = LIBRARY.llama_model_default_params()
        options.vocab_only = True
        self._model = LIBRARY.llama_model_load_from_file(str(file).encode(), options)
        assert self._model != FFI.NULL, file
        self._vocabulary = LIBRARY.llama_model_get_vocab(self._model)

    def close(self):
        LIBRARY.llama_model_free(self._model)

    def encode(self, text):
        data = text.encode()
        tokens = FFI.new("llama_token[]", 2 * len(data) + 8)
        count = LIBRARY.llama_tokenize(self._vocabulary, data, len(data), tokens, len(tokens), False, True)
        assert count >= 0
        return list(tokens[0:count])

    def ends(self):
        count = LIBRARY.llama_vocab_n_tokens(self._vocabulary)
        return {token for token in range(count) if LIBRARY.llama_vocab_is_eog(self._vocabulary, token)}


def compare(file, name):
    """Prints how many texts give other tokens, and the first of them."""
    try:
        header = read_header(file)
        ours = make_tokenizer(header)
    except CheckpointError as error:
        print(f"{name}: refused: {str(error).partition(': ')[2]}")
        return
    given = list(given_texts(file))
    wrong = sum(ours.encode(text, add_special_tokens=False).ids != tokens for text, tokens in given)
    theirs = LlamaVocabulary(file)
    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    composed = header.metadata["tokenizer.ggml.model"] == "gpt2" and SPLITS[pre].composed
    other = []
    for text in filter(None, GENERATED):
        # llama.cpp composes no characters, as Qwen's own tokenizer does.
        expected = theirs.encode(unicodedata.normalize("NFC", text) if composed else text)
        if ours.encode(text, add_special_tokens=False).ids != expected:
            other.append(text)
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    named = [header.metadata[key] for key in keys if key in header.metadata]
    same_ends = set(end_tokens(end_texts(header), named)) == theirs.ends()
    theirs.close()
    first = f", first {ascii(other[0])[:200]}" if other else ""
    print(
        f"{name}: its texts: {wrong} of {len(given)} differ; generated: {len(other)} of {len(GENERATED)} differ{first};"
        f" ends: {'the same' if same_ends else 'others'}",
        flush=True,
    )


def given_texts(file):
    """The texts beside a vocabulary, and their tokens."""
    texts, tokens = (Path(f"{file}{suffix}") for suffix in (".inp", ".out"))
    if texts.exists():
        lines = tokens.read_text().splitlines()
        for text, line in zip(texts.read_bytes().decode().split(MARK), lines, strict=False):
            yield text, [int(token) for token in line.split()]


def renamed(file, name, made):
    """A copy of a vocabulary with another `tokenizer.ggml.pre`. It has no tensors, which would be moved."""
    data, key = file.read_bytes(), b"tokenizer.ggml.pre"
    value = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4  # behind the number of its type
    (length,) = struct.unpack_from("<Q", data, value)
    made.write_bytes(data[:value] + struct.pack("<Q", len(name)) + name.encode() + data[value + 8 + length :])
    return made


def main(folder):
    LIBRARY.llama_log_set(silent, FFI.NULL)
    LIBRARY.llama_backend_init()
    for file in sorted(folder.glob("ggml-vocab-*.gguf")):
        compare(file, file.stem.removeprefix("ggml-vocab-"))
    with tempfile.TemporaryDirectory() as made:
        for names in LLAMA_SPLITS:
            for name in {SPLITS[name]: name for name in names.split()}.values():
                compare(renamed(folder / "ggml-vocab-qwen2.gguf", name, Path(made) / "named.gguf"), f"pre {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
