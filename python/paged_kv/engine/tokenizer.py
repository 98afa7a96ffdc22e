"""Text to tokens and back, through the `tokenizers` library: the checkpoint's own `tokenizer.json`, or a GGUF file's
vocabulary.
"""

from __future__ import annotations

import json
import re
from functools import cache, cached_property
from pathlib import Path

from paged_kv.arguments import printable
from paged_kv.checkpoint.config import checkpoint_folder
from paged_kv.checkpoint.end_tokens import END_TEXTS
from paged_kv.checkpoint.file_errors import file_errors
from paged_kv.checkpoint.source import Source
from paged_kv.checkpoint.tokenizer_file import TOKENIZER, read_tokenizer
from paged_kv.errors import CheckpointError, ContractError, ContractTypeError
from paged_kv.graphs.models.config import DecoderConfig
from paged_kv.structured_output import StructureCompiler

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
_UNFINISHED = 3  # a character has at most four bytes: at most three can wait for the last
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte token of SentencePiece
_CONTEXT = 8  # tokens after which a stream forgets older ones, whole character or not


class Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is unreadable, or has tokens that the model has no embedding for.
    """

    def __init__(self, source: Source | Path | str, config: DecoderConfig) -> None:
        """Read the tokenizer of a checkpoint, or the `tokenizer.json` of a folder."""
        if isinstance(source, Source):
            self._tokenizer, file = source.tokenizer()
        else:
            file = checkpoint_folder(source) / TOKENIZER
            self._tokenizer = read_tokenizer(file, config.vocab_size)
        self._file = file
        self._vocab_size = config.vocab_size
        with file_errors(file):
            self._hide_ends(config.eos_token_ids)

    def _hide_ends(self, ends: tuple[int, ...]) -> None:
        """Makes marks that end a text special: some files say that they are text, which would be shown."""
        added = self._tokenizer.get_added_tokens_decoder()
        for text in END_TEXTS:
            number = self._tokenizer.token_to_id(text)
            if number in ends:
                self._tokenizer.add_special_tokens([added.get(number, text)])

    def encode(self, prompt: str, *, is_template: bool = False) -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer's file adds.

        To a chat template's text it adds none: the template has written them.

        Raises:
            ContractTypeError: the prompt is no string.
            ContractError: it is empty, gives no tokens, or is not text (a lone surrogate).
            CheckpointError: the tokenizer fails on it, or gives a token that the model has no embedding for.
        """
        if not isinstance(prompt, str):
            raise ContractTypeError(f"prompt: expected a string, got {type(prompt).__name__}")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ContractError(f"prompt {printable(ascii(prompt))} is not valid text") from None
        with file_errors(f"{self._file}: prompt {printable(repr(prompt))} cannot be encoded"):
            tokens: list[int] = self._tokenizer.encode(prompt, add_special_tokens=not is_template).ids
        if not prompt or not tokens:
            raise ContractError(f"prompt {printable(repr(prompt))} is empty: it gives no tokens")
        # A post-processor adds ids that stand in the file by themselves, whatever the vocabulary is.
        if (largest := max(tokens)) >= self._vocab_size:
            raise CheckpointError(
                f"{self._file}: prompt {printable(repr(prompt))} gives token id {largest}, "
                f"but vocab_size is {self._vocab_size}"
            )
        return tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some tokens, without special tokens unless they are asked for."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token: int) -> str:
        """The text of one token as it stands inside a text, also of a special one."""
        inside = self._tokenizer.token_to_id("a")
        if inside is not None:  # some decoders drop the space before the first token
            before, text = (
                self._tokenizer.decode(ids, skip_special_tokens=False) for ids in ([inside], [inside, token])
            )
            if text.startswith(before):
                return str(text[len(before) :])
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token inside a text, perhaps a part of a character. Those of a special token are its name's,
        and a number that the vocabulary leaves out has none.
        """
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._special_ids:
            return piece.encode()
        if "ByteLevel" in self._decoders and all(symbol in _byte_symbols() for symbol in piece):
            return bytes(_byte_symbols()[symbol] for symbol in piece)
        if "ByteFallback" in self._decoders and _BYTE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return self.token_text(token).encode()

    def token_name(self, token: int) -> str:
        """The vocabulary's own spelling of a token, such as `Ġthe`; empty for a number that it leaves out."""
        return self._tokenizer.id_to_token(token) or ""

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps by which tokens become text."""
        decoder = self._tokenizer.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(each["type"] for each in (state, *state.get("decoders", ())) if "type" in each)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the vocabulary's special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def structure_compiler(self) -> StructureCompiler:
        """Compiles structures for its vocabulary, half a second for a large one. Raises as `StructureCompiler`."""
        return StructureCompiler(self._tokenizer)

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for the tokens of one request."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)


class StreamDecoder:
    """Decodes the tokens of one request into text one by one; text that it has returned never changes.

    Bytes that may be the start of a character wait until the character is whole, or until `flush`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._recent: list[int] = []  # a token's text depends on those before it: these are decoded together
        self._new = 0  # how many of them came after the last whole character
        self._shown = ""  # their text, as far as it was returned

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._recent.append(token)
        self._new += 1
        text = self._text()
        # Where characters are spelt in byte tokens, an unfinished one changes how those before it are decoded. What
        # was returned stays, and the new tokens are decoded alone.
        if not text.startswith(self._shown):
            self._recent, self._shown = self._recent[-self._new :], ""
            text = self._text()
        waiting = _waiting(text)
        piece = text[len(self._shown) : len(text) - waiting]
        self._shown += piece
        if (piece and not waiting) or self._new > _CONTEXT:
            self._recent, self._new = self._recent[-self._new :], 0
            text = self._text()
            self._shown = text[: len(text) - waiting]
        return piece

    def flush(self) -> str:
        """The text still waiting, unfinished characters as U+FFFD. The stream is then at its start again."""
        piece = self._text()[len(self._shown) :]
        self._recent, self._new, self._shown = [], 0, ""
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._recent, skip_special_tokens=self._skips)


@cache
def _byte_symbols() -> dict[str, int]:
    """The byte of each character of the alphabet that byte-level vocabularies are written in: printable characters of
    Latin-1 are their own bytes, the others follow from U+0100 on in the order of their bytes.
    """
    printable_bytes = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable_bytes]
    return {chr(byte): byte for byte in printable_bytes} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _waiting(text: str) -> int:
    """Return how many characters at the end of a text may still change."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _UNFINISHED)
