"""EC2's Query protocol, both ways, by the service model that botocore itself reads.

`decode` turns a form body into the parameters that the caller gave to boto3, `encode` turns an answer in boto3's own
words into the XML that botocore parses. Pure; may not do I/O but for loading the model once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import botocore.session

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


@cache
def model(service: str = "ec2") -> Any:
    """botocore's model of a service."""
    return botocore.session.get_session().get_service_model(service)


def decode(body: bytes | str) -> tuple[str, dict[str, Any]]:
    """Action and parameters of a request body; unknown actions come with no parameters.

    Raises ValueError, TypeError, KeyError or AttributeError for a body of another shape.
    """
    text = body.decode() if isinstance(body, bytes) else body
    pairs = dict(parse_qsl(text, keep_blank_values=True))
    action = pairs.pop("Action", "")
    pairs.pop("Version", None)
    if action not in model().operation_names:
        return action, {}
    shape = model().operation_model(action).input_shape
    return action, (_value(shape, _tree(pairs)) if shape is not None else {})


def _tree(pairs: Mapping[str, str]) -> dict[str, Any]:
    """``A.1.B=x`` as nested dicts."""
    root: dict[str, Any] = {}
    for key, value in pairs.items():
        node, parts = root, key.split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = value
    return root


def _value(shape: Any, raw: Any) -> Any:
    kind = shape.type_name
    if kind == "structure":
        names = {name: _query_name(name, member) for name, member in shape.members.items()}
        return {name: _value(shape.members[name], raw[key]) for name, key in names.items() if key in raw}
    if kind == "list":
        return [_value(shape.member, raw[key]) for key in sorted(raw, key=int)]
    if kind in ("integer", "long"):
        return int(raw)
    if kind in ("float", "double"):
        return float(raw)
    if kind == "timestamp":
        return datetime.fromisoformat(raw).timestamp()
    return raw == "true" if kind == "boolean" else raw


def missing(action: str, params: Mapping[str, Any], service: str = "ec2") -> str:
    """The first parameter that `action` needs and `params` lacks; empty when none is."""
    shape = model(service).operation_model(action).input_shape
    return next((name for name in shape.required_members if name not in params), "") if shape is not None else ""


def _query_name(name: str, shape: Any) -> str:
    rules = shape.serialization
    if "queryName" in rules:
        return str(rules["queryName"])
    wire = str(rules.get("name", name))
    return wire[0].upper() + wire[1:]


def encode(action: str, answer: Mapping[str, Any], request_id: str) -> bytes:
    """The XML of an answer to `action`, given in boto3's words. Raises KeyError for a word that the model lacks."""
    shape = model().operation_model(action).output_shape
    inner = "".join(_members(shape, answer)) if shape is not None else "<return>true</return>"
    text = f'<{action}Response xmlns="{NAMESPACE}"><requestId>{request_id}</requestId>{inner}</{action}Response>'
    return f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()


def _members(shape: Any, values: Mapping[str, Any]) -> Iterable[str]:
    for name, value in values.items():
        if value is None:
            continue
        member = shape.members[name]
        tag = member.serialization.get("name", name)
        yield f"<{tag}>{_text(member, value)}</{tag}>"


def _text(shape: Any, value: Any) -> str:
    if shape.type_name == "structure":
        return "".join(_members(shape, value))
    if shape.type_name == "list":
        tag = shape.member.serialization.get("name", "item")
        return "".join(f"<{tag}>{_text(shape.member, each)}</{tag}>" for each in value)
    if shape.type_name == "timestamp":
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return str(value).lower() if isinstance(value, bool) else escape(str(value))


def error(code: str, message: str, request_id: str) -> bytes:
    """EC2's error document."""
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>{request_id}</RequestID></Response>"
    ).encode()
