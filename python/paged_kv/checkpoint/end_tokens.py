"""Tokens that end a text, known by their texts: files often name one of several, or the wrong one.

Texts and exceptions are those of llama.cpp (`special_eog_ids` of `src/llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~[",
)  # fmt: skip
FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""End tokens of models that fill gaps in code: the first that is there ends a text, where a file names none by this
key.
"""
END_TEXTS = frozenset(_ENDS).union(*FILL_IN_ENDS.values())


def end_tokens(
    ids: Mapping[str, int], named: Iterable[int] = (), fill_in: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """The tokens that end a text: those that are named, in their order, then those that are known by their texts.

    Args:
        ids: Ids by texts, of a whole vocabulary or of those in `END_TEXTS` that it has.
        named: Tokens that a file says to end a text.
        fill_in: Tokens that a file names by the keys of `FILL_IN_ENDS`.
    """
    by_text = {ids[text] for text in _ENDS if text in ids}
    for key, texts in FILL_IN_ENDS.items():
        there = [ids[text] for text in texts if text in ids]
        by_text.update([fill_in[key]] if fill_in and key in fill_in else there[:1])
    tokens = dict.fromkeys([*named, *sorted(by_text)])
    # These end a part of a message, which goes on, and a stretch of markup.
    if {"<|call|>", "<|calls|>"} & ids.keys() and {"<|return|>", "<|flush|>"} & ids.keys():
        tokens.pop(ids.get("<|end|>", -1), None)
    if "<|tool_response>" in ids:
        tokens.pop(ids.get("</s>", -1), None)
    return tuple(tokens)
