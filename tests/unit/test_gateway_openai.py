"""The OpenAI dialect: what is accepted, and how each wrong body is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.gateway.openai import MAX_TOKENS, Answer, ApiError, Call, parse, usage

HI = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> Call:
    return parse(json.dumps({"model": "m", "messages": HI} | body).encode(), chat=True)


def text(**body: Any) -> Call:
    return parse(json.dumps({"model": "m", "prompt": "hi"} | body).encode(), chat=False)


def test_a_chat_without_a_limit_leaves_the_limit_to_the_engine() -> None:
    assert chat().engine == {"messages": HI, "priority": 0}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "system", "content": parts}]).engine["messages"] == [
        {"role": "system", "content": "ab"}
    ]


def test_null_means_absent() -> None:
    names = ("n", "max_tokens", "temperature", "stop", "stream", "stream_options", "tools", "user", "response_format")
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            b"{",
            "The body is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (b"\xff", "The body is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[]", "The body must be a JSON object, not an array."),
        (b"null", "The body must be a JSON object, not null."),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(raw, chat=True)
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_json"}
    assert (caught.value.status, caught.value.body) == (400, {"error": error})


def test_json_too_deep_to_read_is_refused() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse(b"[" * 100_000, chat=True)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": None}, "model", "'model' is required: a string, \"unit/service\" or a service's name."),
        ({"model": 3}, "model", "'model' is required: a string, \"unit/service\" or a service's name."),
        ({"messages": []}, "messages", "'messages' is required: a non-empty array of {role, content}."),
        ({"messages": "hi"}, "messages", "'messages' is required: a non-empty array of {role, content}."),
        ({"messages": ["hi"]}, "messages[0]", "'messages[0]' must be an object, not a string."),
        (
            {"messages": [{"role": "boss", "content": "x"}]},
            "messages[0].role",
            "'messages[0].role' must be one of system, developer, user, assistant, tool.",
        ),
        (
            {"messages": [*HI, {"role": "user"}]},
            "messages[1].content",
            "'messages[1].content' must be a string or an array of text parts.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            '\'messages[0].content[0]\' must be {"type": "text", "text": string}: these models read text only.',
        ),
        ({"n": 2}, "n", "'n' must be 1: one choice per request is supported."),
        ({"n": True}, "n", "'n' must be 1: one choice per request is supported."),
        ({"tools": [{}]}, "tools", "'tools' is not supported."),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            '\'response_format\' must be {"type": "text"}.',
        ),
        ({"max_tokens": 0}, "max_tokens", f"'max_tokens' is 0; it must lie between 1 and {MAX_TOKENS}."),
        ({"max_tokens": "5"}, "max_tokens", "'max_tokens' must be an integer, not a string."),
        ({"max_tokens": True}, "max_tokens", "'max_tokens' must be an integer, not a boolean."),
        (
            {"max_completion_tokens": MAX_TOKENS + 1},
            "max_completion_tokens",
            f"'max_completion_tokens' is {MAX_TOKENS + 1}; it must lie between 1 and {MAX_TOKENS}.",
        ),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "'max_tokens' and 'max_completion_tokens' differ: send one of them.",
        ),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens", "'min_tokens' is above 'max_tokens'."),
        ({"temperature": "hot"}, "temperature", "'temperature' must be a number, not a string."),
        ({"temperature": float("nan")}, "temperature", "'temperature' is nan; it must lie between 0.0 and 2.0."),
        ({"temperature": 2.5}, "temperature", "'temperature' is 2.5; it must lie between 0.0 and 2.0."),
        ({"ignore_eos": 1}, "ignore_eos", "'ignore_eos' must be true or false, not a number."),
        ({"stop": [""]}, "stop", "'stop' must be a non-empty string or an array of at most 4 of them."),
        ({"stop": ["a"] * 5}, "stop", "'stop' must be a non-empty string or an array of at most 4 of them."),
        ({"priority": 1001}, "priority", "'priority' is 1001; it must lie between -1000 and 1000."),
        ({"user": 5}, "user", "'user' must be a string, not a number."),
        ({"stream": "yes"}, "stream", "'stream' must be true or false, not a string."),
        ({"stream_options": {}}, "stream_options", "'stream_options' is only allowed with 'stream': true."),
        ({"stream": True, "stream_options": []}, "stream_options", "'stream_options' must be an object, not an array."),
    ],
)
def test_wrong_chats_name_the_field_and_the_remedy(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**body)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"], error["message"]) == (400, param, message)


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]], [7]])
def test_a_prompt_may_be_tokens(prompt: Any) -> None:
    assert text(prompt=prompt).engine["prompt_token_ids"] == (prompt[0] if isinstance(prompt[0], list) else prompt)
    assert "prompt" not in text(prompt=prompt).engine


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", "b"], [1, -2], [1, 2.0], [True], [[1], [2]], [2**31]])
def test_a_completion_takes_one_prompt(prompt: Any) -> None:
    with pytest.raises(ApiError, match="'prompt' is required: one string"):
        text(prompt=prompt)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "model",
    "messages",
    "n",
    "max_tokens",
    "min_tokens",
    "stop",
    "temperature",
    "stream",
    "stream_options",
    "user",
]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_body_is_either_a_call_or_a_400(body: dict[str, Any]) -> None:
    refusal = None
    try:
        assert chat(**body).engine["messages"]
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert set(json.loads(refusal.json())["error"]) == {"message", "type", "param", "code"}


@given(st.text())
def test_every_text_survives_its_frame(piece: str) -> None:
    for call in (chat(stream=True), text(stream=True, stream_options={"include_usage": True})):
        frame = Answer(call, "id", 7).text(piece)
        assert frame.startswith(b"data: ")
        assert frame.count(b"\n") == 2
        assert frame.endswith(b"\n\n")
        choice = json.loads(frame[6:])["choices"][0]
        assert (choice["delta"]["content"] if call.chat else choice["text"]) == piece


def test_a_completions_frames() -> None:
    answer = Answer(text(stream=True), "id", 7)
    assert answer.first() == b""
    chunk = {"id": "id", "object": "text_completion", "created": 7, "model": "m"}
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    assert json.loads(answer.text("a")[6:]) == chunk | {"choices": [choice]}
    last, done = answer.last("stop", usage(1, 2)).decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last[6:]) == chunk | {"choices": [choice | {"text": "", "finish_reason": "stop"}]}
