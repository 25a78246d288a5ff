"""The table of what each idea is worth: each switch acts, acts alone, and leaves no trace behind."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner

from autoscaler.cli import app
from autoscaler.core import odds
from chaos.ablation import ALL, IDEAS
from chaos.replaced import replaced
from policies.model import Event, Variant
from tests.fakes import FakeClock
from tests.scene import CHAT, Scene, offering, service, unit

FAST = "g5.2xlarge"


def after_a_lull() -> Scene:
    """Three replicas on what was had while another pool was dry, and then no load."""
    scene = Scene([unit(service())], [offering("dry", 1.0, count=0), offering("had", 2.0)])
    scene.load(CHAT, 4.0)
    scene.run(600)
    scene.load(CHAT, 0.0)
    scene.run(480)
    return scene


def test_without_the_hold_what_is_scarce_is_given_back_in_the_lull() -> None:
    assert after_a_lull().running() == ["had"] * 3
    with replaced(IDEAS["hold"]()):
        without = after_a_lull()
    assert without.running() == ["had"]
    assert not any(plan.holds for plan in without.plans)


def test_without_its_age_an_old_outage_is_as_likely_to_end_as_a_young_one() -> None:
    with replaced(IDEAS["outage_age"]()):
        assert odds.opens(3600.0, 60.0) == odds.opens(0.0, 60.0)
    assert odds.opens(3600.0, 60.0) < odds.opens(0.0, 60.0)


def near_the_end_of_a_block() -> Scene:
    scene = Scene([unit(service())], [offering("block", 1.0, market="block"), offering("od", 2.0)])
    describe, ends_at_s = scene.cloud.describe, {"block": scene.clock.at_s + 2400.0 + 300.0}

    def with_end(now_s: float) -> Any:
        view = describe(now_s)
        return replace(view, offerings=tuple(replace(o, ends_at_s=ends_at_s.get(o.offering)) for o in view.offerings))

    scene.cloud.describe = with_end  # type: ignore[method-assign]
    scene.load(CHAT, 0.0)
    scene.run(600)
    return scene


def before_a_launch() -> Scene:
    start = datetime.fromtimestamp(FakeClock().at_s + 1200.0, UTC).isoformat()
    event = Event(name="launch", starts_at=start, lasts_s=3600.0, expected_rps=5.0)
    scene = Scene([unit(service(events=(event,)))], [offering("a")])
    scene.load(CHAT, 0.5)
    scene.run(1190)
    return scene


def test_without_the_calendar_a_block_is_used_until_it_is_taken_and_nothing_is_ready_for_an_event() -> None:
    assert near_the_end_of_a_block().running() == ["od"]
    assert before_a_launch().ready(CHAT) > 1
    with replaced(IDEAS["calendar"]()):
        assert near_the_end_of_a_block().running() == ["block"]
        assert before_a_launch().ready(CHAT) == 1


def bought_for_a_second_replica() -> str:
    """Once it is known that the cheaper type takes a quarter of an hour to come."""
    variants = (Variant(id="slow", instance_type="g6.2xlarge"), Variant(id="fast", instance_type=FAST))
    pools = [offering("slow", 1.0, boot_s=900.0), offering("fast", 1.05, instance_type=FAST, boot_s=0.0)]
    scene = Scene([unit(service(variants=variants, min_replicas=2))], pools)
    scene.load(CHAT, 0.0)
    scene.run(1100)
    for machine in list(scene.cloud.supply.machines.values()):
        scene.cloud.supply.ended(machine.instance_id, scene.clock.at_s, "Server.InternalError")
    scene.run(100)
    return scene.grants()[-1][0]


def test_without_the_lead_the_cheapest_is_asked_however_long_it_takes() -> None:
    assert bought_for_a_second_replica() == "fast"
    with replaced(IDEAS["lead"]()):
        assert bought_for_a_second_replica() == "slow"


def test_without_the_forecast_a_rising_load_is_planned_at_what_it_is() -> None:
    def planned() -> float:
        scene = Scene([unit(service())], [offering("a")])
        for minute in range(30):
            scene.load(CHAT, 0.5 + 0.1 * minute)
            scene.run(60)
        return scene.plans[-1].demands[0].unheld_rps

    whole = planned()
    with replaced(IDEAS["forecast"]()):
        assert planned() < whole


def test_without_the_canary_pools_that_all_cool_are_asked_less_often() -> None:
    def asked() -> int:
        scene = Scene([unit(service())], [offering("a", count=0)])
        scene.load(CHAT, 0.0)
        scene.run(3600)
        return len(scene.refusals())

    whole = asked()
    with replaced(IDEAS["canary"]()):
        assert asked() < whole


def test_the_table_has_the_whole_beside_each_idea() -> None:
    words = ["bench", "ablate", "--scenarios", "calm", "--without", "hold", "--seeds", "1:2", "--json", "-"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    whole, without = json.loads(done.stdout.splitlines()[-1])
    assert (whole["without"], without["without"]) == (ALL, "hold")
    assert 0.9 < whole["attainment_top"] <= 1.0
    assert whole["cost_usd"] > 0.0
    assert (whole["seeds"], whole["violations"]) == ([1], 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--without", "luck"], "--without: 'luck' is no idea; give one of hold, lead, forecast, calendar,"),
        (["--seeds", "3"], "--seeds: '3' is no range; give FROM:TO, the last not included, such as 0:3"),
        (["--scenarios", "nowhere"], "nowhere: does not exist; give a scenario's file, or one of"),
    ],
)
def test_bad_words_start_nothing(words: list[str], said: str) -> None:
    from autoscaler.commands.outcome import BadInput
    from chaos.ablation import ablate_command
    from policies.problems import Problems

    given: dict[str, str | None] = {"--without": None, "--scenarios": None, "--seeds": "1:2"} | {words[0]: words[1]}
    with pytest.raises((BadInput, Problems)) as raised:
        ablate_command(given["--scenarios"], given["--without"], str(given["--seeds"]), None)
    assert said in str(raised.value)
