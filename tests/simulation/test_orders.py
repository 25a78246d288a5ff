"""Orders of operators in the whole loop: journalled, kept over a restart, honoured, undone when their time is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.adapters.order_box import OrderBox
from autoscaler.core.events import Ordered
from autoscaler.core.orders import LONGEST_S, problem
from autoscaler.replay import replay
from autoscaler.software import versions
from tests.scene import CHAT, Scene, codes, offering, service, unit


class Desk:
    """A scene whose controller takes orders from a folder."""

    def __init__(self, folder: Path) -> None:
        self.box = OrderBox.of(folder)
        self.scene = Scene(units=[unit(service(min_replicas=1))], offerings=[offering("pool", count=8)])
        self.scene.controller.orders = self.box
        self.scene.load(CHAT, 4.0)
        self.scene.run(600.0)

    def order(self, verb: str, subject: str = CHAT, for_s: float = 600.0, replicas: int = 0) -> None:
        now_s = self.scene.clock.at_s
        order = {"who": "ann", "why": "a test", "verb": verb, "subject": subject, "replicas": replicas}
        self.box.put(Ordered(at_s=now_s, until_s=now_s + for_s, **order))  # type: ignore[arg-type]

    def restart(self) -> None:
        self.scene.start()
        self.scene.controller.orders = self.box


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    assert replay(made.scene.journal.read(), versions()).differences == []


def test_a_frozen_service_is_neither_grown_nor_shrunk_until_its_time_is_over(desk: Desk) -> None:
    scene = desk.scene
    before = scene.wanted(CHAT)
    desk.order("freeze", for_s=1800.0)
    scene.load(CHAT, 12.0)
    scene.run(600.0)
    assert (scene.wanted(CHAT), scene.ready(CHAT)) == (before, before)
    assert "max_replicas" in codes(scene.plans[-1]) or "placed" in codes(scene.plans[-1])
    scene.load(CHAT, 0.0)
    scene.run(900.0)
    assert (scene.wanted(CHAT), scene.ready(CHAT)) == (before, before)
    reasons = [reason for reason in scene.plans[-1].demands[0].reasons if reason.code == "ordered"]
    assert [(reason.subject, dict(reason.numbers)["replicas"]) for reason in reasons] == [("freeze by ann", before)]
    scene.run(1200.0)
    assert scene.wanted(CHAT) == 1
    assert all(reason.code != "ordered" for reason in scene.plans[-1].demands[0].reasons)


def test_a_freeze_is_lifted_and_outlives_a_restart(desk: Desk) -> None:
    scene = desk.scene
    before = scene.wanted(CHAT)
    desk.order("freeze", for_s=7200.0)
    scene.run(10.0)
    desk.restart()
    scene.load(CHAT, 12.0)
    scene.run(300.0)
    assert scene.wanted(CHAT) == before
    desk.order("unfreeze")
    scene.run(600.0)
    assert scene.wanted(CHAT) > before


def test_a_frozen_service_gets_back_what_it_loses(desk: Desk) -> None:
    scene = desk.scene
    before = scene.ready(CHAT)
    desk.order("freeze", for_s=7200.0)
    scene.run(10.0)
    scene.cloud.reclaim(next(iter(scene.beliefs.instances)), 60.0)
    scene.run(600.0)
    assert scene.ready(CHAT) == scene.wanted(CHAT) == before


def test_a_floor_raises_min_replicas_for_a_while_and_serve_is_told(desk: Desk) -> None:
    scene = desk.scene
    desk.order("floor", for_s=1200.0, replicas=6)
    scene.run(600.0)
    assert scene.ready(CHAT) == 6
    assert scene.serving.published[-1].local_rules["support.chat.l4"].min_replicas == 6
    scene.run(1800.0)
    assert scene.wanted(CHAT) < 6
    desk.order("floor", for_s=7200.0, replicas=5)
    scene.run(300.0)
    assert scene.wanted(CHAT) == 5
    desk.order("floor", replicas=0)
    scene.run(900.0)
    assert scene.wanted(CHAT) < 5


def test_a_drained_instance_is_replaced_and_given_back(desk: Desk) -> None:
    scene = desk.scene
    before, one = scene.ready(CHAT), sorted(scene.beliefs.instances)[0]
    desk.order("drain", one, for_s=900.0)
    scene.run(30.0)
    drains = [drain for plan in scene.plans[-3:] for drain in plan.drains]
    assert [(drain.instance_id, drain.reasons[0].code) for drain in drains] == [(one, "ordered")]
    least = min(_ready_while(scene, 600.0))
    assert least == before, "a successor serves before it goes"
    assert one not in scene.beliefs.instances
    assert scene.ready(CHAT) == before


def _ready_while(scene: Scene, for_s: float) -> Iterator[int]:
    for _ in range(round(for_s / 10.0)):
        scene.run(10.0)
        yield scene.ready(CHAT)


def test_an_order_is_a_line_of_the_journal_with_who_and_why_and_its_file_is_gone(desk: Desk) -> None:
    desk.order("floor", replicas=2)
    desk.scene.run(10.0)
    (order,) = [event for event in desk.scene.events if isinstance(event, Ordered)]
    assert (order.who, order.why, order.verb, order.replicas) == ("ann", "a test", "floor", 2)
    assert list(desk.box.folder.iterdir()) == []


def test_what_is_no_order_is_put_aside_and_stops_nothing(desk: Desk) -> None:
    desk.box.folder.mkdir(exist_ok=True)
    (desk.box.folder / "1.json").write_text("{")
    (desk.box.folder / "2.json").write_bytes(b"x" * 10_000)
    desk.order("freeze", for_s=2.0 * LONGEST_S)
    desk.scene.run(20.0)
    assert sorted(path.suffix for path in desk.box.folder.iterdir()) == [".refused"] * 3
    assert desk.scene.beliefs.orders == {}


@pytest.mark.parametrize(
    ("verb", "subject", "replicas", "says"),
    [
        ("freeze", "support/none", 0, "is no service of the policy in force"),
        ("floor", CHAT, 9, "a floor of 9 is not within 0 and its max_replicas 8"),
        ("drain", "i-none", 0, "is no instance in service"),
    ],
)
def test_a_wrong_order_is_told_before_it_is_given(
    desk: Desk, verb: str, subject: str, replicas: int, says: str
) -> None:
    order = Ordered(at_s=0.0, who="ann", why="w", verb=verb, subject=subject, until_s=1.0, replicas=replicas)  # type: ignore[arg-type]
    assert says in problem(order, desk.scene.beliefs)
