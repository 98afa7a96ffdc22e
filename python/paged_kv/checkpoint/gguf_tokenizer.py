"""A tokenizer of the `tokenizers` library from the vocabulary of a GGUF file.

Three kinds are made. "gpt2" is byte-level BPE: the file has tokens and merges, and `tokenizer.ggml.pre` names the
regular expressions that split a text before; those are in `SPLITS`, and others are refused. "llama" is SentencePiece's
BPE: of all neighbours those are merged first whose token has the highest score, which is the same as merges in the
order of their scores; what is left over becomes byte tokens. "gemma4" is the same with merges that the file has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers.models import BPE

from paged_kv.arguments import printable, shown
from paged_kv.checkpoint.end_tokens import END_TEXTS, end_tokens
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.gguf_header import GgufHeader, Strings
from paged_kv.checkpoint.gguf_merges import merges_by_score
from paged_kv.checkpoint.gguf_splits import SPLITS
from paged_kv.errors import CheckpointError

Json = dict[str, Any]

_PREFIX = "tokenizer.ggml."
_KINDS = ("gpt2", "llama", "gemma4")
_LONGEST_TOKEN = 1 << 16
"""Bytes; real ones have some hundreds."""
# What `tokenizer.ggml.token_type` says of a token; 0 is a normal one.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
"""Tokens of a SentencePiece vocabulary where the file does not name them, as llama.cpp has it."""
# Bytes of control characters, of planes without characters, and of no UTF-8. Some vocabularies lack tokens for them;
# their models' own tokenizers leave them out of a text.
_RARE_BYTES = {*range(0x20), 0x7F, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)} - set(b"\t\n\r")


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte in the tokens of byte-level BPE: itself where it can be seen."""
    seen = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    unseen = (byte for byte in range(0x100) if byte not in seen)
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + place) for place, byte in enumerate(unseen)}


_CHARACTERS = frozenset(character for byte, character in _byte_characters().items() if byte not in _RARE_BYTES)


def has_vocabulary(header: GgufHeader) -> bool:
    """Return whether the file has tokens."""
    return f"{_PREFIX}tokens" in header.metadata


def default_ids(header: GgufHeader) -> dict[str, int]:
    """The tokens that begin and end a text by their keys, where the file does not name them: those that it has."""
    tokens = header.metadata.get(f"{_PREFIX}tokens")
    if header.metadata.get(f"{_PREFIX}model") != "llama" or not isinstance(tokens, Strings):
        return {}
    return {key: token for key, token in _LLAMA_IDS.items() if token < tokens.count}


def end_texts(header: GgufHeader) -> dict[str, int]:
    """The tokens of the file that may end a text by what they are called: their ids by their texts."""
    tokens = header.metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, Strings):
        return {}
    by_bytes = {text.encode(): text for text in END_TEXTS}
    return {by_bytes[raw]: index for index, raw in enumerate(tokens.all) if raw in by_bytes}


def make_tokenizer(header: GgufHeader) -> tokenizers.Tokenizer:
    """The tokenizer of the file's vocabulary.

    Raises:
        CheckpointError: the vocabulary is of a kind, or its text is split in a way, that is not known here; a token is
            there twice; a merge names no tokens; types or scores are not as many as tokens; an id is none of them. The
            message names the key.
    """
    with file_errors(f"{header.file}: its vocabulary makes no tokenizer"):
        return _Vocabulary(header).tokenizer()


class _Vocabulary:
    """The metadata `tokenizer.ggml.*`, checked as it is read."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.kind = self._value("model")
        if self.kind not in _KINDS:
            kinds = " or ".join(f'"{kind}"' for kind in _KINDS)
            raise self._error("model", self.kind, kinds)
        self.tokens = self._tokens()
        self.types = self._types()
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        self.ids.pop("", None)  # empty tokens stand for ids that nothing gives
        self.ends = frozenset(end_tokens(self.ids))

    def tokenizer(self) -> tokenizers.Tokenizer:
        steps, model = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        # The steps are described as in a tokenizer.json; a vocabulary of 260,000 tokens would take seconds to write so.
        nothing = {"type": "BPE", "vocab": {}, "merges": []}
        made = tokenizers.Tokenizer.from_str(
            json.dumps({"version": "1.0", "added_tokens": [], **steps, "model": nothing})
        )
        made.model = model
        for is_special, added in groupby(self._added(), key=lambda token: token.special):
            (made.add_special_tokens if is_special else made.add_tokens)(list(added))
        return made

    def _byte_level(self) -> tuple[Json, BPE]:
        name = self._value("pre") or "default"  # a file before there were names
        if not isinstance(name, str) or name not in SPLITS:
            way_out = (
                ": put the model's own tokenizer.json beside the file, or write the file anew with a converter that"
                " names one of them"
            )
            raise self._error("pre", name, "a split that docs/models.md lists", way_out)
        split = SPLITS[name]
        if missing := _CHARACTERS - self.ids.keys():
            raise self._error("tokens", 256 - len(missing), "a token for each of 256 bytes")
        splits = [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
            for expression in split.expressions
        ]
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        merges = self._merges()
        # What is not used in the file is no token elsewhere, unless it is made all the same.
        unused = {self.tokens[index] for index in self._of_types(_UNUSED) if index not in self.ends}
        if unused:
            unused.difference_update(token for pair in merges for token in (*pair, "".join(pair)))
        vocabulary = {token: index for token, index in self.ids.items() if token not in unused}
        steps = {
            "normalizer": {"type": "NFC"} if split.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_only]},
            "post_processor": self._ends(begins=split.begins),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        }
        return steps, BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words)

    def _sentencepiece(self) -> tuple[Json, BPE]:
        all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
        bytes_there = sum(name in self.ids for name in all_bytes)
        unknown = self._id("unknown_token_id")
        if unknown is None:
            unknown = next(iter(self._of_types(_UNKNOWN)), None)
        if bytes_there not in (0, 256):
            raise self._error("tokens", bytes_there, "tokens for all of 256 bytes or for none")
        if bytes_there == 0 and unknown is None:
            raise self._error("tokens", len(self.tokens), "bytes or an unknown token among them")
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._flag("add_space_prefix", True):
            normalizers = [{"type": "Prepend", "prepend": "▁"}, space]
            back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        else:
            normalizers = [space]
        steps = {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": self._ends(begins=True),
            "decoder": {"type": "Sequence", "decoders": back},
        }
        return steps, BPE(
            vocab=self.ids,
            merges=self._merges() if self.kind == "gemma4" else self._merges_by_score(),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=bytes_there == 256,
        )

    def _tokens(self) -> list[str]:
        strings = self._value("tokens")
        if not isinstance(strings, Strings):
            raise self._error("tokens", strings, "an array of strings")
        embeddings = self._header.tensors.get("token_embd.weight")
        if embeddings is not None and strings.count > embeddings.shape[0]:
            raise self._error("tokens", strings.count, f"at most {embeddings.shape[0]}, as there are embeddings")
        tokens = self._texts("tokens", strings)
        for index, raw in enumerate(strings.all):
            if len(raw) > _LONGEST_TOKEN:
                raise self._error(f"tokens[{index}]", len(raw), f"at most {_LONGEST_TOKEN} bytes")
        if len(set(tokens)) == len(tokens):
            return tokens
        before = set[str]()
        for index, token in enumerate(tokens):
            if token and token in before:
                raise self._error(f"tokens[{index}]", token, "a token that is not there before")
            before.add(token)
        return tokens

    def _types(self) -> npt.NDArray[np.int64]:
        stored = self._numbers("token_type", "iu")
        if stored is None:
            return np.full(len(self.tokens), _NORMAL, np.int64)
        if not np.all((stored >= 0) & (stored <= _BYTE)):
            raise self._error("token_type", int(stored[(stored < 0) | (stored > _BYTE)][0]), f"0 to {_BYTE}")
        return stored.astype(np.int64)

    def _of_types(self, *kinds: int) -> list[int]:
        """The tokens of these types."""
        indices: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return indices

    def _merges(self) -> list[tuple[str, str]]:
        strings = self._value("merges")
        if not isinstance(strings, Strings):
            raise self._error("merges", strings, "an array of strings")
        # Each token can be made in as many ways as it can be cut in two.
        most = sum(max(len(token) - 1, 0) for token in self.tokens)
        if strings.count > most:
            raise self._error("merges", strings.count, f"at most {most}, the ways to make the tokens")
        merges: dict[tuple[str, str], None] = {}
        for index, text in enumerate(self._texts("merges", strings)):
            at = text.find(" ", 1)
            pair = text[:at], text[at + 1 :]
            if at > 0 and " " in pair[1]:  # no text has it: a space is another character there
                continue
            if at < 0 or pair[0] not in self.ids or pair[1] not in self.ids or "".join(pair) not in self.ids:
                raise self._error(f"merges[{index}]", text, "two tokens that make a third")
            if pair in merges:
                raise self._error(f"merges[{index}]", text, "a merge that is not there before")
            merges[pair] = None
        return list(merges)

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores = self._numbers("scores", "fi")
        if scores is None:
            scores = np.zeros(len(self.tokens), np.float64)
        if not np.isfinite(scores).all():
            raise self._error("scores", float(scores[~np.isfinite(scores)][0]), "finite numbers")
        # A text never becomes one of the others.
        return merges_by_score(self.tokens, scores, ~np.isin(self.types, (_UNKNOWN, _CONTROL, _BYTE)))

    def _added(self) -> Iterator[tokenizers.AddedToken]:
        """The tokens that a text is cut at, before anything else: those that end a text are, whatever their types."""
        kinds = (_CONTROL, _USER_DEFINED, *([] if self.kind == "gpt2" else [_UNKNOWN]))
        # Phi-3's own tokenizer drops the space after these; a GGUF file has no word for that.
        phi3 = self.kind == "llama" and self._header.metadata.get("general.architecture") == "phi3"
        for index in sorted({*self._of_types(*kinds), *self.ends}):
            if token := self.tokens[index]:
                yield tokenizers.AddedToken(
                    token,
                    rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
                    normalized=False,
                    special=bool(self.types[index] != _USER_DEFINED) or index in self.ends,
                )

    def _ends(self, begins: bool) -> Json | None:
        """Return what is added to each text: its first and its last token."""
        first = self._id("bos_token_id")
        last = self._id("eos_token_id")
        chosen: dict[str, int] = {}
        for key, index, default in (("add_bos_token", first, begins), ("add_eos_token", last, False)):
            if self._flag(key, default):
                if index is None:
                    raise self._error(key, True, f"false without {key[4:7]}_token_id")
                chosen[key] = index

        def text(name: str) -> list[Json]:
            here: list[Json] = [{"Sequence": {"id": name, "type_id": 0}}]
            if "add_bos_token" in chosen:
                here.insert(0, {"SpecialToken": {"id": self.tokens[chosen["add_bos_token"]], "type_id": 0}})
            if "add_eos_token" in chosen:
                here.append({"SpecialToken": {"id": self.tokens[chosen["add_eos_token"]], "type_id": 0}})
            return here

        if not chosen:
            return None
        specials = {
            self.tokens[index]: {"id": self.tokens[index], "ids": [index], "tokens": [self.tokens[index]]}
            for index in chosen.values()
        }
        single, pair = text("A"), [*text("A"), *text("B")]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}

    def _id(self, key: str) -> int | None:
        value = self._value(key)
        if value is None:
            default = default_ids(self._header).get(key)
            return default if default is not None and self.tokens[default] else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise self._error(key, value, f"a token from 0 to {len(self.tokens) - 1}")
        if not self.tokens[value]:
            raise self._error(key, value, "a token that is not empty")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def _numbers(self, key: str, kinds: str) -> np.ndarray | None:
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self._error(key, value, "an array of numbers")
        if len(value) != len(self.tokens):
            raise self._error(key, len(value), f"as many as tokens, {len(self.tokens)}")
        return value

    def _texts(self, key: str, strings: Strings) -> list[str]:
        texts: list[str] = []
        try:
            texts.extend(map(bytes.decode, strings.all))
        except UnicodeDecodeError:
            at = len(texts)
            raise self._error(f"{key}[{at}]", strings.all[at][:32], "UTF-8") from None
        return texts

    def _value(self, key: str) -> Any:
        return self._header.metadata.get(_PREFIX + key)

    def _error(self, key: str, value: object, expected: str, way_out: str = "") -> CheckpointError:
        problem = f"expected {expected}, got {printable(shown(value))}{way_out}"
        return CheckpointError(f"{self._header.file}: {_PREFIX}{key}: {problem}")
