"""The OpenAI dialect: JSON bodies in, calls out; engine chunks in, frames and bodies out.

Pure translation. May not do I/O, read a clock, or know of Ray, queues or slots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

MAX_BODY_BYTES = 4 * 2**20
MAX_TOKENS = 131_072  # above any model's context here; the engine refuses what its own context cannot hold
COMPLETIONS_DEFAULT_MAX_TOKENS = 16  # as OpenAI's
SESSION_CHARS = 2048
DONE = b"data: [DONE]\n\n"


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape. `retry_after_s` becomes a Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def json(self) -> bytes:
        """The body: ``{"error": {"message", "type", "param", "code"}}``."""
        return json.dumps(self.body).encode()


def rejected(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the caller's request is wrong and will be wrong again."""
    return ApiError(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One valid request. `engine` is the engine's request without its `request_id`; lower `priority` goes first."""

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    priority: int
    engine: dict[str, Any]


# ---- in -------------------------------------------------------------------------------------------------------------
def parse(raw: bytes, *, chat: bool, service: str | None = None) -> Call:
    """The call in a request body. Raises ApiError (400) that names the first wrong field.

    A body that comes with a `service` of its own (by path, header or key) may leave out `model`.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise rejected(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise rejected(f"The body must be a JSON object, not {_json_type(body)}.", code="invalid_json")
    model = body.get("model") or service
    if not isinstance(model, str) or not model:
        raise rejected("'model' is required: a string, \"unit/service\" or a service's name.", "model")
    _refuse_unsupported(body)
    engine: dict[str, Any] = {"messages": _messages(body)} if chat else _prompt(body)
    for name, read in _PASSED_ON.items():
        if body.get(name) is not None:
            engine[name] = read(name, body[name])
    _limit_tokens(body, engine, chat=chat)
    stream = _bool("stream", body.get("stream") or False)
    _optional(body, "user", str, "a string")
    return Call(
        chat=chat,
        model=model,
        stream=stream,
        include_usage=_include_usage(body, stream=stream),
        priority=engine.setdefault("priority", 0),
        engine=engine,
    )


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise rejected("'messages' is required: a non-empty array of {role, content}.", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]


def _message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise rejected(f"'{where}' must be an object, not {_json_type(item)}.", where)
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise rejected(f"'{where}.role' must be one of {', '.join(_ROLES)}.", f"{where}.role")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise rejected(f"'{where}.content' must be a string or an array of text parts.", f"{where}.content")
    return {"role": role, "content": content}


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise rejected(f'\'{where}\' must be {{"type": "text", "text": string}}: these models read text only.', where)


def _prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """One text, or one text's tokens; either may stand in an array of its own."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return {"prompt_token_ids": prompt}
    text = "'prompt' is required: one string, or one array of token ids (several prompts are not supported)."
    raise rejected(text, "prompt")


def _limit_tokens(body: Mapping[str, Any], engine: dict[str, Any], *, chat: bool) -> None:
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise rejected("'max_tokens' and 'max_completion_tokens' differ: send one of them.", "max_tokens")
    name = "max_tokens" if new is None else "max_completion_tokens"
    value = old if new is None else new
    if value is not None:
        engine["max_tokens"] = _int_between(1, MAX_TOKENS)(name, value)
    elif not chat:
        engine["max_tokens"] = COMPLETIONS_DEFAULT_MAX_TOKENS
    if engine.get("min_tokens", 0) > engine.get("max_tokens", MAX_TOKENS):
        raise rejected("'min_tokens' is above 'max_tokens'.", "min_tokens")


def _include_usage(body: Mapping[str, Any], *, stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise rejected(f"'stream_options' must be an object, not {_json_type(options)}.", "stream_options")
    if not stream:
        raise rejected("'stream_options' is only allowed with 'stream': true.", "stream_options")
    return _bool("stream_options.include_usage", options.get("include_usage") or False)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Say no to what would be ignored: two choices, tools or log-probabilities would be missed by whoever asked."""
    for name in ("n", "best_of"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or value != 1):
            raise rejected(f"'{name}' must be 1: one choice per request is supported.", name, "unsupported_value")
    for name in ("tools", "functions", "logit_bias", "logprobs", "top_logprobs", "echo", "suffix"):
        if body.get(name):
            raise rejected(f"'{name}' is not supported.", name, "unsupported_parameter")
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise rejected('\'response_format\' must be {"type": "text"}.', "response_format", "unsupported_value")


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _optional(body: Mapping[str, Any], name: str, kind: type, what: str) -> None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise rejected(f"'{name}' must be {what}, not {_json_type(value)}.", name)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise rejected(f"'{name}' must be true or false, not {_json_type(value)}.", name)
    return value


def _int_between(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise rejected(f"'{name}' must be an integer, not {_json_type(value)}.", name)
        if not low <= value <= high:
            raise rejected(f"'{name}' is {value}; it must lie between {low} and {high}.", name)
        return value

    return read


def _number_between(low: float, high: float) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise rejected(f"'{name}' must be a number, not {_json_type(value)}.", name)
        if not low <= value <= high:  # false for NaN, too
            raise rejected(f"'{name}' is {value}; it must lie between {low} and {high}.", name)
        return float(value)

    return read


def _stop(name: str, value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        raise rejected(f"'{name}' must be a non-empty string or an array of at most 4 of them.", name)
    return stops


_ROLES = ("system", "developer", "user", "assistant", "tool")
_PASSED_ON: dict[str, Callable[[str, Any], Any]] = {
    "min_tokens": _int_between(0, MAX_TOKENS),
    "temperature": _number_between(0.0, 2.0),
    "top_p": _number_between(0.0, 1.0),
    "seed": _int_between(-(2**63), 2**63 - 1),
    "presence_penalty": _number_between(-2.0, 2.0),
    "frequency_penalty": _number_between(-2.0, 2.0),
    "ignore_eos": _bool,
    "stop": _stop,
    "priority": _int_between(-1000, 1000),
}


def session(request: Mapping[str, Any]) -> str:
    """What requests with a like beginning have in common: a conversation's first messages, a text's first part."""
    if "messages" in request:
        turns = [message["role"] for message in request["messages"]]
        opening = request["messages"][: turns.index("user") + 1 if "user" in turns else 1]
        text = "".join(message["content"] for message in opening)
    else:
        text = request["prompt"] if "prompt" in request else repr(request["prompt_token_ids"][:SESSION_CHARS])
    return blake2b(text[:SESSION_CHARS].encode(), digest_size=8).hexdigest()


# ---- out ------------------------------------------------------------------------------------------------------------
class Answer:
    """Builds one answer: SSE frames by hand (nothing but the text is encoded per chunk), or one body."""

    def __init__(self, call: Call, answer_id: str, created_s: int) -> None:
        self.call = call
        self.base = {"id": answer_id, "object": "", "created": created_s, "model": call.model}
        chunk = self.base | {"object": "chat.completion.chunk" if call.chat else "text_completion"}
        self._head = b"data: " + json.dumps(chunk).encode()[:-1] + b', "choices": '
        self._end = b', "usage": null}\n\n' if call.include_usage else b"}\n\n"
        choice = '[{"index": 0, "delta": {"content": ' if call.chat else '[{"index": 0, "text": '
        self._text_head = self._head + choice.encode()
        close = b"}" if call.chat else b""
        self._text_tail = close + b', "logprobs": null, "finish_reason": null}]' + self._end

    def first(self) -> bytes:
        """What comes before the first text: chat's role frame; completions have none."""
        if not self.call.chat:
            return b""
        choice = (
            b'[{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]'
        )
        return self._head + choice + self._end

    def text(self, text: str) -> bytes:
        """One frame of text."""
        return self._text_head + json.dumps(text).encode() + self._text_tail

    def last(self, finish_reason: str, usage: Mapping[str, int]) -> bytes:
        """The closing frames: finish reason, usage when asked for, ``[DONE]``."""
        payload = '"delta": {}' if self.call.chat else '"text": ""'
        choice = f'[{{"index": 0, {payload}, "logprobs": null, "finish_reason": {json.dumps(finish_reason)}}}]'
        frames = self._head + choice.encode() + self._end
        if self.call.include_usage:
            frames += self._head + b'[], "usage": ' + json.dumps(usage).encode() + b"}\n\n"
        return frames + DONE

    def body(self, text: str, finish_reason: str, usage: Mapping[str, int]) -> bytes:
        """The whole answer of a call without streaming."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.call.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.call.chat else "text_completion"
        return json.dumps(self.base | {"object": kind, "choices": [choice], "usage": usage}).encode()


def usage(input_tokens: int, output_tokens: int) -> dict[str, int]:
    """OpenAI's usage block."""
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }


def error_frame(error: ApiError) -> bytes:
    """An error after the first token: one SSE event, and no ``[DONE]``, so that it is not taken for whole."""
    return b"data: " + error.json() + b"\n\n"
