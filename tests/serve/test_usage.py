"""The tokens of a request as each API counts them: all of a prompt, those of it that were cached, and the new ones."""

import json

import pytest

from support.served import PAGE_SIZE, served
from support.tool_chats import GENERIC

PROMPT = "once upon a time, in the land of Egypt, " * 6
MESSAGES = [{"role": "user", "content": PROMPT}]


def openai(usage):
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    new = usage.get("completion_tokens", usage.get("output_tokens"))
    assert usage["total_tokens"] == prompt + new
    return prompt, details["cached_tokens"], new


def anthropic(usage):
    """Anthropic's `input_tokens` are those that no cache had."""
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached, usage["output_tokens"]


IN_STREAM = {"stream_options": {"include_usage": True}}
ROUTES = {
    # the body, what a stream asks for beside it, how to read the usage
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 5}, IN_STREAM, openai),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 5}, IN_STREAM, openai),
    "/v1/responses": ({"input": PROMPT, "max_output_tokens": 5}, {}, openai),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 5}, {}, anthropic),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_usage_has_the_cached_tokens(path, stream):
    body, of_stream, read = ROUTES[path]
    prompts = set()
    with served(template=GENERIC) as server:
        for is_cached in (False, True):
            before = server.engine.statistics.prompt_tokens
            answer = server.http.post(path, json=body | (of_stream | {"stream": True} if stream else {}))
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            usages = [each.get("response", each).get("usage") for each in (events if stream else [answer.json()])]
            prompt, cached, new = read([usage for usage in usages if usage][-1])
            prompts.add(prompt)
            assert (prompt - cached, new) == (server.engine.statistics.prompt_tokens - before, 5)
            assert cached == is_cached * ((prompt - 1) // PAGE_SIZE * PAGE_SIZE)
    assert len(prompts) == 1
