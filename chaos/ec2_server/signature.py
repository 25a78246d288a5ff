"""Who calls, and where: AWS's signature, version 4, checked as AWS checks it. Pure; may not do I/O or read a clock.

The caller shows by its signature that it holds the secret of an access key. Region and service are in the scope that it
signed, so that one address answers for all regions.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from chaos.ec2_server.state import Account, Key, Refusal

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/(\d{8})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)
WHO = "AWS was not able to validate the provided access credentials"


@dataclass(frozen=True, slots=True)
class Request:
    """What came over the wire; names of headers in small letters."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Scope:
    """What a caller signed for."""

    key: str
    date: str
    region: str
    service: str
    signed: tuple[str, ...]
    signature: str


def scope_of(request: Request) -> Scope | None:
    """What the request says it was signed for; None when it does not say."""
    found = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
    if found is None:
        return None
    key, date, region, service, signed, signature = found.groups()
    return Scope(key, date, region, service, tuple(signed.split(";")), signature)


def check(request: Request, scope: Scope | None, account: Account, now_s: float) -> None:
    """Raises Refusal for anybody who may not call."""
    if scope is None:
        raise Refusal("MissingAuthenticationToken", "The request is not signed", 403)
    key = account.keys.get(scope.key)
    if key is None or request.headers.get("x-amz-security-token", "") != key.session:
        raise Refusal("AuthFailure", WHO, 401)
    if now_s >= key.expires_at_s:
        raise Refusal("RequestExpired", "Request has expired.")
    if not hmac.compare_digest(signature(request, scope, key), scope.signature):
        raise Refusal("SignatureDoesNotMatch", "The request signature does not match the signature provided.", 403)
    if abs(_signed_at_s(request) - now_s) > account.skew_s:
        raise Refusal("RequestExpired", "Request has expired: the time it was signed at is not now.")
    if scope.region not in account.regions:
        raise Refusal("AuthFailure", f"{WHO}: no region {scope.region!r}", 401)


def signature(request: Request, scope: Scope, key: Key) -> str:
    """The signature that the holder of `key` gives to the request."""
    parts = urlsplit(request.url)
    headers = {"host": parts.netloc} | dict(request.headers)
    lines = [f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in scope.signed]
    payload = hashlib.sha256(request.body).hexdigest()
    whole = (request.method, parts.path or "/", parts.query, "".join(lines), ";".join(scope.signed), payload)
    digest = hashlib.sha256("\n".join(whole).encode()).hexdigest()
    where = f"{scope.date}/{scope.region}/{scope.service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{headers.get('x-amz-date', '')}\n{where}\n{digest}"
    made = f"AWS4{key.secret}".encode()
    for part in (*where.split("/"), text):
        made = hmac.new(made, part.encode(), hashlib.sha256).digest()
    return made.hex()


def _signed_at_s(request: Request) -> float:
    try:
        moment = datetime.strptime(request.headers.get("x-amz-date", "") + "+0000", "%Y%m%dT%H%M%SZ%z")
    except ValueError:
        return float("-inf")
    return moment.timestamp()
