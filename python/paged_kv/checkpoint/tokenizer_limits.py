"""Bounds of what a `tokenizer.json` makes of a text: how much longer the text may become, and what is added to it.

The tokenizers library cannot be stopped: a step that turns each letter into a thousand ends the process where memory
ends. So the steps are looked at before the library reads the file, which itself applies them to added tokens.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.errors import CheckpointError

MOST_GROWTH = 64
"""Characters that all steps together may make of one; those of real files make some 20 (SentencePiece's NFKC)."""
MOST_SPECIAL = 1024
"""Token ids that may be added to a text."""
LONGEST_TOKEN = 1 << 16
"""Characters; real ones have some hundreds."""
_LONGEST_WORD, _LONGEST_AFFIX = 10_000, 64
_STEPS = ("normalizers", "pretokenizers", "decoders", "processors")
_REPEATED = {"ByteLevel": 4, "BertNormalizer": 3, "Metaspace": 2, "NFD": 4, "NFKD": 18}
"""Growth by steps that a file does not choose; one of each kind is no growth here, as every model has it."""
_PARTS = (b'"added_tokens"', b'"normalizer"', b'"pre_tokenizer"', b'"post_processor"', b'"decoder"')
_ESCAPED = re.compile(rb"\\u00[2-7]")
_PROBE = "The quick brown fox, 0123456789 \t\n <s>[INST] éß\u00a0\ufdfa\u6f22\u5b57\U0001f600 " + "a" * 32


def check_file(content: bytes, file: Path) -> None:
    """Refuses a `tokenizer.json` that makes too much of a text.

    Raises:
        CheckpointError: it does; the message names the part.
        ValueError: it is no JSON.
    """
    values = _without_model(content) or json.loads(content, object_pairs_hook=_once)
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {type(values).__name__}")
    encoding = _growth(values.get("normalizer"), set()) * _growth(values.get("pre_tokenizer"), set())
    for part, growth in (("normalizer", encoding), ("decoder", _growth(values.get("decoder"), set()))):
        if growth > MOST_GROWTH:
            raise CheckpointError(f"{file}: {part}: it may make more than {MOST_GROWTH} characters of one")
    texts, added = _added(values.get("post_processor"))
    if texts > 4 or added > MOST_SPECIAL:
        expected = f"a text four times, and {MOST_SPECIAL} tokens"
        raise CheckpointError(f"{file}: post_processor: it makes more of a text than {expected}")


def check_made(tokenizer: tokenizers.Tokenizer, file: Path) -> None:
    """Refuses a tokenizer that makes too much of a short text, or of each part of a word.

    Raises:
        CheckpointError: it does.
    """
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(tokenizer.model, name, None) or "") > _LONGEST_AFFIX:
            raise CheckpointError(f"{file}: model.{name}: expected at most {_LONGEST_AFFIX} characters")
    if getattr(tokenizer.model, "max_input_chars_per_word", 0) > _LONGEST_WORD:
        raise CheckpointError(f"{file}: model.max_input_chars_per_word: expected at most {_LONGEST_WORD}")
    try:
        with file_errors(file):
            ids = tokenizer.encode(_PROBE).ids
            text = tokenizer.decode(ids, skip_special_tokens=False)
    except CheckpointError:  # one that fails on some texts is refused when it does
        return
    if len(ids) > MOST_SPECIAL + 4 * MOST_GROWTH * len(_PROBE) or len(text) > LONGEST_TOKEN * MOST_GROWTH:
        raise CheckpointError(f"{file}: it makes {len(ids)} tokens of {len(_PROBE)} characters")


def _without_model(content: bytes) -> dict[str, Any] | None:
    """All but the model's vocabulary, which takes most of the time, where the file is written as the library writes it:
    the model last. None where something else may come after it.
    """
    end = content.find(b'"model"')
    if end < 0 or any(content.find(part, end) >= 0 for part in _PARTS) or _ESCAPED.search(content, end):
        return None
    try:
        values = json.loads(content[:end].rstrip().removesuffix(b",") + b"}", object_pairs_hook=_once)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is there twice")
    return values


def _growth(step: Any, kinds: set[str]) -> float:
    """Characters that a step, with those in it, may make of one.

    Args:
        step: As the file has it.
        kinds: The kinds of steps before it.
    """
    if not isinstance(step, Mapping):
        return 1
    growth = 1.0
    for name in _STEPS:
        for each in step.get(name) or ():
            growth *= _growth(each, kinds)
    kind = str(step.get("type"))
    if kind == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        content = len(str(step.get("content")))
        # An expression may match nothing, between any two characters.
        growth *= max(1.0, content / len(text)) if isinstance(text, str) and text else 1 + content
    elif kind == "Prepend":
        growth *= 1 + len(str(step.get("prepend")))
    elif kind == "Precompiled":
        growth *= _longest_replacement(step.get("precompiled_charsmap"))
    elif kind in kinds:
        growth *= _REPEATED.get(kind, 1)
    kinds.add(kind)
    return growth


def _longest_replacement(charsmap: Any) -> float:
    """Characters of the longest text that SentencePiece's map has: behind its trie, each ends in a zero byte."""
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        return math.inf
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(len(text.decode(errors="replace")) for text in texts)


def _added(processor: Any) -> tuple[int, int]:
    """Return how often a post-processor repeats a text, and how many tokens it adds."""
    if not isinstance(processor, Mapping):
        return 1, 0
    texts, added = 1, 0
    for each in processor.get("processors") or ():
        inside = _added(each)
        texts, added = texts * inside[0], added * inside[0] + inside[1]
    if processor.get("type") == "TemplateProcessing":
        pieces = [each for each in processor.get("single") or () if isinstance(each, Mapping)]
        specials = processor.get("special_tokens") or {}
        texts *= sum("Sequence" in each for each in pieces)
        added *= max(texts, 1)
        for each in pieces:
            special = each.get("SpecialToken")
            if isinstance(special, Mapping):
                added += len(specials.get(special.get("id"), {}).get("ids", ()))
    return texts, added
