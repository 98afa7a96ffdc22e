"""LangChain's client of OpenAI's two APIs: a conversation with a tool, and an answer that has a schema."""

import jsonschema
import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from support.tool_chats import SCHEMAS, TOOLS, WEATHER


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(tools, request):
    return ChatOpenAI(
        model="demo",
        base_url="http://localhost/v1",
        api_key="none",
        http_client=tools.http,
        use_responses_api=request.param,
        store=False,
        max_tokens=200,
        temperature=0,
        max_retries=0,
        stream_usage=True,
        extra_body={"seed": 3},
    )


def ask(chat, messages, stream):
    if not stream:
        return chat.invoke(messages)
    first, *others = chat.stream(messages)
    return sum(others, first)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(chat, stream):
    messages = [SystemMessage("Be brief."), HumanMessage("What is the weather?")]
    called = chat.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    for _ in range(2):
        answer = ask(called, messages, stream)
        (call,) = answer.tool_calls
        assert answer.invalid_tool_calls == []
        jsonschema.validate(call["args"], SCHEMAS[call["name"]])
        messages += [answer, ToolMessage("warm", tool_call_id=call["id"])]
    assert len({said.tool_call_id for said in messages if isinstance(said, ToolMessage)}) == 2
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    last = ask(chat.bind_tools(TOOLS, tool_choice="none"), messages, stream)
    assert (last.tool_calls, bool(last.text)) == ([], True)


def test_an_answer_has_its_schema(chat):
    jsonschema.validate(chat.with_structured_output(WEATHER | {"title": "weather"}).invoke("x"), WEATHER)
