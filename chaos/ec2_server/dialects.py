"""How each service speaks: EC2 and STS in Query and XML, SQS and Service Quotas in JSON. Pure; may not do I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chaos.ec2_server import codec, signals
from chaos.ec2_server.actions import ACTIONS
from chaos.ec2_server.call import Action
from chaos.ec2_server.signature import Request

XML = "text/xml;charset=UTF-8"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One service. `decode` raises ValueError, TypeError, KeyError or AttributeError for what it can not read."""

    actions: Mapping[str, Action]
    decode: Callable[[Request], tuple[str, dict[str, Any]]]
    missing: Callable[[str, Mapping[str, Any]], str]
    encode: Callable[[str, Mapping[str, Any], str], bytes]
    error: Callable[[str, str, str], bytes]
    media: str


def _target(request: Request) -> tuple[str, dict[str, Any]]:
    params = json.loads(request.body or b"{}")
    if not isinstance(params, dict):
        raise ValueError("the body is not an object")
    return request.headers.get("x-amz-target", "").rpartition(".")[2], params


def _json(name: str, actions: Mapping[str, Action], version: str) -> Dialect:
    def missing(action: str, params: Mapping[str, Any]) -> str:
        return codec.missing(action, params, name)

    def encode(_action: str, answer: Mapping[str, Any], _request_id: str) -> bytes:
        return json.dumps(answer).encode()

    def error(code: str, message: str, _request_id: str) -> bytes:
        return json.dumps({"__type": code, "message": message}).encode()

    return Dialect(actions, _target, missing, encode, error, f"application/x-amz-json-{version}")


def _sts(action: str, answer: Mapping[str, Any], request_id: str) -> bytes:
    inner = "".join(f"<{key}>{value}</{key}>" for key, value in answer.items())
    meta = f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>"
    return (
        f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<{action}Result>{inner}</{action}Result>{meta}</{action}Response>"
    ).encode()


def _sts_error(code: str, message: str, request_id: str) -> bytes:
    inner = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
    return f"<ErrorResponse>{inner}<RequestId>{request_id}</RequestId></ErrorResponse>".encode()


DIALECTS: Mapping[str, Dialect] = {
    "ec2": Dialect(ACTIONS, lambda r: codec.decode(r.body), codec.missing, codec.encode, codec.error, XML),
    "sqs": _json("sqs", signals.SQS, "1.0"),
    "servicequotas": _json("service-quotas", signals.SERVICE_QUOTAS, "1.1"),
    "sts": Dialect(signals.STS, lambda r: (codec.decode(r.body)[0], {}), lambda *_: "", _sts, _sts_error, "text/xml"),
}
