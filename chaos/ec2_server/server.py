"""One EC2: requests in, answers out, on whichever clock it is given. May not do I/O or read a clock itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from chaos.ec2_server.call import Call
from chaos.ec2_server.dialects import DIALECTS, Dialect
from chaos.ec2_server.faults import Fault
from chaos.ec2_server.launch import DRY_RUN
from chaos.ec2_server.signature import Request, check, scope_of
from chaos.ec2_server.state import Account, Refusal, Region

LONGEST_POLL_S = 20.0
HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>Bad Gateway</h1></body></html>"
PAGE = b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body><p>Please log in.</p></body></html>'
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; `broken` says that the client does not get it: the connection is lost, or nothing ever comes.

    `wait_s` is how long the client would rather wait than have this one (an empty queue).
    """

    status: int
    body: bytes
    broken: Literal["", "lost", "hang"] = ""
    media: str = "text/html"
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, read as far as it can be."""

    dialect: Dialect
    region: str
    action: str
    params: dict[str, Any]


@dataclass
class Ec2Server:
    """`lag_s()` is how old the next listing is; by default what its region says. `requests` counts what was
    sent to EC2, by region. Thread-safe.
    """

    account: Account
    now_s: Callable[[], float]
    faults: list[Fault] = field(default_factory=list)
    lag_s: Callable[[Region], float] = field(default=lambda region: region.lag_s)
    requests: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def handle(self, request: Request) -> Reply:
        """Answer one request."""
        scope = scope_of(request)
        service = scope.service if scope is not None else "ec2"
        dialect = DIALECTS.get(service, DIALECTS["ec2"])
        with self.lock:
            if scope is not None and service == "ec2":
                self.requests[scope.region] += 1
            try:
                check(request, scope, self.account, self.now_s())
                assert scope is not None
                if service not in DIALECTS:
                    raise Refusal("InvalidAction", f"The service {service} is not served here.")
                action, params = _read(dialect, request)
            except Refusal as refusal:
                return self._refused(dialect, refusal)
            asked = _Asked(dialect, scope.region, action, params)
            fault = next((each for each in self.faults if each.takes(action)), None)
            return self._answer(asked) if fault is None else self._spoilt(fault, asked)

    def _spoilt(self, fault: Fault, asked: _Asked) -> Reply:
        refused = self._refused(asked.dialect, Refusal(fault.code, "injected", fault.status))
        if fault.kind in ("error", "html", "page", "lost_before"):
            self.account.regions[asked.region].log.append((self.now_s(), asked.action))
            if fault.kind == "html":
                return Reply(502, HTML)
            if fault.kind == "page":
                return Reply(200, PAGE)
            return refused if fault.kind == "error" else Reply(0, b"", "lost")
        done = self._answer(asked)
        if fault.kind == "duplicate":
            return self._answer(asked)
        if fault.kind == "error_after":
            return refused
        if fault.kind == "garbled":
            return Reply(done.status, done.body[: len(done.body) // 2], media=done.media)
        return Reply(0, b"", "hang" if fault.kind == "hang" else "lost")

    def _answer(self, asked: _Asked) -> Reply:
        region, now_s = self.account.regions[asked.region], self.now_s()
        region.advance(now_s)
        try:
            region.admit(asked.action, now_s)
            act = asked.dialect.actions.get(asked.action)
            if act is None:
                raise Refusal("InvalidAction", f"The action {asked.action} is not valid for this web service.")
            if missing := asked.dialect.missing(asked.action, asked.params):
                raise Refusal("MissingParameter", f"The request must contain the parameter {missing}")
            if asked.params.get("DryRun") and asked.action != "RunInstances":  # which looks at what it is given first
                raise Refusal(*DRY_RUN)
            answer = act(Call(region, asked.params, now_s, now_s - self.lag_s(region)))
        except Refusal as refusal:
            return self._refused(asked.dialect, refusal)
        except UNREADABLE as error:
            return self._refused(asked.dialect, Refusal("InvalidParameterValue", f"can not be read: {error}"))
        body = asked.dialect.encode(asked.action, answer, self._request_id())
        wait_s = 0.0 if answer else min(LONGEST_POLL_S, float(asked.params.get("WaitTimeSeconds", 0.0)))
        return Reply(200, body, media=asked.dialect.media, wait_s=wait_s)

    def _refused(self, dialect: Dialect, refusal: Refusal) -> Reply:
        body = dialect.error(refusal.code, str(refusal), self._request_id())
        return Reply(refusal.status, body, media=dialect.media)

    def _request_id(self) -> str:
        return f"{self.requests.total():08x}-0000-0000-0000-000000000000"


def _read(dialect: Dialect, request: Request) -> tuple[str, dict[str, Any]]:
    try:
        return dialect.decode(request)
    except UNREADABLE as error:
        raise Refusal("MalformedQueryString", f"The request can not be read: {error}") from error
