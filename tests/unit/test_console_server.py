"""The console's web application answers this machine only, takes orders for a token, and says what was wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from autoscaler.adapters.journal import FileJournal
from autoscaler.adapters.order_box import OrderBox
from autoscaler.commands.console import Follower, check_console, console_command, read_token, served
from autoscaler.commands.outcome import BadInput
from autoscaler.console.server import FILES, application
from autoscaler.core.events import Opened, Ordered
from tests.scene import CHAT, Scene, offering, service, unit
from tests.system.prometheus_server import free_port, wait_for

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


TOKEN = "a-token-of-the-console"
FREEZE = {"verb": "freeze", "subject": CHAT, "who": "ann", "why": "load test"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The journal of a controller that runs, with one service."""
    made = Scene(units=[unit(service())], offerings=[offering("pool")])
    made.run(200.0)
    journal = FileJournal(tmp_path)
    for record in made.journal.read():
        journal.append(record.event, durable=False)
    yield tmp_path
    journal.close()


def give(folder: Path, order: object, token: str = TOKEN, held: str = TOKEN) -> tuple[int, str]:
    client = TestClient(application(Follower(folder), token=token), base_url=LOCAL)
    answer = client.post("/api/orders", json=order, headers={"Authorization": f"Bearer {held}"})
    return answer.status_code, answer.json().get("error", "")


def waiting(folder: Path) -> list[Ordered]:
    return [order for _, order in OrderBox.of(folder).waiting()]


def test_an_order_with_the_token_is_handed_to_the_controller(running: Path) -> None:
    assert give(running, FREEZE | {"minutes": 30})[0] == 202
    (order,) = waiting(running)
    assert (order.verb, order.subject, order.who, order.why) == ("freeze", CHAT, "ann", "load test")
    assert order.until_s - order.at_s == 1800.0
    assert TOKEN not in "".join(path.read_text() for path in running.rglob("*") if path.is_file())


def test_without_the_token_nothing_is_ordered(running: Path) -> None:
    refused = [give(running, FREEZE, held=held)[0] for held in ("", "another-token-of-it", TOKEN[:-1], TOKEN + "x")]
    assert refused == [401] * 4
    status, says = give(running, FREEZE, token="")
    assert (status, says) == (403, "this console only shows: start it with a token file to give orders")
    assert TestClient(application(Follower(running), token=TOKEN), base_url=LOCAL).get("/api/orders").status_code == 405
    assert waiting(running) == []


@pytest.mark.parametrize(
    ("order", "status", "says"),
    [
        (FREEZE | {"subject": "a/b"}, 409, "is no service of the policy in force"),
        (FREEZE | {"verb": "floor", "replicas": 99}, 409, "is not within 0 and its max_replicas 8"),
        (FREEZE | {"verb": "stop"}, 400, "verb: Input should be"),
        (FREEZE | {"minutes": 1e9}, 400, "minutes: "),
        (FREEZE | {"why": ""}, 400, "why: "),
        (FREEZE | {"force": True}, 400, "force: Extra inputs"),
        ([], 400, "body: "),
        (FREEZE | {"why": "x" * 5000}, 400, "at most 4096 bytes"),
    ],
)
def test_a_wrong_order_is_said_to_be_wrong(running: Path, order: object, status: int, says: str) -> None:
    found, said = give(running, order)
    assert (found, says in said) == (status, True), said
    assert waiting(running) == []


def test_a_run_that_is_over_takes_no_orders(tmp_path: Path) -> None:
    FileJournal(tmp_path).close()
    assert give(tmp_path, FREEZE) == (409, "no controller writes this journal; there is nobody to order")


@pytest.mark.parametrize("text", ["", "short", "sixteen letters\nand a line", "ümläut-ümläut-ümläut"])
def test_a_token_that_could_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match="at least 16 ASCII characters on one line"):
        read_token("--token-file", path)
    with pytest.raises(BadInput, match="No such file"):
        read_token("--token-file", tmp_path / "none")


def test_the_page_is_served_beside_a_controller_and_gone_with_it(running: Path) -> None:
    port = free_port()
    with served(running, port, ""):
        wait_for("the page", lambda: _answers(port))
        state = httpx.get(f"{LOCAL}:{port}/api/state", trust_env=False).json()
        assert [row["service"] for row in state["services"]] == [CHAT]
    assert not _answers(port)
    with pytest.raises(BadInput, match="the console reads a folder"):
        check_console("s3://bucket/prefix", port)


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{LOCAL}:{port}/", trust_env=False).is_success
    return False
