"""`qm order`: what is wrong is said before anything is written, what nobody takes is taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoscaler.adapters.journal import FileJournal
from autoscaler.adapters.order_box import OrderBox
from autoscaler.cli import app
from autoscaler.commands.orders import end_s, order_command
from autoscaler.commands.outcome import BadInput
from autoscaler.commands.status import status
from autoscaler.core.events import Ordered
from tests.scene import CHAT, Scene, offering, service, unit

DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The journal of a controller that runs, with one service."""
    made = Scene(units=[unit(service())], offerings=[offering("pool")])
    made.run(200.0)
    journal = FileJournal(tmp_path)
    for record in made.journal.read():
        journal.append(record.event, durable=False)
    yield tmp_path
    journal.close()


def given(verb: str = "freeze", subject: str = CHAT, until_s: float = 3600.0, **more: object) -> Ordered:
    fields: dict[str, object] = {"at_s": 0.0, "who": "ann", "why": "w", "verb": verb, "subject": subject}
    return Ordered(**fields | {"until_s": until_s} | more)  # type: ignore[arg-type]


def test_an_order_is_done_when_the_controller_took_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box, ended = OrderBox.of(folder), threading.Event()
    heard: list[Ordered] = []

    def controller() -> None:
        while not ended.wait(0.01):
            for name, order in box.waiting():
                heard.append(order)
                box.taken(name)

    thread = threading.Thread(target=controller)
    thread.start()
    try:
        command = ["order", "floor", CHAT, "3", "--journal", str(folder), "--why", "launch day", "--who", "ann"]
        done = CliRunner().invoke(app, [*command, "--until", "+90"])
    finally:
        ended.set()
        thread.join()
    assert (done.exit_code, done.stdout) == (0, f"floor {CHAT}: journalled\n")
    (order,) = heard
    assert (order.verb, order.replicas, order.who, order.why) == ("floor", 3, "ann", "launch day")
    assert order.until_s - order.at_s == 5400.0


def test_an_order_that_nobody_takes_is_taken_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert order_command(folder, given(), wait_s=0.3) == 1
    assert "not taken within 0.3 s, and taken back" in capsys.readouterr().out
    assert list(OrderBox.of(folder).folder.iterdir()) == []


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (given(subject="support/none"), "is no service of the policy in force"),
        (given("floor", replicas=99), "is not within 0 and its max_replicas 8"),
        (given("drain", "i-1"), "is no instance in service"),
        (given(why=" "), "are journalled: give both"),
    ],
)
def test_a_wrong_order_is_refused_and_nothing_is_written(folder: Path, order: Ordered, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        order_command(folder, order)
    assert not OrderBox.of(folder).folder.exists()


def test_an_order_needs_a_controller_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        order_command("s3://bucket/prefix", given())
    FileJournal(tmp_path).close()
    with pytest.raises(BadInput, match="there is nobody to order"):
        order_command(tmp_path, given())


def test_an_order_ends_within_a_week() -> None:
    assert end_s("+30", 1000.0) == 2800.0
    assert end_s("1970-01-02", 1000.0) == DAY_S
    for wrong in ("+x", "tomorrow", "+0", "+-5", "+nan", "10", f"+{8 * 24 * 60}", "inf"):
        with pytest.raises(BadInput, match="--until"):
            end_s(wrong, 1000.0)


def test_status_names_the_orders_in_force() -> None:
    made = Scene(units=[unit(service())], offerings=[offering("pool")])
    made.run(20.0)
    order = given(until_s=made.clock.at_s + 3600.0)
    made.controller.ledger.record(order)
    assert status(made.journal.read()).orders == (f"freeze {CHAT} until 01-12 14:47 UTC, by ann: w",)
