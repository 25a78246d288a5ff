"""The server on a socket: what real boto3 with an ``endpoint_url`` talks to. Listens on loopback only.

Answers come from the same `Ec2Server` as in-process; here are only connections, limits, and the weather's own door
(`/weather`, JSON behind a bearer token). A lost answer closes the connection, a hanging one waits until the client
goes. May not know what a call means.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from chaos.ec2_server.server import Ec2Server, Reply
from chaos.ec2_server.signature import Request
from chaos.ec2_server.state import Refusal

HOST = "127.0.0.1"
MAX_BODY_BYTES = 1 << 20
MAX_CONNECTIONS = 64
IDLE_S = 60.0
HANG_S = 120.0
POLL_S = 0.25

Weather = Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]


@dataclass
class HttpServer:
    """`port` 0 is any free one. `weather` maps names to acts, which raise Refusal, ValueError or KeyError.

    Use as a context manager: inside, requests are answered in threads of their own.
    """

    core: Ec2Server
    port: int = 0
    weather: Weather = field(default_factory=dict)
    secret: str = ""
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._server = _Server((HOST, self.port), _handler(self))
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: Request) -> Reply:
        """What a request gets."""
        if request.method == "GET" and request.url.endswith("/healthz"):
            return _json(200, {"ok": True})
        _, _, name = request.url.rpartition("/weather/")
        if "/weather/" in request.url:
            return self._weather(name, request)
        return self._patiently(request)

    def _patiently(self, request: Request) -> Reply:
        """A long poll is asked again until there is something, or its time is over."""
        waited_s = 0.0
        while (reply := self.core.handle(request)).wait_s > waited_s and not self._closing.wait(POLL_S):
            waited_s += POLL_S
        return reply

    def _weather(self, name: str, request: Request) -> Reply:
        given = request.headers.get("authorization", "").encode()
        if not self.secret or not hmac.compare_digest(given, f"Bearer {self.secret}".encode()):
            return _json(401, {"code": "AuthFailure", "message": "wrong or missing bearer token"})
        act = self.weather.get(name)
        if act is None or request.method != "POST":
            return _json(404, {"code": "NotFound", "message": f"POST to one of: {', '.join(self.weather)}"})
        try:
            with self.core.lock:
                return _json(200, act(json.loads(request.body or b"{}")))
        except Refusal as refusal:
            return _json(refusal.status, {"code": refusal.code, "message": str(refusal)})
        except (ValueError, KeyError, TypeError) as error:
            return _json(400, {"code": "InvalidParameterValue", "message": f"{name}: {error!r}"})


def _json(status: int, answer: Mapping[str, Any]) -> Reply:
    return Reply(status, json.dumps(answer).encode(), media="application/json")


class _Server(ThreadingHTTPServer):
    """One thread a connection, a limited number of them; a connection beyond that is closed unanswered."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take it when there is room."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Until the connection ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; anything else is shown."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _handler(server: HttpServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = IDLE_S
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self._serve(self.headers.get("content-length", ""))

        def do_GET(self) -> None:
            self._serve("0")

        def _serve(self, length: str) -> None:
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                self.close_connection = True
                status = 413 if length.isdigit() else 411
                self._send(Reply(status, f"need a content-length of at most {MAX_BODY_BYTES}".encode()))
                return
            body = self.rfile.read(int(length))
            headers = {name.lower(): value for name, value in self.headers.items()}
            url = f"http://{headers.get('host', HOST)}{self.path}"
            reply = server.answer(Request(self.command, url, headers, body))
            if reply.broken:
                self.close_connection = True
                if reply.broken == "hang":
                    _until_gone(self.connection)
            else:
                self._send(reply)

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            self.send_header("content-type", reply.media)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: object) -> None:
            """Calls are in the region's log, not on the screen."""

    return Handler


def _until_gone(connection: socket.socket) -> None:
    """Wait until the client closes the connection, within limits."""
    select.select([connection], [], [], HANG_S)
