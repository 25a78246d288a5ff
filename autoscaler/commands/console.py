"""`qm console`: the web page over a journal, of a controller that runs or of a run that is over. Loopback only.

May not write: it follows the files that another process writes.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoscaler.adapters.journals import Place
from autoscaler.adapters.tail import Tail
from autoscaler.commands.outcome import OK, BadInput, check_port
from autoscaler.console.view import View

HOST = "127.0.0.1"
LEAVE_S = 1  # browsers keep their event stream open


@dataclass
class Follower:
    """The view of a journal folder, brought up to date whenever it is asked for. Any thread may ask."""

    folder: Path
    view: View = field(default_factory=View)
    _page: dict[str, Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder)

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

    def _look(self) -> None:
        for record in self._tail.look():
            self.view.take(record)
            self._page = None


def console_command(journal: Place, port: int) -> int:
    """Serve the page until interrupted. Raises BadInput before anything listens."""
    if not isinstance(journal, Path):
        raise BadInput(f"--journal {journal}: the console reads a folder; copy the segments to one")
    if not journal.is_dir():
        raise BadInput(f"--journal {journal}: is no folder; give the one that qm run or qm simulate wrote")
    if port:
        check_port("--port", port)
    import uvicorn

    from autoscaler.console.server import application

    listening = _listen(port)
    print(f"console: http://{HOST}:{listening.getsockname()[1]}/  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(
        application(Follower(journal)), log_level="warning", access_log=False, timeout_graceful_shutdown=LEAVE_S
    )
    uvicorn.Server(config).run(sockets=[listening])
    return OK


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        raise BadInput(f"--port {port}: {error.strerror}; give another, or 0 for a free one") from error
    return listening
