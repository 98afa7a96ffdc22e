"""Text to tokens and back: streams never show half a character and lose none."""

import json
import random
from dataclasses import replace

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from paged_kv.checkpoint.source import open_source
from paged_kv.engine.demo import BOS_ID, EOS_ID, byte_tokenizer
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.tokenizer import Tokenizer
from paged_kv.errors import ContractError, ContractTypeError
from support.checkpoints import read_config
from support.refusals import refused

TEXTS = [
    "plain",
    "",
    " leading and trailing ",
    "héllo, wörld",
    "日本語とemoji 👩‍👩‍👧 and 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\n\ttabs\r\n",
    "a\u0301",
    "end in a wide one 𝄞",
]


def sentencepiece():
    """A tokenizer as Llama 2's: spaces as ▁, unknown characters as byte tokens, one leading space dropped."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {symbol: 258 + i for i, symbol in enumerate("▁abcdefghijklmnopqrstuvwxyz,")}
    library = Library(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken("</s>", special=True)])
    return library


@pytest.fixture(params=[byte_tokenizer, sentencepiece])
def tokenizer(request, tmp_path):
    return save(tmp_path, request.param(), vocab_size=300)


def save(folder, library, **config):
    config = read_config(folder, **config)
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, config)


def streamed(tokenizer, tokens):
    stream = tokenizer.stream()
    return [stream.push(token) for token in tokens] + [stream.flush()]


def test_special_tokens_are_added_as_the_file_says(tmp_path):
    assert save(tmp_path, byte_tokenizer()).encode("a")[0] == BOS_ID
    assert len(save(tmp_path, byte_tokenizer(add_bos=False)).encode("a")) == 1


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_is_the_text_without_half_characters(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text) if text else [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(tokenizer):
    stream = tokenizer.stream()
    tokens = tokenizer.encode("é€𝄞")[-9:]  # without what stands before the text
    assert [stream.push(token) for token in tokens] == ["", "é", "", "", "€", "", "", "", "𝄞"]
    assert stream.flush() == ""


def test_an_unfinished_character_is_flushed(tokenizer):
    stream = tokenizer.stream()
    tokens = tokenizer.encode("x𝄞")[-5:-1]
    assert [stream.push(token) for token in tokens] == ["x", "", "", ""]
    assert set(stream.flush()) == {"\ufffd"}
    assert stream.flush() == ""
    assert stream.push(tokens[0]) == "x"


def test_a_stream_of_any_bytes_is_their_text(tmp_path):
    """Whatever a model without sense says, a byte-level stream shows all of it, invalid bytes as U+FFFD."""
    tokenizer = save(tmp_path, byte_tokenizer())
    choose = random.Random(0)
    parts = [*range(256), *range(256), EOS_ID, *tokenizer.encode("aé€𝄞")]
    for length in (1, 3, 10, 100):
        for _ in range(50):
            tokens = choose.choices(parts, k=length)
            assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_bytes_that_are_no_text_spoil_nothing_around_them(tokenizer):
    """Text before a stray byte was shown, text after it is."""
    stray = tokenizer.encode("é")[-1]
    text = "日本語 and é"
    for count in (1, 2, 5, 30):
        tokens = [*tokenizer.encode(text), *[stray] * count, *tokenizer.encode("then more")]
        shown = "".join(streamed(tokenizer, tokens))
        assert shown.startswith(text)
        assert shown.endswith("then more")
        assert "\ufffd" in shown


def test_a_special_token_in_between_does_not_eat_a_space(tmp_path):
    tokenizer = save(tmp_path, sentencepiece(), vocab_size=300)
    a, space, b = tokenizer.encode("a b")[-3:]
    assert "".join(streamed(tokenizer, [a, 1, space, b])) == "a b"


def test_bytes_that_are_no_text_do_not_wait_for_ever(tokenizer):
    stream = tokenizer.stream()
    token = tokenizer.encode("é")[-1]  # a continuation byte
    shown = "".join(stream.push(token) for _ in range(100))
    assert len(shown) >= 97
    assert len(stream._recent) < 20


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_tokens_have_the_bytes_of_the_text(tokenizer, text):
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert joined.decode().removeprefix("<s>") in (text, f" {text}")  # SentencePiece puts a space before it


def test_the_bytes_of_tokens_that_are_no_plain_text(tmp_path):
    library = byte_tokenizer()
    library.add_tokens(["日本", "<0xE9>"])
    library.add_special_tokens(["<é>"])
    plain = save(tmp_path / "bytes", library, vocab_size=300)
    for text, expected in (("日本", "日本".encode()), ("<0xE9>", b"<0xE9>"), ("<é>", "<é>".encode()), ("é", b"\xe9")):
        assert plain.token_bytes(library.token_to_id(text)) == expected
    assert plain.token_bytes(299) == b""
    library = sentencepiece()
    pieces = save(tmp_path / "pieces", library, vocab_size=300)
    for text, expected in (("<0xE9>", b"\xe9"), ("</s>", b"</s>"), ("▁", b" "), ("a", b"a")):
        assert pieces.token_bytes(library.token_to_id(text)) == expected


@pytest.mark.parametrize("add", ["add_tokens", "add_special_tokens"])
def test_marks_that_end_a_text_are_not_shown(tmp_path, add):
    """Some files add them as text; one that ends none, or that is no mark, stays what the file says."""
    library = byte_tokenizer()
    getattr(library, add)(["<|im_end|>"])
    library.add_tokens(["<|eot_id|>", "<stop>"])
    end, other, word = (library.token_to_id(text) for text in ("<|im_end|>", "<|eot_id|>", "<stop>"))
    tokenizer = save(tmp_path, library, vocab_size=262, eos_token_id=[end, word])
    assert tokenizer.encode("a<|im_end|>")[-1] == end
    assert "".join(streamed(tokenizer, [*tokenizer.encode("a")[1:], end, other, word])) == "a<|eot_id|><stop>"


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    library = byte_tokenizer(add_bos=False)
    library.enable_truncation(max_length=4)
    library.enable_padding(length=16)
    assert len(save(tmp_path, library).encode("sixsix")) == 6


def test_a_prompt_without_tokens_is_refused(tmp_path):
    library = byte_tokenizer(add_bos=False)
    library.normalizer = normalizers.Strip()
    with pytest.raises(ContractError, match="prompt '  ' is empty: it gives no tokens"):
        save(tmp_path, library).encode("  ")


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path):
    assert save(tmp_path, byte_tokenizer(), vocab_size=259)
    message = "vocabulary mismatch: token ids go up to 258, but vocab_size is 258"
    refused(save, tmp_path, byte_tokenizer(), vocab_size=258, match=message)


def test_a_folders_tokenizer_is_read_once(monkeypatch):
    """Its configuration needs it too, for the tokens that end a text."""
    files = []
    monkeypatch.setattr("paged_kv.checkpoint.tokenizer_file.check_file", lambda _, file: files.append(file))
    source = open_source(FOLDER)
    tokenizer = Tokenizer(source, source.config)
    assert files == [FOLDER / "tokenizer.json"]
    assert tokenizer.encode("a text") == Tokenizer(FOLDER, source.config).encode("a text")
    smaller = replace(source, config=replace(source.config, vocab_size=258))
    refused(smaller.tokenizer, match="token ids go up to 2047, but vocab_size is 258 in config.json")


def with_post_processor(folder, ids, tokens=("<s>",)):
    """A tokenizer whose post-processor puts `ids` before a text, and says that they are called `tokens`."""
    values = json.loads(byte_tokenizer().to_str())
    special = {"<s>": {"id": "<s>", "ids": ids, "tokens": list(tokens) * len(ids)}}
    values["post_processor"]["special_tokens"] = special
    config = read_config(folder)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return Tokenizer(folder, config)


@pytest.mark.parametrize("token", [259, 2**31, 2**32 - 1])
def test_a_post_processor_adds_no_token_past_the_vocabulary(tmp_path, token):
    """The file's own ids are not those of its vocabulary."""
    assert with_post_processor(tmp_path / "good", [258, 258]).encode("a")[:2] == [258, 258]
    tokenizer = with_post_processor(tmp_path / "bad", [256, token])
    refused(tokenizer.encode, "a", match=rf"'a' gives token id {token}, but vocab_size is 259$")


def test_a_failure_inside_the_library_is_a_checkpoints(tmp_path):
    """A template that names a token which it does not define (the library panics), and a word without a token."""
    values = json.loads(byte_tokenizer().to_str())
    values["post_processor"]["single"][0]["SpecialToken"]["id"] = "none"
    config = read_config(tmp_path)
    for text, words in ((json.dumps(values), "no entry found"), (Library(models.WordLevel({"a": 0})).to_str(), "UNK")):
        (tmp_path / "tokenizer.json").write_text(text)
        tokenizer = Tokenizer(tmp_path, config)
        refused(tokenizer.encode, "b", match=rf"tokenizer\.json: prompt 'b' cannot be encoded: .*{words}")


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ("", ContractError, "prompt '' is empty"),
        ("a\udcff", ContractError, r"prompt 'a\\udcff' is not valid text"),
        *((prompt, ContractTypeError, "prompt: expected a string, got ") for prompt in (None, b"a", ["a"], 5)),
    ],
    ids=range(6),
)
def test_a_prompt_that_is_no_text_is_refused(tokenizer, prompt, error, said):
    with pytest.raises(error, match=said):
        tokenizer.encode(prompt)


DEEP = ("[" * 100_000, '{"model": ' * 100_000, '{"added_tokens": ' + "[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"model": {"type": "BPE"}}', "not json", "\xff", *DEEP], ids=range(5 + len(DEEP))
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    refused(lambda: Tokenizer(tmp_path, read_config(tmp_path)), match=r"tokenizer\.json: not a tokenizer: ")
