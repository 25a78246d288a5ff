"""What a node says of itself: its phase, and a reclaim notice from a file or from EC2's metadata service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from serve_apps.gpu_health import Health
from serve_apps.node_agent import Imds, from_file, moved_bytes, report, source


class Ec2(BaseHTTPRequestHandler):
    """EC2's metadata service: a token first, then 404 for what there is not."""

    said: ClassVar[dict[str, object]] = {}
    tokens = 0

    def do_PUT(self) -> None:
        Ec2.tokens += 1
        self._answer(200, b"token-1")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "token-1":
            self._answer(401, b"")
        elif self.path.removeprefix("/latest/meta-data/") not in self.said:
            self._answer(404, b"")
        else:
            self._answer(200, json.dumps(self.said[self.path.removeprefix("/latest/meta-data/")]).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silence."""


@pytest.fixture
def imds_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ec2)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/latest"
    Ec2.said.clear()
    server.shutdown()
    server.server_close()


SPOT = "spot/instance-action"
PLANNED = "events/maintenance/scheduled"
REBALANCE = "events/recommendations/rebalance"


def test_ec2_says_nothing_until_it_gives_notice(imds_url: str) -> None:
    imds = Imds(imds_url)
    assert imds() is None
    Ec2.said[SPOT] = {"action": "terminate", "time": "2026-11-30T22:00:00Z"}
    assert imds() == 1796076000.0


def test_a_token_serves_for_minutes(imds_url: str) -> None:
    now_s = [0.0]
    imds, before = Imds(imds_url, lambda: now_s[0]), Ec2.tokens
    for _ in range(200):
        imds()
        now_s[0] += 1.0
    assert Ec2.tokens - before == 1


def test_maintenance_is_a_notice_when_it_is_near_and_advice_to_move_is_none(imds_url: str) -> None:
    begins_s = 1796076000.0
    now_s = [begins_s - 86_400.0]
    imds = Imds(imds_url, lambda: now_s[0])
    Ec2.said[PLANNED] = [
        {"Code": "instance-retirement", "NotBefore": "30 Nov 2026 22:00:00 GMT", "State": "active"},
        {"Code": "system-reboot", "NotBefore": "29 Nov 2026 22:00:00 GMT", "State": "completed"},
    ]
    Ec2.said[REBALANCE] = {"noticeTime": "2026-11-29T22:00:00Z"}
    assert imds() is None
    assert report("i-1", "joined", imds, now_s[0], None).detail == "rebalance recommended at 2026-11-29T22:00:00Z"
    now_s[0] = begins_s - 3500.0
    assert imds() == begins_s


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
    assert isinstance(source(None, imds=True), Imds)


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


def test_a_fault_of_its_gpus_is_told_beside_everything_else() -> None:
    said = report("i-1", "joined", lambda: None, 10.0, None, Health("GPU 3: Xid 79, fallen off the bus", "GPU 1: hot"))
    assert (said.phase, said.fault, said.detail) == ("joined", "GPU 3: Xid 79, fallen off the bus", "GPU 1: hot")
