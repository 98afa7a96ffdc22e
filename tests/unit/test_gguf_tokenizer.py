"""Tokenizers of GGUF vocabularies against the tokenizers that the vocabularies come from, on a thousand odd strings."""

import dataclasses
import functools
import itertools
import json
import random
import re
import unicodedata

import gguf
import pytest
import regex
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges

from paged_kv.checkpoint.end_tokens import end_tokens
from paged_kv.checkpoint.gguf import open_gguf
from paged_kv.checkpoint.gguf_families import _special_tokens
from paged_kv.checkpoint.gguf_header import read_header
from paged_kv.checkpoint.gguf_splits import SPLITS
from paged_kv.checkpoint.gguf_tokenizer import end_texts, make_tokenizer
from paged_kv.checkpoint.source import open_source
from paged_kv.cli import _run
from paged_kv.engine.tokenizer import Tokenizer
from support.gguf_files import finish, make_model, write_gguf
from support.llama_splits import BEGINS, LLAMA_SPLITS, WHOLE_WORDS
from support.odd_strings import SPECIAL, TRAINING, USER, odd_strings
from support.refusals import refused

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
STRINGS = odd_strings(1000)


def split(pattern):
    """As tokenizer.json files have it: a regular expression, then bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+CONTRACTION|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*CONTRACTION|"
    r"DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
REAL = {
    "llama-bpe": (split(CL100K.replace("DIGITS", r"\p{N}{1,3}")), None, True),
    "dbrx": (split(CL100K.replace("DIGITS", r"\p{N}{1,3}")), None, False),
    "qwen2": (split(CL100K.replace("DIGITS", r"\p{N}")), normalizers.NFC(), False),
    "gpt-2": (BYTES, None, False),
    "refact": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES]), None, False),
    "tekken": (split(O200K.replace("CONTRACTION", "").replace("DIGITS", r"\p{N}")), None, True),
    "gpt-4o": (split(O200K.replace("CONTRACTION", f"{ENDINGS}?").replace("DIGITS", r"\p{N}{1,3}")), None, False),
}
"""By a tokenizer's name: how the model's own splits and normalises, and whether whole words are looked up first."""


@functools.cache
def byte_level(name):
    """A tokenizer of that kind, and what is said of its tokens: texts, types, merges."""
    pre_tokenizer, normalizer, ignore_merges = REAL[name]
    real = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    real.pre_tokenizer, real.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        real.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    real.train_from_iterator(TRAINING, trainer)
    real.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    real.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER])
    vocabulary = sorted(real.get_vocab(), key=real.get_vocab().__getitem__)
    types = [CONTROL if t in SPECIAL else USER_DEFINED if t in USER else NORMAL for t in vocabulary]
    merges = [" ".join(merge) for merge in json.loads(real.to_str())["model"]["merges"]]
    return real, {"model": "gpt2", "pre": name, "tokens": vocabulary, "token_type": types, "merges": merges}


@functools.cache
def sentencepiece(prefix, with_bytes=True):
    """The same of Llama 2's kind: scores fall with the order of training, characters have the lowest."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    pieces = [piece for piece in [*pieces, "▁▁", "▁▁▁▁"] if piece not in USER]
    pieces = sorted(dict.fromkeys(pieces), key=lambda piece: len(piece) == 1)
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    tokens = ["<unk>", "<s>", "</s>", *all_bytes, *pieces, *SPECIAL[:2], *USER]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(all_bytes), *[NORMAL] * len(pieces), CONTROL, CONTROL]
    types += [USER_DEFINED] * len(USER)
    scores = [0.0] * (3 + len(all_bytes)) + [-float(i) for i in range(len(pieces))] + [-1000.0] * (2 + len(USER))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    outside = {token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, BYTE)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)), outside)
    real = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=with_bytes)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    real.normalizer = normalizers.Replace(" ", "▁")
    if prefix:
        real.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), real.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    real.decoder = decoders.Sequence(steps)
    real.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", *SPECIAL)])
    real.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER])
    real.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    said = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": prefix}
    return real, said | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def add_vocabulary(writer, said):
    for key, value in said.items():
        if value is None:
            continue
        if key == "scores":
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32)
        elif isinstance(value, list | bytes):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)


def header(folder, said, architecture="llama"):
    """Return the tokenizer of a GGUF file with this vocabulary and nothing else."""
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    add_vocabulary(writer, said)
    finish(writer)
    return read_header(folder / "model.gguf")


def assert_agree(made, real, strings=STRINGS):
    assert made.get_vocab() == real.get_vocab()
    for text in strings:
        found, expected = made.encode(text), real.encode(text)
        assert (found.ids, found.tokens) == (expected.ids, expected.tokens), repr(text)
        for skip in (True, False):
            assert made.decode(found.ids, skip) == real.decode(expected.ids, skip), repr(text)
    choose = random.Random(1)
    for _ in range(200):  # what a model without sense says
        ids = choose.choices(range(real.get_vocab_size()), k=10)
        assert made.decode(ids) == real.decode(ids)


@pytest.mark.parametrize("name", REAL)
def test_byte_level(tmp_path, name):
    real, said = byte_level(name)
    made = make_tokenizer(header(tmp_path, said | {"add_bos_token": False}))
    assert_agree(made, real)
    for text in STRINGS:  # few merges cross the edges of pieces: tokens alone would hide some
        pieces = real.pre_tokenizer.pre_tokenize_str(text)
        assert made.pre_tokenizer.pre_tokenize_str(text) == pieces, repr(text)


@pytest.mark.parametrize("name", REAL)
def test_words_without_merges(tmp_path, name):
    """Some models look a whole word up before they merge."""
    said = byte_level(name)[1]
    more = {"tokens": [*said["tokens"], "zebrafish"], "token_type": [*said["token_type"], NORMAL]}
    made = make_tokenizer(header(tmp_path, said | more | {"add_bos_token": False}))
    found = made.encode("zebrafish").tokens
    assert (found == ["zebrafish"]) == REAL[name][2]


@pytest.mark.parametrize("with_bytes", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path, prefix, with_bytes):
    real, said = sentencepiece(prefix, with_bytes)
    made = make_tokenizer(header(tmp_path, said))
    assert_agree(made, real)
    assert json.loads(made.to_str())["model"]["merges"] == json.loads(real.to_str())["model"]["merges"]


def test_sentencepiece_with_merges_of_its_own(tmp_path):
    """Gemma 4's kind: the file has merges, and its scores do not count."""
    real, said = sentencepiece(prefix=False)
    merges = [" ".join(pair) for pair in json.loads(real.to_str())["model"]["merges"]]
    said |= {"model": "gemma4", "merges": merges, "scores": [0.0] * len(said["tokens"])}
    assert_agree(make_tokenizer(header(tmp_path, said, "gemma4")), real)


def merged_by_score(text, scores):
    """SentencePiece's rule, word for word: of all neighbours that are a token together, those of the best score are
    merged, the first of several; what is no token then is spelt in bytes.
    """
    symbols = list(text)
    while True:
        pairs = [(scores.get(a + b), -at) for at, (a, b) in enumerate(itertools.pairwise(symbols))]
        known = [pair for pair in pairs if pair[0] is not None]
        if not known:
            break
        at = -max(known)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    spelt = [[s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [token for tokens in spelt for token in tokens]


def test_sentencepiece_is_its_own_rule(tmp_path):
    """Against the rule itself: what merges by rank and merges by score would part on."""
    _, said = sentencepiece(True)
    made = make_tokenizer(header(tmp_path, said))
    kinds = zip(said["tokens"], said["scores"], said["token_type"], strict=True)
    scores = {token: score for token, score, kind in kinds if kind in (NORMAL, USER_DEFINED)}
    cut = [*SPECIAL, *USER, "<s>", "<unk>"]
    strings = [text for text in STRINGS if len(text) < 300 and not any(token in text for token in cut)]
    assert len(strings) > 400
    for text in strings:
        expected = merged_by_score("▁" + text.replace(" ", "▁"), scores) if text else []
        assert made.encode(text).tokens == ["<s>", *expected], repr(text)
        assert made.decode(made.encode(text).ids) == text.replace("▁", " "), repr(text)


def split_by(expressions, text):
    """llama.cpp's rule: each expression cuts what those before it have left whole; gaps are pieces too."""
    pieces = [text]
    for expression in expressions:
        cut = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(expression, piece):
                cut += [piece[at : match.start()], match[0]]
                at = match.end()
            cut.append(piece[at:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("names", LLAMA_SPLITS)
def test_splits_are_those_of_llama_cpp(tmp_path, names):
    first, *others = names.split()
    assert {SPLITS[name].expressions for name in others} <= {SPLITS[first].expressions}
    made = make_tokenizer(header(tmp_path, byte_level("gpt-2")[1] | {"pre": first, "add_bos_token": False}))
    # Those of llama.cpp know no case beyond ASCII and no marks; what the models' own know of them is tried above.
    lacking = ("Lu", "Ll", "Lt", "Mn", "Mc", "Me") if first in ("gpt-4o", "tekken") else ()
    tried = 0
    for text in STRINGS:
        # Those are spaces to Python alone; characters of later versions of Unicode are letters to one library only.
        if re.search("[\x1c-\x1f]", text) or any(
            unicodedata.category(character) in ("Cn", *lacking) for character in text if character > "\x7f"
        ):
            continue
        tried += 1
        found = [text[slice(*span)] for _, span in made.pre_tokenizer.pre_tokenize_str(text)]
        assert found == split_by(LLAMA_SPLITS[names], text), repr(text)
    assert tried > (200 if lacking else 700)


def test_all_names_of_llama_cpp_and_their_flags():
    assert sorted(SPLITS) == sorted(" ".join(LLAMA_SPLITS).split())
    assert {name for name in SPLITS if SPLITS[name].whole_words} == WHOLE_WORDS
    assert {name for name in SPLITS if SPLITS[name].begins} == BEGINS


def test_a_file_without_a_name_is_split_by_default(tmp_path):
    said = byte_level("gpt-2")[1]
    named = make_tokenizer(header(tmp_path, said | {"pre": "default"})).to_str()
    assert make_tokenizer(header(tmp_path, said | {"pre": None})).to_str() == named


def test_bytes_that_no_text_has(tmp_path):
    """StarCoder's vocabulary and Granite 3's lack 14 bytes; the one that a character may have is left out."""
    real, said = byte_level("refact")
    lacking = {*"\u00c0\u00c1\u00f1", *map(chr, range(0xF5, 0x100))}
    tokens = [f"[{index}]" if token in lacking else token for index, token in enumerate(said["tokens"])]
    made = make_tokenizer(header(tmp_path, said | {"tokens": tokens}))
    assert len(set(tokens) - set(said["tokens"])) == 14
    for text in [*STRINGS, "a\U00040000b"]:
        assert made.encode(text).tokens == [token for token in real.encode(text).tokens if token not in lacking]


ENDS = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <\uff5cend▁of▁sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo>
    <REPO> <reponame> <|file_sep|>"""
"""llama.cpp's list, `special_eog_ids` of its `src/llama-vocab.cpp`."""


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
@pytest.mark.parametrize("text", ENDS.split())
def test_tokens_that_end_a_text(tmp_path, text, kind):
    """They end it whatever their type, are not shown, and are tokens in a prompt."""
    said = byte_level("gpt-2")[1]
    index = len(said["tokens"])
    if text in said["tokens"]:
        index = said["tokens"].index(text)
        said = changed(said, "token_type", index, kind)
    else:
        said = said | {"tokens": [*said["tokens"], text], "token_type": [*said["token_type"], kind]}
    read = header(tmp_path, said)
    assert index in end_tokens(end_texts(read))
    made = make_tokenizer(read)
    assert made.encode(f"x{text}").ids[1:] == [index]
    assert made.decode([*made.encode("x").ids, index]) == "x"


@pytest.mark.parametrize(
    ("texts", "named", "ends"),
    [
        ("a <|end|>", [], "<|end|>"),
        ("<eos> <end_of_turn> <|im_end|>", [0], "<eos> <end_of_turn> <|im_end|>"),
        ("<|im_end|> a </s>", [1], "a <|im_end|> </s>"),  # what a file names comes first
        ("<|end|> <|return|> <|call|>", [], "<|return|> <|call|>"),  # GPT-OSS: a message goes on
        ("<|end|> <|return|> <|call|>", [0, 1], "<|return|> <|call|>"),
        ("<|end|> <|flush|> <|calls|>", [], "<|flush|> <|calls|>"),
        ("<|end|> <|return|>", [], "<|end|> <|return|>"),
        ("</s> <turn|> <|tool_response>", [], "<turn|> <|tool_response>"),  # Gemma 4: markup
        ("[PAD] <|fim_pad|>", [], "<|fim_pad|>"),  # one of each kind
    ],
)
def test_which_tokens_end_a_text(texts, named, ends):
    ids = {text: index for index, text in enumerate(texts.split())}
    assert end_tokens(ids, named) == tuple(ids[text] for text in ends.split())
    assert end_tokens(ids, named, {"fim_sep": 77, "eos": 78})[len(ends.split()) :] == (77,)


@pytest.mark.parametrize(
    ("said", "ids"),
    [
        ({"add_bos_token": True}, ["bos", "x"]),
        ({"add_bos_token": False, "add_eos_token": True}, ["x", "eos"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["bos", "x", "eos"]),
        ({}, ["bos", "x"]),  # Llama 3's kind begins with it where the file says nothing
        ({"pre": "qwen2"}, ["x"]),
    ],
)
def test_first_and_last_tokens(tmp_path, said, ids):
    real, given = byte_level("llama-bpe")
    known = {"bos": real.token_to_id(SPECIAL[0]), "eos": real.token_to_id(SPECIAL[1]), "x": real.token_to_id("x")}
    made = make_tokenizer(header(tmp_path, given | {"bos_token_id": known["bos"], "eos_token_id": known["eos"]} | said))
    assert made.encode("x").ids == [known[name] for name in ids]
    assert made.encode("x", add_special_tokens=False).ids == [known["x"]]


def test_tokens_that_are_not_used(tmp_path):
    """Rows that fill up a matrix, and tokens without a text: no text gives them, and they give none."""
    real, said = byte_level("qwen2")
    fill = {"tokens": [*said["tokens"], "[PAD1]", ""], "token_type": [*said["token_type"], UNUSED, NORMAL]}
    made = make_tokenizer(header(tmp_path, said | fill))
    assert_agree(made, real, STRINGS[:100])
    assert made.decode([len(said["tokens"]), len(said["tokens"]) + 1, real.token_to_id("x")]) == "x"


def test_a_token_that_is_not_used_but_made(tmp_path):
    """Llama.cpp makes it, whatever its type."""
    real, said = byte_level("qwen2")
    made = said["tokens"].index("".join(said["merges"][0].split(" ")))
    changed_types = changed(said, "token_type", made, UNUSED)
    assert_agree(make_tokenizer(header(tmp_path, changed_types)), real, STRINGS[:100])


def test_a_merge_with_two_spaces_is_never_used(tmp_path):
    real, said = byte_level("qwen2")
    spaces = said | {"merges": ["t  h", *said["merges"], "t h e"]}
    assert_agree(make_tokenizer(header(tmp_path, spaces)), real, STRINGS[:100])


def test_what_sentencepiece_does_not_say(tmp_path):
    """Llama.cpp's defaults: tokens 1 and 2 begin and end a text, and all scores are 0."""
    said = sentencepiece(True)[1]
    silent = header(tmp_path, said | {"bos_token_id": None, "eos_token_id": None, "add_eos_token": True})
    ids = make_tokenizer(silent).encode("x").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert _special_tokens(silent) == {"bos_token_id": 1, "eos_token_id": [2]}
    flat = said | {"scores": [0.0] * len(said["tokens"])}
    expected, found = (make_tokenizer(header(tmp_path, each)).to_str() for each in (flat, said | {"scores": None}))
    assert found == expected


def test_phi3_drops_the_space_after_its_tokens(tmp_path):
    _, said = sentencepiece(True)
    made = make_tokenizer(header(tmp_path, said, "phi3"))
    plain = make_tokenizer(header(tmp_path, said))
    assert made.encode("<|begin|> x").ids == plain.encode("<|begin|>x").ids != plain.encode("<|begin|> x").ids
    assert made.encode("<s> x").ids == plain.encode("<s> x").ids


def changed(said, key, index, value):
    return said | {key: [*said[key][:index], value, *said[key][index + 1 :]]}


def other(key, value):
    return lambda said: said | {key: value}


def at(key, index, value):
    return lambda said: changed(said, key, index, value(said[key]) if callable(value) else value)


TWO = r"merges\[3\]: expected two tokens that make a third, got"
BPE_FAULTS = {
    "kind": (other("model", "bert"), r"model: expected \"gpt2\" or \"llama\".*, got 'bert'$"),
    "no kind": (other("model", None), "model: expected .*, got None$"),
    "split": (other("pre", "afmoe"),
              "pre: expected a split .*, got 'afmoe': put the model's own tokenizer.json beside the file"),
    "split of another type": (other("pre", 5), "pre: expected a split .*, got 5: put"),
    "no tokens": (other("tokens", [1, 2]), "tokens: expected an array of strings, got"),
    "twice": (at("tokens", 300, lambda tokens: tokens[299]),
              r"tokens\[300\]: expected a token that is not there before, got '.*'$"),
    "a byte": (at("tokens", 5, "bytes"), "tokens: expected a token for each of 256 bytes, got 255$"),
    "long": (at("tokens", 400, "a" * 70_000), r"tokens\[400\]: expected at most \d+ bytes, got 70000$"),
    "types": (other("token_type", [1] * 905), "token_type: expected as many as tokens, 906, got 905$"),
    "a type": (at("token_type", 7, 9), "token_type: expected 0 to 6, got 9$"),
    "type of types": (other("token_type", [1.0] * 906), "token_type: expected an array of numbers, got"),
    "no merges": (other("merges", None), "merges: expected an array of strings, got None$"),
    "left": (at("merges", 3, "nothere a"), f"{TWO} 'nothere a'$"),
    "right": (at("merges", 3, "a nothere"), f"{TWO} 'a nothere'$"),
    "result": (at("merges", 3, "Z Z"), f"{TWO} 'Z Z'$"),
    "one": (at("merges", 3, "the"), f"{TWO} 'the'$"),
    "again": (at("merges", 3, lambda merges: merges[2]),
              r"merges\[3\]: expected a merge that is not there before, got 'e s'$"),
    "many": (lambda said: said | {"merges": said["merges"] * 20},
             r"merges: expected at most \d+, the ways to make the tokens, got \d+$"),
    "bos": (other("bos_token_id", 906), "bos_token_id: expected a token from 0 to 905, got 906$"),
    "bos of another type": (other("bos_token_id", "<s>"), "bos_token_id: expected a token from 0 to .*, got '<s>'$"),
    "empty bos": (lambda said: changed(said, "tokens", 905, "") | {"bos_token_id": 905},
                  "bos_token_id: expected a token that is not empty, got 905$"),
    "no bos": (other("add_bos_token", True), "add_bos_token: expected false without bos_token_id, got True$"),
    "flag": (other("add_bos_token", 1), "add_bos_token: expected true or false, got 1$"),
}  # fmt: skip
SPM_FAULTS = {
    "scores": (other("scores", [0.0]), r"scores: expected as many as tokens, \d+, got 1$"),
    "a score": (at("scores", 500, float("nan")), "scores: expected finite numbers, got nan$"),
    "bytes": (at("tokens", 20, "<0x1>"), "tokens: expected tokens for all of 256 bytes or for none, got 255$"),
    "unknown": (other("unknown_token_id", 10**6), "unknown_token_id: expected a token from 0 to .*, got 1000000$"),
    "prefix": (other("add_space_prefix", "yes"), "add_space_prefix: expected true or false, got 'yes'$"),
    "twice": (at("tokens", 300, "▁the"), r"tokens\[300\]: expected a token that is not there before, got '▁the'$"),
}
FAULTS = {f"byte level, {name}": (lambda: byte_level("qwen2")[1], *fault) for name, fault in BPE_FAULTS.items()}
FAULTS |= {f"sentencepiece, {name}": (lambda: sentencepiece(True)[1], *fault) for name, fault in SPM_FAULTS.items()}


@pytest.mark.parametrize("kind", FAULTS)
def test_damaged_vocabularies_are_refused(tmp_path, kind):
    said_of, damage, message = FAULTS[kind]
    make_tokenizer(header(tmp_path, said_of()))
    refused(make_tokenizer, header(tmp_path, damage(said_of())), match=rf"model\.gguf: tokenizer\.ggml\..*{message}")


def test_no_unknown_and_no_bytes(tmp_path):
    said = sentencepiece(True, False)[1]
    said = changed(said, "token_type", 0, NORMAL) | {"unknown_token_id": None}
    refused(make_tokenizer, header(tmp_path, said), match="tokens: expected bytes or an unknown token among them, got")


def test_bytes_that_are_no_text(tmp_path):
    said = byte_level("qwen2")[1]
    file = header(tmp_path, said).file
    file.write_bytes(file.read_bytes().replace("Ġthe".encode(), b"\xff\xfethe", 1))
    refused(make_tokenizer, read_header(file), match=r"tokens\[\d+\]: expected UTF-8, got")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A GGUF file with a vocabulary and nothing beside it; the user's cache is elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real, said = byte_level("llama-bpe")
    ids = {"bos_token_id": real.token_to_id(SPECIAL[0]), "eos_token_id": real.token_to_id(SPECIAL[1])}
    (tmp_path / "model").mkdir()
    llama = make_model("llama", vocab_size=1024, **ids, pad_token_id=None)
    file = tmp_path / "model" / "model.gguf"
    write_gguf(file, llama, lambda _: "Q4_0", vocabulary=lambda writer: add_vocabulary(writer, said))
    return file, real


def test_the_engine_takes_it(model, capsys):
    file, real = model
    source = open_source(file)
    tokenizer = Tokenizer(source, source.config)
    text = "the pages of 日本語 and 🎉"
    assert tokenizer.encode(text) == [source.config.bos_token_id, *real.encode(text).ids]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert _run(["generate", "--model", str(file), "--prompt", ""]) == 2
    assert "prompt '' is empty" in capsys.readouterr().err  # not that a tokenizer is missing


def test_ends_that_a_file_does_not_name(model):
    """As the converters write Phi-4-mini: eos is the end of texts, that of a turn is known by its text alone."""
    file, real = model
    said = byte_level("llama-bpe")[1]
    tokens = [*said["tokens"][:-1], "<|im_end|>"]
    llama = make_model("llama", vocab_size=1024, bos_token_id=0, eos_token_id=7, pad_token_id=None)
    vocabulary = said | {"tokens": tokens}
    write_gguf(file, llama, lambda _: "Q4_0", vocabulary=lambda writer: add_vocabulary(writer, vocabulary))
    ends = (7, real.token_to_id("</s>"), tokens.index("<|im_end|>"))
    assert open_source(file).config.eos_token_ids == ends


def test_more_tokens_than_embeddings(model):
    file, _ = model
    checkpoint = open_gguf(file)
    tensors = dict(checkpoint.header.tensors)
    tensors["token_embd.weight"] = tensors["blk.0.attn_q.weight"]  # of 256 rows
    few = dataclasses.replace(checkpoint.header, tensors=tensors)
    refused(make_tokenizer, few, match="tokens: expected at most 256, as there are embeddings, got 906$")


def test_a_tokenizer_beside_the_file_comes_first(model):
    file, _ = model
    other = byte_level("qwen2")[0]
    other.save(str(file.with_name("tokenizer.json")))
    source = open_source(file)
    made, of = source.tokenizer()
    assert of == file.with_name("tokenizer.json")
    assert made.to_str() == other.to_str()


def test_the_better_score_is_merged_or_the_first_of_equal_ones(tmp_path):
    """Of equal scores the order of the tokens decides, as transformers has it."""
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    said = {"model": "llama", "tokens": tokens, "token_type": [UNKNOWN, *[NORMAL] * 5], "add_bos_token": False}
    for order in ([-1.0, -2.0], [-2.0, -1.0], [-1.0, -1.0]):
        made = make_tokenizer(
            header(tmp_path, said | {"scores": [0.0, -9.0, -9.0, -9.0, *order], "add_space_prefix": False})
        )
        best = ["ab", "c"] if order[0] >= order[1] else ["a", "bc"]
        assert made.encode("abc").tokens == best


def test_merges_of_equal_scores(tmp_path):
    """In the order that transformers puts them in: the longer left part first, then the longer right part."""
    metadata = sentencepiece(True)[1]
    scores = [-float(index % 3) for index in range(len(metadata["tokens"]))]
    kinds = zip(metadata["tokens"], metadata["token_type"], strict=True)
    outside = {token for token, kind in kinds if kind in (UNKNOWN, CONTROL, BYTE)}
    vocabulary = {token: index for index, token in enumerate(metadata["tokens"])}
    expected = generate_merges(vocabulary, dict(zip(metadata["tokens"], scores, strict=True)), outside)
    made = make_tokenizer(header(tmp_path, metadata | {"scores": scores}))
    assert json.loads(made.to_str())["model"]["merges"] == [list(pair) for pair in expected]


@pytest.mark.parametrize("others", [[], ["other"]])
def test_texts_with_one_hash_are_refused(tmp_path, others):
    """A Thue-Morse word and its complement have one polynomial hash modulo 2^64, whatever its odd base."""
    word = "".join("ab"[number.bit_count() % 2] for number in range(2048))
    other = word.translate(str.maketrans("ab", "ba"))
    tokens = ["<unk>", "a", "b", "x", word, other, f"x{word}", *[f"x{other}" for _ in others]]
    metadata = {"model": "llama", "tokens": tokens, "token_type": [UNKNOWN, *[NORMAL] * (len(tokens) - 1)]}
    refused(make_tokenizer, header(tmp_path, metadata | {"add_bos_token": False}), match=r"model\.gguf: ")
