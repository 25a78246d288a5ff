"""`qm` as a program: quick to start, and bad input is one clear line an error, exit code 2, and nothing started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from autoscaler.adapters.journal import FileJournal
from autoscaler.cli import app
from autoscaler.core.beliefs import Beliefs
from autoscaler.core.decide import decide
from autoscaler.core.model import CloudView, Observation, Plan
from policies.model import PolicySet
from tests.scene import Scene, offering, service, unit

START_S = 0.5
COMMANDS = (
    *(
        "advise",
        "apply",
        "bench",
        "chaos",
        "check",
        "console",
        "diagnose",
        "diff",
        "doctor",
        "down",
        "drill",
        "explain",
        "forecast",
    ),
    *("order", "predict", "recommend", "render", "replay", "run", "schema", "simulate", "status", "up"),
)
UNIT = """
unit: support
owner: o@example.com
services:
  - name: chat
    model: quartermaster/sim-llama
    goal: latency
    variants: [{id: g6, instance_type: g6.12xlarge}]
"""


def qm(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def policies(tmp_path: Path, root: Path) -> Path:
    return root / "policies" / "local" / "sim"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret-of-the-cloud\n")
    return path


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """The journal of a shortage: one pool answers for another that is dry."""
    made = Scene(
        units=[unit(service(min_replicas=2))],
        offerings=[offering("dry", count=0), offering("full", price=2.0)],
    )
    made.load("support/chat", 0.5)
    files = FileJournal(tmp_path / "journal")
    made.journal = files  # type: ignore[assignment]
    made.start()
    for _ in range(20):
        made.controller.tick()
        made.clock.advance(10.0)
    files.close()
    return tmp_path / "journal"


def run_options(policies: Path, token: Path, journal: Path, **changes: object) -> Sequence[str]:
    given = {
        "policies": policies,
        "journal": journal,
        "cloud-url": "http://127.0.0.1:9",
        "cloud-token-file": token,
        "ray-address": "127.0.0.1:9",
        "dashboard-url": "http://127.0.0.1:9",
        "engine": "sim",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["run", "--once", *(f"--{name}={value}" for name, value in given.items())]


# ---- start-up -------------------------------------------------------------------------------------------------------
def test_all_commands_are_there() -> None:
    shown = qm("--help").output
    assert sorted(line.split()[0] for line in shown.split("Commands:")[1].splitlines() if line.strip()) == sorted(
        COMMANDS
    )


def test_starting_imports_nothing_slow() -> None:
    code = "import sys, autoscaler.cli; print([m for m in ('ray', 'numpy', 'pydantic', 'httpx') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_it_starts_within_half_a_second_of_processor_time() -> None:
    code = "import time, autoscaler.cli as c; c.check_ownership(); print(time.process_time())"
    took = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )
    assert took < START_S


def test_the_installed_program_runs() -> None:
    found = subprocess.run([sys.executable, "-m", "autoscaler.cli", "schema", "plan"], capture_output=True, text=True)
    assert found.returncode == 0
    assert "launches" in json.loads(found.stdout)["properties"]


# ---- journals -------------------------------------------------------------------------------------------------------
def test_replay_counts_and_ends_well(journal: Path, tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    found = qm("replay", "--journal", journal, "--json", out)
    assert found.exit_code == 0
    assert "20 plans decided again and compared byte for byte: 20 identical, 0 different" in found.output
    report = json.loads(out.read_text())
    assert (report["plans"], report["identical"], report["exact"], report["differences"]) == (20, 20, True, [])


def test_replay_of_a_changed_decision_ends_with_1_and_names_it(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoscaler import loop as module

    def other(observation: Observation, policy: PolicySet, beliefs: Beliefs, now_s: float, plan_id: str) -> Plan:
        return replace(decide(observation, policy, beliefs, now_s, plan_id), launches=())

    monkeypatch.setattr(module, "decide", other)
    found = qm("replay", "--journal", journal)
    assert found.exit_code == 1
    assert "first difference: record" in found.output
    assert "launches[" in found.output
    assert "no longer there" in found.output


def test_explain_tells_the_last_launch_in_one_screen(journal: Path) -> None:
    found = qm("explain", "--journal", journal)
    assert found.exit_code == 0
    shown = " ".join(found.output.split())
    assert "dry 1.00 InsufficientInstanceCapacity full 2.00 granted 2 of 2" in shown
    assert len(found.output.splitlines()) < 40


def test_explain_as_json(journal: Path) -> None:
    told = json.loads(qm("explain", "--journal", journal, "--json", "-").output)
    assert [(rung["offering"], rung["outcome"]) for rung in told["rungs"]] == [("dry", "refused"), ("full", "granted")]


def test_status_shows_the_newest_state(journal: Path) -> None:
    told = json.loads(qm("status", "--journal", journal, "--json", "-").output)
    assert told["instances"] == {"joined": 2}
    assert [(row["service"], row["ready"], row["target"]) for row in told["services"]] == [("support/chat", 2, 2)]
    shown = qm("status", "--journal", journal)
    assert shown.exit_code == 0
    assert "support/chat" in shown.output


# ---- bad input ------------------------------------------------------------------------------------------------------
def refused(result: Result) -> str:
    """What was said; checks that it was said as bad input."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output.strip()


@pytest.mark.parametrize("command", ["replay", "explain", "status"])
def test_a_folder_without_a_journal(command: str, tmp_path: Path) -> None:
    assert refused(qm(command, "--journal", tmp_path)).startswith(f"{tmp_path}: no journal here")


@pytest.mark.parametrize("command", ["replay", "explain", "status"])
def test_a_journal_of_no_record_and_one_that_is_a_folder(command: str, tmp_path: Path) -> None:
    path = tmp_path / "00000001.jsonl"
    path.write_bytes(b"")
    said = refused(qm(command, "--journal", tmp_path))
    assert said == f"{tmp_path}: no whole record in {path.name}; give the folder of a journal"
    path.unlink()
    path.mkdir()
    said = refused(qm(command, "--journal", tmp_path))
    assert said == f"{path}: is not a regular file; give the folder of a journal"


@pytest.mark.parametrize("arguments", [("check", ""), ("render", ""), ("status", "--journal", "")])
def test_a_folder_without_a_name_is_not_this_one(arguments: tuple[str, ...]) -> None:
    assert "is empty; name a folder, or . for this one" in refused(qm(*arguments))


def test_a_damaged_journal_names_file_and_line(journal: Path) -> None:
    path = journal / "00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"observed", b"obscured", 1))
    assert refused(qm("replay", "--journal", journal)).startswith(f"{path}:3: journal damaged")


def test_explain_of_an_unknown_service_or_time(journal: Path) -> None:
    assert "holds no launch of support/none" in refused(
        qm("explain", "--journal", journal, "--service", "support/none")
    )
    assert "holds no launch at or before 1970-01-01" in refused(
        qm("explain", "--journal", journal, "--at", "1970-01-01")
    )
    for at in ("noon", "nan", "1e400", "-inf"):
        assert refused(qm("explain", "--journal", journal, f"--at={at}")).startswith(f"--at {at}: not a time")


def test_a_json_file_that_cannot_be_written(journal: Path, tmp_path: Path) -> None:
    said = refused(qm("replay", "--journal", journal, "--json", tmp_path / "no" / "such"))
    assert said.startswith(f"--json {tmp_path}/no/such: No such file or directory")


def test_run_names_every_problem_of_the_policies_and_starts_nothing(tmp_path: Path, token: Path) -> None:
    folder = tmp_path / "units"
    folder.mkdir()
    (folder / "a.yaml").write_text(UNIT.replace("goal: latency", "goal: speed").replace("owner:", "ower:"))
    said = refused(qm(*run_options(folder, token, tmp_path / "journal")))
    assert f"{folder}/a.yaml:3: ower" in said
    assert f"{folder}/a.yaml:7: services[0].goal" in said or ".goal" in said
    assert not (tmp_path / "journal").exists()


def test_run_with_an_empty_policy_folder(tmp_path: Path, token: Path) -> None:
    folder = tmp_path / "units"
    folder.mkdir()
    assert "holds no .yaml file" in refused(qm(*run_options(folder, token, tmp_path / "journal")))


def test_run_with_a_tick_that_is_none(policies: Path, token: Path, tmp_path: Path) -> None:
    said = refused(qm(*run_options(policies, token, tmp_path / "journal", tick_s=0)))
    assert said == "--tick-s 0: give a number of seconds above 0"


@pytest.mark.parametrize("port", [-1, 0, 99999999])
def test_run_with_a_metrics_port_that_is_none(port: int, policies: Path, token: Path, tmp_path: Path) -> None:
    said = refused(qm(*run_options(policies, token, tmp_path / "journal", metrics_port=port)))
    assert said == f"--metrics-port {port}: is no port; give a number from 1 to 65535"


def test_run_without_a_token_never_shows_one(policies: Path, token: Path, tmp_path: Path) -> None:
    said = refused(qm(*run_options(policies, tmp_path / "none", tmp_path / "journal")))
    assert said.startswith(f"--cloud-token-file {tmp_path}/none: No such file or directory")
    token.write_text("\n")
    assert "is empty" in refused(qm(*run_options(policies, token, tmp_path / "journal")))


def test_run_without_a_cloud_at_the_address(policies: Path, token: Path, tmp_path: Path) -> None:
    said = refused(qm(*run_options(policies, token, tmp_path / "journal")))
    assert said.startswith("--cloud-url http://127.0.0.1:9: ")
    assert "secret-of-the-cloud" not in said
    assert not (tmp_path / "journal").exists()


@pytest.fixture
def guarded() -> Iterator[str]:
    """A cloud that knows its token and has nothing, and a Ray whose dashboard wants another one, at one address."""
    empty = TypeAdapter(CloudView).dump_json(CloudView(at_s=0.0, offerings=(), instances=()))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret-of-the-cloud" and self.path == "/describe"
            body = empty if known else b"Unauthorized"
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("command", ["run", "advise"])
def test_a_wrong_token_of_the_cloud_is_noticed_at_once(
    command: str, guarded: str, policies: Path, token: Path, tmp_path: Path
) -> None:
    token.write_text("another-secret-entirely")
    options = run_options(policies, token, tmp_path / "journal", cloud_url=f"http://{guarded}", ray_address=guarded)
    said = refused(qm(command, *options[1:]))
    assert said == f"--cloud-token-file {token}: Unauthorized; give the file that the cloud was started with"
    assert not (tmp_path / "journal").exists()


def test_a_ray_that_wants_a_token_says_how_to_give_it(
    guarded: str, policies: Path, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    url = f"http://{guarded}"
    options = run_options(policies, token, tmp_path / "journal", cloud_url=url, ray_address=guarded, dashboard_url=url)
    assert refused(qm(*options)) == (
        f"--dashboard-url {url}: Ray wants a token; set RAY_AUTH_MODE=token (and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
    )
    assert not (tmp_path / "journal").exists()


def test_run_with_a_json_file_that_cannot_be_written_starts_nothing(
    policies: Path, token: Path, tmp_path: Path
) -> None:
    said = refused(qm(*run_options(policies, token, tmp_path / "journal", json=tmp_path / "no" / "plan")))
    assert said.startswith(f"--json {tmp_path}/no/plan: No such file or directory")


def test_an_unknown_command_option_and_choice() -> None:
    for arguments in (["dance"], ["replay", "--loud"], ["render", ".", "--engine", "steam"]):
        assert "Traceback" not in refused(qm(*arguments))


def test_a_busy_metrics_port_is_bad_input() -> None:
    from autoscaler.adapters.telemetry import PrometheusTelemetry
    from autoscaler.ports import Misconfigured

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Misconfigured, match=rf"--metrics-port {port}: Address already in use; give a free port"):
            PrometheusTelemetry().serve(port)


def test_a_defect_of_ours_is_not_called_bad_input(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoscaler.commands import journal as module

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "replay", broken)
    assert isinstance(qm("replay", "--journal", journal).exception, ZeroDivisionError)
