"""`qm check`, `render`, `apply` and `schema` as a person meets them; Serve is an HTTP server with Serve's semantics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import policies
from autoscaler.commands.outcome import BadInput
from autoscaler.commands.policy import apply_command, check_command, render_command, schema_command
from policies.load import PolicyProblems

SIM = Path(policies.__file__).parent / "local" / "sim"


class FakeServe:
    """Holds a Serve config as the REST interface does: GET shows what is deployed, PUT replaces all of it."""

    def __init__(self, status: int = 200, body: bytes | None = None) -> None:
        self.status, self.body = status, body
        self.config: dict[str, Any] | None = None
        self.puts = 0
        self.token = ""

    def answer(self, method: str, sent: bytes, token: str) -> tuple[int, bytes]:
        if self.token and token != f"Bearer {self.token}":
            return 401, b"Unauthorized"
        if self.body is not None or self.status != 200:
            return self.status, self.body or b"it broke"
        if method == "PUT":
            self.config, self.puts = json.loads(sent), self.puts + 1
            return 200, b""
        return 200, json.dumps(self.details()).encode()

    def details(self) -> dict[str, Any]:
        config = self.config or {"applications": []}
        head = {key: config.get(key) for key in ("proxy_location", "http_options")}
        running = {"node_id": "n"} if self.config else {}
        apps = {app["name"]: {"name": app["name"], "deployed_app_config": app} for app in config["applications"]}
        return {**head, "controller_info": running, "applications": apps}


@contextmanager
def served(fake: FakeServe) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            status, body = fake.answer(self.command, self.rfile.read(size), self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_check_says_how_much_it_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command(SIM) == 0
    assert capsys.readouterr().out == "no problem: 3 units, 3 services, 6 variants\n"


def test_check_resolved_shows_each_value_with_its_line_and_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command(SIM, resolved=True) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(
        n for n, text in enumerate((SIM / "support.yaml").read_text().splitlines(), 1) if "max_replicas" in text
    )
    assert f"support/chat.max_replicas = 28  ({SIM}/support.yaml:{line})" in lines
    assert any(text.startswith("support/chat.warm_replicas = 0  (") and "defaults.yaml:" in text for text in lines)
    assert any(text.startswith("support/chat.g6-12x: 1 GPU of g6.12xlarge, KV for ") for text in lines)


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command(SIM, resolved=True, json_out="-") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["problems"], report["violations"], report["units"]) == ([], [], 3)
    assert len(report["shapes"]) == 6
    assert {"key", "value", "file", "line"} == set(report["resolved"][0])


def test_check_lists_every_problem_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("unit: a\n")
    assert check_command(tmp_path, json_out=str(tmp_path / "out.json")) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/a.yaml:1: owner: is missing; add it",
        f"{tmp_path}/a.yaml:1: services: is missing; add it",
    ]
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["violations"] == []
    assert report["problems"][0] == {
        "file": f"{tmp_path}/a.yaml",
        "line": 1,
        "key": "owner",
        "text": "is missing; add it",
    }


def test_check_finds_what_exists_but_cannot_be_deployed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (SIM / "support.yaml").read_text().replace("id: g6-12x,", "id: g6-12x, role: prefill,")
    (tmp_path / "a.yaml").write_text(text)
    assert check_command(tmp_path) == 2
    assert "support/chat.variants[g6-12x].role: prefill and decode cannot be separate" in capsys.readouterr().err


def test_render_writes_a_file_that_serve_deploy_reads(tmp_path: Path) -> None:
    assert render_command(SIM, "sim", str(tmp_path / "serve.yaml")) == 0
    config = yaml.safe_load((tmp_path / "serve.yaml").read_text())
    assert config["applications"][0]["name"] == "qm-gateway"
    assert len(config["applications"]) == 7


def test_render_to_the_screen_is_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [capsys.readouterr().out for _ in range(2) if render_command(SIM, "sim") == 0]
    assert texts[0] == texts[1] != ""


def test_render_to_nowhere_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--out .*: No such file or directory; give a file that can be written"):
        render_command(SIM, "sim", str(tmp_path / "no" / "x.yaml"))


def test_apply_shows_then_puts_then_has_nothing_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServe()
    with served(fake) as url:
        assert apply_command(SIM, "sim", url, dry_run=True) == 0
        assert "+ support.chat.g6-12x: new application" in capsys.readouterr().out
        assert fake.puts == 0
        assert apply_command(SIM, "sim", url, yes=True) == 0
        assert (fake.puts, "accepted: 7 changes; running targets are kept" in capsys.readouterr().out) == (1, True)
        assert apply_command(SIM, "sim", url, yes=True) == 0
        assert (fake.puts, capsys.readouterr().out) == (1, "nothing to change\n")


def test_apply_leaves_other_peoples_applications_alone_and_removes_own_old_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeServe()
    fake.config = {
        "applications": [{"name": "billing", "import_path": "x:y"}, {"name": "support.chat.old", "import_path": "x:y"}]
    }
    with served(fake) as url:
        apply_command(SIM, "sim", url, yes=True)
    names = [app["name"] for app in fake.config["applications"]]
    assert "billing" in names
    assert "support.chat.old" not in names
    out = capsys.readouterr().out
    assert "- support.chat.old: removed, with its replicas" in out
    assert "billing" not in out


def test_apply_without_a_terminal_needs_yes() -> None:
    fake = FakeServe()
    with served(fake) as url, pytest.raises(BadInput, match="--yes: is needed"):
        apply_command(SIM, "sim", url)
    assert fake.puts == 0


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999999])
def test_a_port_that_is_none_is_refused_before_anything_is_written_or_asked(port: int, tmp_path: Path) -> None:
    said = rf"^--http-port {port}: is no port; give a number from 1 to 65535$"
    with pytest.raises(BadInput, match=said):
        render_command(SIM, "sim", str(tmp_path / "serve.yaml"), port)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadInput, match=said):
        apply_command(SIM, "sim", "http://127.0.0.1:9", http_port=port)


def test_check_says_nothing_before_it_knows_that_it_can_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, why in ((tmp_path / "no" / "x", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(BadInput, match=f"^--json {target}: {why}; give a file that can be written"):
            check_command(SIM, json_out=str(target))
    assert capsys.readouterr() == ("", "")


def test_apply_sends_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe()
    fake.token = "s3cret"
    with served(fake) as url:
        with pytest.raises(BadInput, match=r"Ray wants a token; set RAY_AUTH_MODE=token \(and RAY_AUTH_TOKEN or"):
            apply_command(SIM, "sim", url, yes=True)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cret")
        assert apply_command(SIM, "sim", url, yes=True) == 0


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (FakeServe(status=500), r"answered 500 \(it broke\); see Ray's log"),
        (FakeServe(status=404, body=b"no"), r"answered 404 \(no\)"),
        (FakeServe(body=b"<html>"), "something else than Ray answers there; correct the address"),
        (FakeServe(body=b"[]"), "something else than Ray answers there; correct the address"),
    ],
    ids=["broken", "absent", "a web page", "a list"],
)
def test_apply_to_something_else(fake: FakeServe, said: str) -> None:
    with served(fake) as url, pytest.raises(BadInput, match=said):
        apply_command(SIM, "sim", url, yes=True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", "ftp://127.0.0.1"])
def test_apply_where_no_ray_is(url: str) -> None:
    with pytest.raises(
        BadInput, match=r"no Ray answers there .*; start Ray with its dashboard, or correct --dashboard-url"
    ):
        apply_command(SIM, "sim", url, yes=True)


def test_apply_of_a_broken_policy_asks_nobody(tmp_path: Path) -> None:
    with pytest.raises(PolicyProblems):
        apply_command(tmp_path, "sim", "http://127.0.0.1:1", yes=True)


@pytest.mark.parametrize("name", ["policy", "catalogue", "plan", "journal", "board"])
def test_schemas_are_json_schemas(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert schema_command(name) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema.get("properties") or schema.get("$defs")


def test_schema_of_another_package_is_added_and_an_unknown_one_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema_command("report", {"report": lambda: {"title": "Report"}}) == 0
    assert json.loads(capsys.readouterr().out) == {"title": "Report"}
    with pytest.raises(
        BadInput, match="schema report: is not a format; choose one of board, catalogue, journal, plan, policy"
    ):
        schema_command("report")
