"""S3 inside the client's process: real boto3, conditional writes, listing in pages, a clock that a test moves.

What S3 does and moto, where it is asked, does too: a create over an object and a write over another etag answer 412, a
listing is sorted and paged, dates are S3's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cache
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from boto3.session import Session
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError

from autoscaler.adapters.s3_store import READ_ATTEMPTS, Store

PAGE = 1000
NS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class _Raw:
    """A body as urllib3 gives it."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self, *_: Any, **__: Any) -> Any:
        yield self._content

    def read(self, amt: int | None = None) -> bytes:
        taken = self._content if amt is None else self._content[:amt]
        self._content = self._content[len(taken) :]
        return taken


@dataclass
class FakeS3:
    """`objects` by key: (body, etag, written at). `trouble(method, key, done)` is called before and after each request
    takes effect, and may raise; `lost` names methods whose next answer is lost after the effect.
    """

    now_s: Callable[[], float]
    bucket: str = "journals"
    objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    trouble: Callable[[str, str, bool], None] = lambda *_: None
    page: int = PAGE

    def send(self, request: Any, **_: Any) -> AWSResponse:
        """botocore's hook."""
        url = urlsplit(request.url)
        key, query = self._key(url), parse_qs(url.query, keep_blank_values=True)
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        body = request.body if isinstance(request.body, bytes) else (request.body.read() if request.body else b"")
        body = _plain(body) if headers.get("content-encoding") == "aws-chunked" else body
        self.trouble(request.method, key, False)
        status, more, content = self._answer(request.method, key, query, headers, body)
        self.log.append((request.method, key, status))
        self.trouble(request.method, key, True)
        if request.method in self.lost:
            self.lost.remove(request.method)
            raise ConnectionClosedError(endpoint_url=request.url)
        return AWSResponse(request.url, status, {"date": formatdate(self.now_s(), usegmt=True)} | more, _Raw(content))

    def _key(self, url: Any) -> str:
        path = unquote(url.path).lstrip("/")
        return path if url.netloc.startswith(f"{self.bucket}.") else path.partition("/")[2]

    def _answer(
        self, method: str, key: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if method in self.refuse:
            return _error(*self.refuse[method])
        if method == "PUT":
            return self._put(key, headers, body)
        if method == "POST":
            for row in ElementTree.fromstring(body).iter(  # noqa: S314 - boto3 wrote it
                "{http://s3.amazonaws.com/doc/2006-03-01/}Key"
            ):
                self.objects.pop(row.text or "", None)
            return 200, {}, f"<DeleteResult {NS}/>".encode()
        if "list-type" in query:
            return self._list(query)
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        content, etag, at_s = self.objects[key]
        return 200, {"etag": etag, "last-modified": formatdate(at_s, usegmt=True)}, content

    def _put(self, key: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        known = self.objects.get(key)
        if headers.get("if-none-match") == "*" and known is not None:
            return _error(412, "PreconditionFailed")
        if "if-match" in headers and (known is None or known[1] != headers["if-match"]):
            return _error(412, "PreconditionFailed") if known else _error(404, "NoSuchKey")
        etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        self.objects[key] = (body, etag, self.now_s())
        return 200, {"etag": etag}, b""

    def _list(self, query: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = sorted(key for key in self.objects if key.startswith(query["prefix"][0]) and key > after)
        page, more = keys[: self.page], len(keys) > self.page
        rows = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in page)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        words = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
        return 200, {}, f"<ListBucketResult {NS}>{words}</ListBucketResult>".encode()

    def store(self, prefix: str = "prod") -> Store:
        """A store whose clients talk to this and to nothing else."""
        SWITCH.server = self
        return Store(self.bucket, prefix, _client(READ_ATTEMPTS), _client(1))


@dataclass
class _Switch:
    server: FakeS3 | None = None

    def send(self, request: Any, **more: Any) -> AWSResponse:
        assert self.server is not None
        return self.server.send(request, **more)


SWITCH = _Switch()


@cache
def _client(attempts: int) -> Any:
    """Slow to make, so made once."""
    rules = {"mode": "standard", "total_max_attempts": attempts}
    session = Session(aws_access_key_id="test", aws_secret_access_key="test")
    made = session.client("s3", region_name="us-east-1", config=Config(retries=rules))
    made.meta.events.register("before-send.s3", SWITCH.send)
    return made


def _plain(body: bytes) -> bytes:
    """The content of an upload that boto3 sends in one chunk with a checksum behind it."""
    size, _, rest = body.partition(b"\r\n")
    return rest[: int(size, 16)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()
