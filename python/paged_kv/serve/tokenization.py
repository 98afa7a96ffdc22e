"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from paged_kv.arguments import shown
from paged_kv.serve.fields import BodyFields
from paged_kv.serve.openai_chat import read_conversation
from paged_kv.serve.served_model import ServedModel


def tokenize(body: BodyFields, model: ServedModel) -> dict[str, Any]:
    """A request to /tokenize, of a text or a conversation, and its answer. Raises as `read_chat`."""
    model.check_name(body)
    is_chat = "messages" in body
    special = body.flag("add_special_tokens", not is_chat)
    body.refuse("chat_template")
    body.ignore(("mm_processor_kwargs", "media_io_kwargs"))
    if is_chat:
        tokens = model.tokens("messages", read_conversation(body, model).prompt(), special=special)
    else:
        tokens = model.tokens("prompt", body.text("prompt"), special=special)
    with_texts = body.flag("return_token_strs", False)
    body.end()
    names = [model.tokenizer.token_name(token) for token in tokens] if with_texts else None
    return {"count": len(tokens), "max_model_len": model.most_tokens, "tokens": list(tokens), "token_strs": names}


def detokenize(body: BodyFields, model: ServedModel) -> dict[str, Any]:
    """A request to /detokenize, and its answer. Raises as `read_chat`."""
    model.check_name(body)
    tokens = body.any("tokens")
    if not isinstance(tokens, list):
        raise body.error("tokens", f"expected a list of token ids, got {shown(tokens)}")
    body.end()
    return {"prompt": model.text(model.tokens("tokens", tokens)) if tokens else ""}
