"""`qm console`: the web page over a journal, of a controller that runs or of a run that is over. Loopback only.

May not write the journal: it follows the files that another process writes, and hands orders to that process.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoscaler.adapters.journals import Place, holder
from autoscaler.adapters.order_box import OrderBox
from autoscaler.adapters.tail import Tail
from autoscaler.commands.outcome import OK, BadInput, check_port
from autoscaler.console.view import View
from autoscaler.core.events import Ordered
from autoscaler.core.orders import problem

if TYPE_CHECKING:
    import uvicorn

HOST = "127.0.0.1"
LEAVE_S = 1  # browsers keep their event stream open
SEGMENTS = 2  # of the journal, the newest: more than the page remembers, and read within seconds
MIN_TOKEN = 16


@dataclass
class Follower:
    """The view of a journal folder, brought up to date whenever it is asked for. Any thread may ask."""

    folder: Path
    view: View = field(default_factory=View)
    _page: dict[str, Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder, newest=SEGMENTS)

    def page(self) -> dict[str, Any]:
        """The newest page, made once for all who watch."""
        with self._lock:
            self._look()
            if self._page is None:
                self._page = self.view.page()
            return self._page

    def service(self, name: str) -> dict[str, Any] | None:
        """One service's part, None when there is no such service."""
        with self._lock:
            self._look()
            return self.view.service(name)

    def order(self, given: Ordered) -> str:
        """See console.server.Feed."""
        with self._lock:
            self._look()
            beliefs = self.view.beliefs
        if holder(self.folder).startswith("nobody"):
            return "no controller writes this journal; there is nobody to order"
        wrong = problem(given, beliefs)
        if not wrong:
            try:
                OrderBox.of(self.folder).put(given)
            except OSError as error:
                return f"the order cannot be handed over: {error.strerror}"
        return wrong

    def _look(self) -> None:
        for record in self._tail.look():
            self.view.take(record)
            self._page = None


def console_command(journal: Place, port: int, token_file: Path | None = None) -> int:
    """Serve the page until interrupted. Raises BadInput before anything listens."""
    server, listening = _server(_folder(journal), port, "--port", read_token("--token-file", token_file))
    print(f"console: http://{HOST}:{listening.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
    server.run(sockets=[listening])
    return OK


@contextlib.contextmanager
def served(journal: Place, port: int, token: str) -> Iterator[None]:
    """The same page beside something else, from a thread of its own. Raises BadInput before anything listens."""
    server, listening = _server(_folder(journal), port, "--console-port", token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="qm-console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2.0 * LEAVE_S)


def read_token(option: str, path: Path | None) -> str:
    """The token of a file, nothing without one. Raises BadInput for one that could be guessed."""
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise BadInput(f"{option} {path}: {why}; give a file that holds the token") from error
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable():
        raise BadInput(f"{option} {path}: a token is at least {MIN_TOKEN} ASCII characters on one line; make another")
    return token


def check_console(journal: Place, port: int) -> None:
    """Raises BadInput when the page could not be served there."""
    check_port("--console-port", port)
    if not isinstance(journal, Path):
        raise BadInput(f"--console-port {port}: the console reads a folder, and --journal {journal} is none")


def _folder(journal: Place) -> Path:
    if not isinstance(journal, Path):
        raise BadInput(f"--journal {journal}: the console reads a folder; copy the segments to one")
    if not journal.is_dir():
        raise BadInput(f"--journal {journal}: is no folder; give the one that qm run or qm simulate wrote")
    return journal


def _server(journal: Path, port: int, option: str, token: str) -> tuple[uvicorn.Server, socket.socket]:
    if port:
        check_port(option, port)
    import uvicorn

    from autoscaler.console.server import application

    listening = _listen(port, option)
    config = uvicorn.Config(
        application(Follower(journal), token=token),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=LEAVE_S,
    )
    return uvicorn.Server(config), listening


def _listen(port: int, option: str) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        raise BadInput(f"{option} {port}: {error.strerror}; give another, or 0 for a free one") from error
    return listening
