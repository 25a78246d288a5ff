"""Ray's token is found where Ray looks for it, and reaches every call of its REST interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from autoscaler.adapters.ray_auth import auth_headers
from autoscaler.adapters.ray_serve import RayServe
from autoscaler.ports import Misconfigured, Transient


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_authentication_nothing_is_sent() -> None:
    assert auth_headers() == {}


def test_the_environment_comes_first_then_the_named_file_then_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert auth_headers() == {"Authorization": "Bearer home"}
    (tmp_path / "named").write_text("named\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert auth_headers() == {"Authorization": "Bearer named"}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "env")
    assert auth_headers() == {"Authorization": "Bearer env"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert auth_headers() == {}


def test_a_token_that_should_be_there_and_is_not_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(Misconfigured, match=r"auth_token: No such file or directory; put the cluster's token there"):
        auth_headers()


class _Dashboard(HTTPServer):
    """Refuses everyone, and remembers what they showed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Refuse)
        self.seen: list[str] = []


class _Refuse(BaseHTTPRequestHandler):
    server: _Dashboard

    def do_GET(self) -> None:
        self.server.seen.append(self.headers.get("Authorization", ""))
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def dashboard() -> Iterator[_Dashboard]:
    with _Dashboard() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_controller_sends_it_to_the_dashboard(monkeypatch: pytest.MonkeyPatch, dashboard: _Dashboard) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
    serving = RayServe("127.0.0.1:1", f"http://127.0.0.1:{dashboard.server_port}")
    with pytest.raises(Transient, match="401"):
        serving.observe(0.0)
    serving.close()
    assert dashboard.seen == ["Bearer s3cret"]
