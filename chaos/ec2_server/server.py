"""One EC2: bodies in, answers out, on whichever clock it is given. May not do I/O or read a clock itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from chaos.ec2_server import codec
from chaos.ec2_server.actions import ACTIONS, Call
from chaos.ec2_server.faults import Fault
from chaos.ec2_server.state import Account, Refusal, Region

HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>Bad Gateway</h1></body></html>"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; `broken` says that the client does not get it: the connection is lost, or nothing ever comes."""

    status: int
    body: bytes
    broken: Literal["", "lost", "hang"] = ""


@dataclass
class Ec2Server:
    """`lag_s()` is how old the next listing is; by default what its region says. `requests` counts what was
    sent, by region. Thread-safe.
    """

    account: Account
    now_s: Callable[[], float]
    faults: list[Fault] = field(default_factory=list)
    lag_s: Callable[[Region], float] = field(default=lambda region: region.lag_s)
    requests: Counter[str] = field(default_factory=Counter)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def handle(self, region: str, body: bytes | str) -> Reply:
        """Answer one request."""
        action, params = codec.decode(body)
        with self._lock:
            self.requests[region] += 1
            fault = next((each for each in self.faults if each.takes(action)), None)
            if fault is None:
                return self._answer(region, action, params)
            return self._spoilt(fault, region, action, params)

    def _spoilt(self, fault: Fault, region: str, action: str, params: dict[str, object]) -> Reply:
        refused = Reply(fault.status, codec.error(fault.code, "injected", self._request_id()))
        if fault.kind in ("error", "html", "lost_before"):
            self.account.regions[region].log.append((self.now_s(), action))
            if fault.kind == "html":
                return Reply(502, HTML)
            return refused if fault.kind == "error" else Reply(0, b"", "lost")
        done = self._answer(region, action, params)
        if fault.kind == "duplicate":
            return self._answer(region, action, params)
        if fault.kind == "error_after":
            return refused
        if fault.kind == "garbled":
            return Reply(done.status, done.body[: len(done.body) // 2])
        return Reply(0, b"", "hang" if fault.kind == "hang" else "lost")

    def _answer(self, name: str, action: str, params: dict[str, object]) -> Reply:
        region, now_s = self.account.regions[name], self.now_s()
        region.advance(now_s)
        request_id = self._request_id()
        try:
            region.admit(action, now_s)
            if action not in ACTIONS:
                raise Refusal("InvalidAction", f"The action {action} is not valid for this web service.")
            at_s = now_s - self.lag_s(region)
            return Reply(200, codec.encode(action, ACTIONS[action](Call(region, params, now_s, at_s)), request_id))
        except Refusal as refusal:
            return Reply(refusal.status, codec.error(refusal.code, str(refusal), request_id))

    def _request_id(self) -> str:
        return f"{self.requests.total():08x}-0000-0000-0000-000000000000"
