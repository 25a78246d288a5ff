"""The console's web application answers reads of this machine only, and says clearly what was wrong."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from autoscaler.adapters.journal import FileJournal
from autoscaler.commands.console import Follower, console_command
from autoscaler.commands.outcome import BadInput
from autoscaler.console.server import FILES, application
from autoscaler.core.events import Opened

LOCAL = "http://127.0.0.1"


def opened(at_s: float) -> Opened:
    return Opened(at_s=at_s, run_id=f"run-{at_s:g}", schema_version=1, versions=())


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(application(Follower(tmp_path)), base_url=LOCAL)


def test_the_page_has_a_strict_policy_and_no_inline_code(client: TestClient) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<style" not in answer.text
    assert " style=" not in answer.text
    assert " on" + "click=" not in answer.text


def test_all_files_together_are_small() -> None:
    folder = files("autoscaler.console") / "static"
    assert sum(len((folder / name).read_bytes()) for name, _ in FILES.values()) < 300 * 1024


def test_a_name_of_this_machine_that_another_site_chose_is_refused(client: TestClient) -> None:
    assert client.get("/api/state", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize("path", ["/", "/api/state", "/api/service"])
def test_nothing_can_be_changed(client: TestClient, path: str) -> None:
    assert client.post(path, json={"freeze": "support/chat"}).status_code == 405


def test_a_service_that_does_not_exist_is_said_so(client: TestClient) -> None:
    missing, unknown = client.get("/api/service"), client.get("/api/service?name=a/b")
    assert (missing.status_code, unknown.status_code) == (400, 404)
    assert missing.json()["error"] == "name is missing: give ?name=UNIT/SERVICE"
    assert unknown.json()["error"].startswith("a/b is no service of the policy in force")


def test_the_state_follows_the_journal_as_it_is_written_and_a_torn_line_waits(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    client = TestClient(application(follower), base_url=LOCAL)
    journal = FileJournal(tmp_path)
    journal.append(opened(1.0), durable=True)
    assert client.get("/api/state").json()["run_id"] == "run-1"
    journal.append(opened(2.0), durable=True)
    journal.close()
    newest = sorted(tmp_path.glob("*.jsonl"))[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-5])
    assert client.get("/api/state").json()["run_id"] == "run-1"
    newest.write_bytes(whole)
    state = client.get("/api/state").json()
    assert (state["run_id"], state["seq"]) == ("run-2", 2)
    assert json.dumps(state["log"]).count("controller started") == 2


def test_bad_input_is_told_before_anything_listens(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        console_command(tmp_path / "none", 0)
    with pytest.raises(BadInput, match="is no port"):
        console_command(tmp_path, 70000)
    with pytest.raises(BadInput, match="reads a folder"):
        console_command("s3://bucket/prefix", 0)
