"""Odd texts for tokenizers: pieces of every kind beside each other."""

import random
from pathlib import Path

SPECIAL = ("<|begin|>", "<|end of text|>", "</s>")
USER = ("<tool_call>", "    ", "日本語")
TRAINING = [
    (Path(__file__).parents[2] / name).read_text() for name in ("README.md", "docs/architecture.md", "CONTRIBUTING.md")
] + [
    "It's we'RE they'll I'M don't 1234567 3.14 日本語の文章 Привет мир naïve café ﷺ नमस्ते 🎉👩‍👩‍👧 \r\n\r\n  \t x == y;"
] * 20


def odd_strings(count, seed=0):
    """Texts, the same for a seed."""
    pieces = [
        " ", "  ", "    ", "\t", "\n", "\r\n", "\n\n\n", "\u00a0", "\u2003", "\u3000", "\u0085", "\u200b", "\ufeff",
        "'s", "'LL", "'Re", "n't", "\u2019s", "1", "42", "1234567", "3.14", "१२३", "½", "Ⅷ", "²",
        "🎉", "👩‍👩‍👧", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🇩🇪", "a\u0301", "e\u0323\u0302", "\u0301", "é", "ﬁ", "Å", "Å",
        "日本語", "中文", "。", "カﾞ", "한국어", "Привет", "مرحبا", "नमस्ते", "ไทย", "ß", "İ", "ǅ", "𝄞", "\U0001d4b3",
        "def f(x):\n    return x[0] != {}", "</div>", "a->b", "...", "!!!", "``", "_", "\\", "/", "//", "!\n/",
        "$", "^~|+<=>",
        "\0", "\x01", "\x1b[31m", "\x7f", "\x80", "\ufffd", "\ufffe", "\U0010ffff", "\u2028",
        "▁", "▁▁", "Ġ", "Ċ", "<0x0A>", "<unk>", "<s>", "CamelCaseWord", "ABCdef", "iPhone", "XMLHttp",
        "the", " the", "The", " page", "aaaa", "aaaaaaa", "----",
        "tokens", *SPECIAL, *USER, "<|begin", "call>",
    ]  # fmt: skip
    choose = random.Random(seed)
    words = " ".join(TRAINING).split(" ")
    found = ["", *pieces, *TRAINING[:3]]
    while len(found) < count:
        kind = choose.random()
        if kind < 0.7:
            found.append("".join(choose.choices(pieces, k=choose.randint(1, 12))))
        elif kind < 0.85:
            found.append(choose.choice(["", " "]).join(choose.choices([*words, *pieces], k=choose.randint(1, 20))))
        else:
            limit = choose.choice([0x80, 0x500, 0x3000, 0x10000, 0x110000])
            codes = (choose.randrange(limit) for _ in range(choose.randint(1, 20)))
            found.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    return found
