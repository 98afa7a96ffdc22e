"""Splits of a text before byte-level BPE, by the names of `tokenizer.ggml.pre` in GGUF files.

Names, expressions and flags are those of llama.cpp (`src/llama-vocab.cpp`). Where its comments give the expression of
the model's own tokenizer, which its library cannot compile, that one is here: tekken and gpt-4o treat marks and the
case of letters beyond ASCII otherwise, kimi-k2 ends words at capitals. Its flag for spaces before punctuation is not
here: it is for whole texts, and texts are decoded token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN_KANA = "[一-龥\u3040-\u30ff]+"
_HAN_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
_SENTENCES = " ?[^(\\s|.,!?…。\uff0c、।\u06d4،)]+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_ASCII_SIGN_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
# Letters of scripts that have a case, as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _cl100k(digits: str, contractions: str = f"{_CONTRACTIONS}|", letters: str = r"\p{L}", signs: str = _SIGNS) -> str:
    return rf"{contractions}{_BEFORE}{letters}+|{digits}|{signs}[\r\n]*|{_LINES}"


def _cased(after: str, digits: str, upper: str = _UPPER, lower: str = _LOWER, ends: str = r"[\r\n/]*") -> str:
    """Words that end where a capital follows, as Tekken, o200k and Kimi have them."""
    words = f"{_BEFORE}{upper}*{lower}+{after}|{_BEFORE}{upper}+{lower}*{after}"
    return rf"{words}|{digits}|{_SIGNS}{ends}|{_LINES}"


@dataclass(frozen=True)
class Split:
    """The steps of a text before byte-level BPE."""

    expressions: tuple[str, ...]
    """Each splits what those before it have left whole."""
    composed: bool = False
    """True if the text is normalised to NFC first."""
    whole_words: bool = False
    """A word that is a token is that token, whatever merges would give."""
    begins: bool = False
    """A text begins with its token where the file does not say."""


_UPPER_NOT_HAN, _LOWER_NOT_HAN = (rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", _UPPER_NOT_HAN, _LOWER_NOT_HAN, r"[\r\n]*")
_CL100K, _QWEN2 = _cl100k(r"\p{N}{1,3}"), _cl100k(r"\p{N}")
_RULES = {
    "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling": Split((_GPT2,)),
    # llama.cpp's own, for files that name no other.
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "refact smollm starcoder command-r codeshell exaone minerva-7b mellum2": Split((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split(
        (_CL100K,), whole_words=True, begins=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Split((_CL100K,)),
    "glm4 glm5": Split((_CL100K,), whole_words=True),
    "minicpm5": Split((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), whole_words=True),
    "qwen2 deepseek-r1-qwen": Split((_QWEN2,), composed=True),
    "megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2": Split((_QWEN2,)),
    "qwen35": Split((_cl100k(r"\p{N}", letters=r"[\p{L}\p{M}]", signs=r" ?[^\s\p{L}\p{M}\p{N}]+"),)),
    "ufakzeka": Split((_cl100k(r"\p{N}", ""),)),
    "bailingmoe bailingmoe2 llada-moe": Split(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_BEFORE}\p{{L}}+|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|{_SPACES}",)
    ),
    "seed-coder": Split((rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)),
    "deepseek-llm": Split(
        (
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-。]+",
            r"\s+$",
            _HAN_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(
        (
            r"\p{N}{1,3}",
            _HAN_KANA,
            rf"{_ASCII_SIGN_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
        )
    ),
    "tekken": Split((_cased("", r"\p{N}"),), whole_words=True, begins=True),
    "gpt-4o llama4 kanana2 minimax-m2 talkie": Split((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
    "kimi-k2": Split((rf"\p{{Han}}+|{_KIMI}",)),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "poro-chat bloom gpt3-finnish": Split((_SENTENCES,)),
    "viking": Split((_SENTENCES, r"\p{N}")),
}
SPLITS = {name: split for names, split in _RULES.items() for name in names.split()}
"""By the names of `tokenizer.ggml.pre`."""
