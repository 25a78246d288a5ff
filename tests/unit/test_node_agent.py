"""What a node says of itself: its phase, and a reclaim notice from a file or from EC2's metadata service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_apps.node_agent import from_file, from_imds, moved_bytes, report, source


class Imds(BaseHTTPRequestHandler):
    """EC2's metadata service: a token first, then 404 until there is a notice."""

    action: dict[str, str] | None = None

    def do_PUT(self) -> None:
        self._answer(200, b"token-1")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "token-1":
            self._answer(401, b"")
        elif self.path != "/latest/meta-data/spot/instance-action" or self.action is None:
            self._answer(404, b"")
        else:
            self._answer(200, json.dumps(self.action).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silence."""


@pytest.fixture
def imds_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Imds)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/latest"
    Imds.action = None
    server.shutdown()
    server.server_close()


def test_ec2_says_nothing_until_it_gives_notice(imds_url: str) -> None:
    assert from_imds(imds_url) is None
    Imds.action = {"action": "terminate", "time": "2026-11-30T22:00:00Z"}
    assert from_imds(imds_url) == 1796076000.0


def test_a_notice_file_may_come_later_and_must_be_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    assert from_file(path) is None
    path.write_text('{"reclaim_at_s": 1700.5}')
    assert source(path, imds=False)() == 1700.5
    path.write_text('{"when": "soon"}')
    with pytest.raises(ValueError, match=r"notice\.json: not a notice .*write .*reclaim_at_s"):
        from_file(path)


def test_progress_is_what_the_machine_received_and_read_in_steps(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "Inter-|   Receive  |  Transmit\n face |bytes    packets |bytes packets\n"
    (tmp_path / "net/dev").write_text(head + "    lo: 999000000000 1 2 3\n  eth0: 640000000 7 8 9\n  eth1:10 0 0 0\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\npgpgin 1000000\npgpgout 77\n")
    assert moved_bytes(tmp_path) == 1664e6
    (tmp_path / "vmstat").write_text("nr_free_pages 5\n")
    assert moved_bytes(tmp_path) is None
    assert moved_bytes(tmp_path / "nothing") is None


def test_without_a_source_there_is_never_a_notice() -> None:
    assert source(None, imds=False)() is None
    assert source(None, imds=True) is from_imds


def test_a_node_reports_its_phase_until_it_has_a_notice() -> None:
    said = report("i-1", "joined", lambda: None, 10.0, None)
    assert (said.instance_id, said.phase, said.reclaim_at_s, said.sent_at_s) == ("i-1", "joined", None, 10.0)
    said = report("i-1", "joined", lambda: 130.0, 11.0, None)
    assert (said.phase, said.reclaim_at_s) == ("draining", 130.0)


def test_a_notice_once_seen_stands_and_a_failing_source_is_said() -> None:
    def broken() -> float | None:
        raise ValueError("unreadable")

    said = report("i-1", "joined", broken, 12.0, 130.0)
    assert (said.phase, said.reclaim_at_s, said.detail) == ("draining", 130.0, "notice: unreadable")
    assert report("i-1", "joined", lambda: None, 12.0, 130.0).reclaim_at_s == 130.0
