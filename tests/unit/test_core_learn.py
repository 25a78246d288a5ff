"""Beliefs: what each kind of event teaches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.core.beliefs import EMPTY, Beliefs
from autoscaler.core.coldstart import quantile_s
from autoscaler.core.demand import lead_s
from autoscaler.core.events import Event, LaunchGranted, LaunchRefused, LaunchTried, Observed, RefusalClass
from autoscaler.core.learn import fold, learn
from autoscaler.core.lifecycle import InstanceState
from autoscaler.core.model import (
    CloudInstance,
    CloudView,
    Idle,
    Measured,
    Missing,
    Observation,
    Offering,
    Replica,
    ReplicaState,
    ServiceLoad,
    ServingView,
    Signal,
)
from autoscaler.core.snapshot import restore, save
from tests.scene import BOOT_S, LOAD_S, Scene, offering, service, shapes_of, unit

CHAT = "support/chat"


def offer(name: str, instance_type: str = "g6.2xlarge", market: str = "on_demand", pool: str = "") -> Offering:
    return Offering(
        offering=name,
        pool=pool or name,
        instance_type=instance_type,
        zone="z",
        market=market,  # type: ignore[arg-type]
        gpus=1,
        price_usd_per_h=1.0,
        region="r",
    )


def seen(at_s: float, *, offers: tuple[Offering, ...] = (), instances: tuple[CloudInstance, ...] = ()) -> Observed:
    cloud = CloudView(at_s=at_s, offerings=offers, instances=instances)
    return Observed(
        at_s=at_s,
        observation=Observation(at_s=at_s, loads=Missing(why="w"), serving=Missing(why="w"), cloud=cloud),
    )


def refused(name: str, at_s: float, error: RefusalClass = "no_capacity") -> LaunchRefused:
    return LaunchRefused(at_s=at_s, intent="i", token="t", offering=name, error=error, code="C")


def cool_s(beliefs: Beliefs, name: str, at_s: float) -> float:
    known = beliefs.offerings.get(name)
    return known.cool_until_s - at_s if known else 0.0


def test_cooldown_doubles_with_jitter_and_is_capped() -> None:
    beliefs = learn(EMPTY, seen(0.0, offers=(offer("a"),)))
    spans = []
    for k in range(8):
        beliefs = learn(beliefs, refused("a", 1000.0 * k))
        spans.append(cool_s(beliefs, "a", 1000.0 * k))
    for k, span in enumerate(spans):
        full = min(30.0 * 2**k, 900.0)
        assert full / 2 <= span <= full
    assert beliefs.offerings["a"].refusals_in_row == 8
    assert beliefs.offerings["a"].last_refusal == "C"


def test_a_grant_ends_the_cooldown() -> None:
    granted = LaunchGranted(at_s=5.0, intent="i", token="t", offering="a", instance_ids=("i-1", "i-2"))
    beliefs = fold([seen(0.0, offers=(offer("a"),)), refused("a", 1.0), granted])
    known = beliefs.offerings["a"]
    assert (known.refusals_in_row, known.cool_until_s, known.granted, known.refused) == (0, 0.0, 2, 1)
    assert beliefs.instances["i-1"].state is InstanceState.REQUESTED


@pytest.mark.parametrize(
    ("error", "cooled"),
    [
        ("no_capacity", {"a", "a2"}),
        ("refused", {"a", "a2"}),
        ("quota", {"a", "a2", "b"}),
        ("misconfigured", {"a"}),
        ("not_found", {"a"}),
        ("throttled", set()),
    ],
)
def test_each_class_cools_what_it_speaks_for(error: RefusalClass, cooled: set[str]) -> None:
    offers = (
        offer("a", pool="p"),
        offer("a2", pool="p"),
        offer("b", "g5.2xlarge"),
        offer("c", market="spot"),
        offer("d", "p5.48xlarge"),
    )
    beliefs = fold([seen(0.0, offers=offers), refused("a", 100.0, error)])
    assert {name for name in beliefs.offerings if cool_s(beliefs, name, 100.0) > 0} == cooled


def test_an_open_call_is_settled_by_the_listing_of_its_token() -> None:
    tried = LaunchTried(at_s=1.0, intent="i", token="t", offering="a", count=2)
    listed = CloudInstance(instance_id="i-1", offering="a", token="t", state="pending", launched_at_s=1.5)
    beliefs = fold([seen(0.0, offers=(offer("a"),)), tried])
    assert set(beliefs.intents) == {"t"}
    beliefs = learn(beliefs, seen(2.0, offers=(offer("a"),), instances=(listed,)))
    assert beliefs.intents == {}
    assert beliefs.instances["i-1"].state is InstanceState.PENDING


def test_an_open_call_nobody_ever_lists_is_forgotten_after_a_minute() -> None:
    tried = LaunchTried(at_s=1.0, intent="i", token="t", offering="a", count=2)
    beliefs = fold([tried, seen(61.0)])
    assert set(beliefs.intents) == {"t"}
    assert learn(beliefs, seen(61.5)).intents == {}


def test_a_granted_instance_that_is_not_listed_yet_is_not_dead() -> None:
    """packer#1367."""
    granted = LaunchGranted(at_s=0.0, intent="i", token="t", offering="a", instance_ids=("i-1",))
    beliefs = fold([granted, seen(300.0)])
    assert beliefs.instances["i-1"].state is InstanceState.REQUESTED
    assert learn(beliefs, seen(301.0)).instances["i-1"].state is InstanceState.GONE


def test_an_instance_listed_by_the_cloud_and_unknown_to_us_is_adopted() -> None:
    listed = CloudInstance(instance_id="i-9", offering="a", token="t", state="running", launched_at_s=3.0)
    beliefs = learn(EMPTY, seen(9.0, instances=(listed,)))
    assert beliefs.instances["i-9"].state is InstanceState.BOOTING
    assert beliefs.instances["i-9"].launched_at_s == 3.0


def loads(at_s: float, rps: Signal, prefill: Signal, decode: Signal) -> Event:
    load = ServiceLoad(
        service=CHAT, arrival_rps=rps, prefill_tps=prefill, decode_tps=decode, queued=Idle(at_s=at_s), running=rps
    )
    seen_now = Observation(at_s=at_s, loads=(load,), serving=Missing(why="w"), cloud=Missing(why="w"))
    return Observed(at_s=at_s, observation=seen_now)


def measured(at_s: float, *values: float) -> list[Signal]:
    return [Measured(value=value, at_s=at_s) for value in values]


def test_the_mix_is_a_mean_by_time_that_silence_does_not_change() -> None:
    beliefs = learn(EMPTY, loads(0.0, *measured(0.0, 2.0, 1000.0, 200.0)))
    assert (beliefs.services[CHAT].input_tokens, beliefs.services[CHAT].output_tokens) == (500.0, 100.0)
    beliefs = learn(beliefs, loads(60.0, *measured(60.0, 1.0, 1500.0, 100.0)))
    assert beliefs.services[CHAT].input_tokens == pytest.approx(500.0 + 0.5 * 1000.0)
    beliefs = learn(beliefs, loads(70.0, *[Idle(at_s=70.0)] * 3))
    assert beliefs.services[CHAT].input_tokens == pytest.approx(1000.0)
    assert beliefs.services[CHAT].history[-1].arrival_rps == 0.0


def test_missing_is_remembered_as_blindness_and_adds_no_sample() -> None:
    beliefs = learn(EMPTY, loads(0.0, *measured(0.0, 2.0, 1000.0, 200.0)))
    beliefs = learn(beliefs, loads(10.0, *[Missing(why="gone")] * 3))
    assert beliefs.services[CHAT].blind_why == "gone"
    assert len(beliefs.services[CHAT].history) == 1
    assert learn(beliefs, loads(20.0, *[Idle(at_s=20.0)] * 3)).services[CHAT].blind_why == ""


def test_arrivals_without_an_answer_yet_are_seen_or_a_service_at_zero_would_stay_there() -> None:
    unknown: list[Signal] = [Missing(why="no request has got an answer yet")] * 2
    known = learn(EMPTY, loads(10.0, Measured(value=0.5, at_s=10.0), *unknown)).services[CHAT]
    assert (known.blind_why, known.input_tokens, known.output_tokens) == ("", 0.0, 0.0)
    assert [row.arrival_rps for row in known.history] == [0.5]


def test_load_times_are_measured_from_placement_to_ready() -> None:
    def view(at_s: float, state: ReplicaState) -> Event:
        row = Replica(replica_id="r", service=CHAT, variant="l4", instance_id="i", state=state, since_s=0.0)
        serving = ServingView(at_s=at_s, replicas=(row,), nodes=(), targets=())
        return Observed(
            at_s=at_s,
            observation=Observation(at_s=at_s, loads=(), serving=serving, cloud=Missing(why="w")),
        )

    scene = Scene([unit(service())], [offering("a")])
    start = replace(EMPTY, shapes=shapes_of(scene.policy))
    beliefs = fold([view(0.0, "pending"), view(50.0, "loading"), view(80.0, "loading"), view(95.0, "ready")], start)
    assert beliefs.load_s == {"g6.2xlarge support.chat.l4 network": (45.0,)}


def test_boot_times_are_measured_and_set_the_lead() -> None:
    scene = Scene([unit(service())], [offering("a", boot_s=100.0)], load_s=35.0)
    scene.load(CHAT, 0.0)
    scene.run(300)
    (boot,) = scene.beliefs.boot_s["g6.2xlarge"]
    (load,) = scene.beliefs.load_s["g6.2xlarge support.chat.l4 network"]
    assert 100.0 <= boot <= 120.0
    assert 35.0 <= load <= 50.0
    assert lead_s(scene.beliefs, CHAT) == quantile_s((boot,), BOOT_S, 0.9) + quantile_s((load,), LOAD_S, 0.9)


def test_a_snapshot_is_every_belief() -> None:
    scene = Scene([unit(service())], [offering("a", count=1), offering("b", 2.0)])
    scene.load(CHAT, 4.0)
    scene.run(400)
    assert restore(save(scene.beliefs)) == scene.beliefs
