"""The report: what counts as met, how the journal's records sum up, and what an instance costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from autoscaler.core import events as ev
from autoscaler.core.model import (
    CloudInstance,
    CloudView,
    Missing,
    Observation,
    Offering,
    Plan,
    Replica,
    ReplicaState,
    ServingView,
    Shape,
    Shortfall,
    Target,
)
from chaos.facts import Facts, billed_usd, facts
from chaos.report import Outcome, Violation, build, live_part, meets, percentile
from policies.model import PolicySet, Service, Slo, Unit, Variant
from serve_apps.timing import Timing

SPOT = Offering(
    offering="spot-a", pool="pa", instance_type="g6.2xlarge", zone="a", market="spot", gpus=1, price_usd_per_h=0.36
)
DEMAND = Offering(
    offering="od-b", pool="pb", instance_type="g6.2xlarge", zone="b", market="on_demand", gpus=1, price_usd_per_h=3.6
)
TIMING = Timing(a_s=0.01, b_s_per_seq=0.0, c_s_per_ktoken=0.0, prefill_tps=1000.0)


def _service(name: str, priority: int) -> Service:
    return Service(
        name=name,
        model="m",
        goal="latency",
        priority=priority,
        slo=Slo(ttft_s=1.0, tpot_s=0.1, fraction=0.9),
        min_replicas=1,
        variants=(Variant(id="v", instance_type="g6.2xlarge"),),
    )


POLICY = PolicySet(
    units=(
        Unit(unit="support", owner="o", services=(_service("chat", 900),)),
        Unit(unit="research", owner="o", services=(_service("nightly", 100),)),
    )
)
CHAT, NIGHTLY = "support/chat", "research/nightly"


def _ok(ttft_s: float, tpot_s: float | None, *, tokens: int = 10, e2e_s: float = 2.0, at_s: float = 5.0) -> Outcome:
    return Outcome(
        service=CHAT,
        at_s=at_s,
        state="ok",
        e2e_s=e2e_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        input_tokens=3,
        output_tokens=tokens,
    )


def _instance(
    key: str, offering: str, *, token: str = "one", launched_at_s: float = 0.0, reclaim_at_s: float | None = None
) -> CloudInstance:
    return CloudInstance(
        instance_id=key,
        offering=offering,
        token=token,
        state="running",
        launched_at_s=launched_at_s,
        reclaim_at_s=reclaim_at_s,
    )


def _replica(service: str, instance: str, state: ReplicaState = "ready") -> Replica:
    return Replica(
        replica_id=f"{service}@{instance}", service=service, variant="v", instance_id=instance, state=state, since_s=0.0
    )


def _seen(at_s: float, instances: Sequence[CloudInstance], replicas: Sequence[Replica]) -> ev.Observed:
    cloud = CloudView(at_s=at_s, offerings=(SPOT, DEMAND), instances=tuple(instances))
    serving = ServingView(at_s=at_s, replicas=tuple(replicas), nodes=(), targets=())
    return ev.Observed(at_s=at_s, observation=Observation(at_s=at_s, loads=(), serving=serving, cloud=cloud))


def _plan(at_s: float, targets: dict[str, int], short: str = "") -> ev.Planned:
    shortfalls = (Shortfall(service=short, replicas=1, expected_at_s=None, reasons=()),) if short else ()
    rows = tuple(Target(service=k, variant="v", wanted=n, replicas=n, reasons=()) for k, n in targets.items())
    plan = Plan(
        id=f"r/{at_s}",
        at_s=at_s,
        demands=(),
        targets=rows,
        launches=(),
        drains=(),
        terminates=(),
        routes=(),
        shortfalls=shortfalls,
    )
    return ev.Planned(at_s=at_s, plan=plan)


def _configured() -> ev.Configured:
    shapes = tuple(
        Shape(
            service=key,
            variant="v",
            instance_type="g6.2xlarge",
            gpus=1,
            nodes=1,
            timing=TIMING,
            load_prior_s=1.0,
            boot_prior_s=1.0,
            source="test",
        )
        for key in (CHAT, NIGHTLY)
    )
    return ev.Configured(at_s=0.0, policy=POLICY, shapes=shapes, digest="d")


def _facts(*events: ev.Event) -> Facts:
    return facts(ev.Record(seq=number, event=event) for number, event in enumerate((_configured(), *events), start=1))


def _tried(at_s: float, offering: str, intent: str = "r/1/0", count: int = 1) -> ev.LaunchTried:
    return ev.LaunchTried(at_s=at_s, intent=intent, token=intent, offering=offering, count=count)


def _refused(at_s: float, offering: str, intent: str = "r/1/0") -> ev.LaunchRefused:
    return ev.LaunchRefused(
        at_s=at_s,
        intent=intent,
        token=intent,
        offering=offering,
        error="no_capacity",
        code="InsufficientInstanceCapacity",
    )


def _granted(at_s: float, offering: str, intent: str = "r/1/0", ids: tuple[str, ...] = ("i-1",)) -> ev.LaunchGranted:
    return ev.LaunchGranted(at_s=at_s, intent=intent, token=intent, offering=offering, instance_ids=ids)


@pytest.mark.parametrize(
    ("outcome", "slo", "met"),
    [
        (_ok(1.0, 0.1), Slo(ttft_s=1.0, tpot_s=0.1), True),
        (_ok(1.01, 0.1), Slo(ttft_s=1.0), False),
        (_ok(0.5, 0.11), Slo(tpot_s=0.1), False),
        (_ok(0.5, 9.0, tokens=1), Slo(tpot_s=0.1), True),
        (_ok(0.5, 0.1, e2e_s=3.0), Slo(e2e_s=2.9), False),
        (_ok(0.5, 0.1, e2e_s=3.0), Slo(deadline_s=2.9), False),
        (Outcome(service=CHAT, at_s=0.0, state="shed", e2e_s=0.0), Slo(), False),
        (Outcome(service=CHAT, at_s=0.0, state="failed", e2e_s=0.0), Slo(), False),
    ],
)
def test_a_request_meets_its_limits_or_not(outcome: Outcome, slo: Slo, met: bool) -> None:
    assert meets(outcome, slo) is met


def test_percentiles_interpolate_and_nothing_has_none() -> None:
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 1.0], 95) == pytest.approx(0.95)
    assert percentile([], 50) is None


def test_an_instance_is_billed_by_the_second_and_at_least_a_minute() -> None:
    assert billed_usd(3600.0, 61.0) == pytest.approx(61.0)
    assert billed_usd(3600.0, 2.0) == pytest.approx(60.0)


def test_cost_follows_what_was_listed_and_is_shared_by_replica_seconds() -> None:
    found = _facts(
        _seen(10.0, [_instance("i-1", "od-b")], []),
        _seen(100.0, [_instance("i-1", "od-b")], [_replica(CHAT, "i-1"), _replica(NIGHTLY, "i-1")]),
        _seen(200.0, [_instance("i-1", "od-b"), _instance("i-2", "spot-a", token="u", launched_at_s=190.0)], []),
        _seen(300.0, [], []),
        _seen(400.0, [], []),
    )
    assert found.cost_by_market() == {"on_demand": pytest.approx(0.3), "spot": pytest.approx(0.36 * 110 / 3600)}
    assert found.cost_by_unit() == {
        "research": pytest.approx(0.15),
        "support": pytest.approx(0.15),
        "unassigned": pytest.approx(0.36 * 110 / 3600),
    }


def test_the_peak_counts_ready_replicas_nodes_and_pools_at_one_moment() -> None:
    both = [_instance("i-1", "spot-a"), _instance("i-2", "od-b", token="u")]
    found = _facts(
        _seen(1.0, both, [_replica(CHAT, "i-1"), _replica(CHAT, "i-2", "loading")]),
        _seen(2.0, both, [_replica(CHAT, "i-1"), _replica(NIGHTLY, "i-2"), _replica(NIGHTLY, "", "pending")]),
        _seen(3.0, both, [_replica(CHAT, "i-1")]),
    )
    assert (found.peak.replicas, found.peak.nodes, found.peak.pools) == (2, 2, 2)


def test_a_refusal_answered_from_another_pool_in_the_same_tick() -> None:
    found = _facts(
        _seen(1.0, [], []),
        _tried(2.0, "spot-a"),
        _refused(2.1, "spot-a"),
        _tried(2.2, "od-b"),
        _granted(2.5, "od-b"),
        _tried(4.0, "od-b", "r/2/0"),
        _refused(4.1, "od-b", "r/2/0"),
        _tried(6.0, "od-b", "r/3/0"),
        _granted(6.1, "od-b", "r/3/0"),
    )
    assert (found.attempted, found.granted, dict(found.refused)) == (4, 2, {"no_capacity": 2})
    assert found.refused_then_granted == 1
    assert dict(found.granted_by_pool) == {"pb": 2}
    assert dict(found.refused_by_pool) == {"pa": 1, "pb": 1}
    assert found.rungs_s == {"market": pytest.approx(0.1)}


def test_a_reclaimed_node_is_empty_when_first_seen_without_replicas() -> None:
    late = _instance("i-1", "spot-a", reclaim_at_s=130.0)
    found = _facts(
        _seen(5.0, [_instance("i-1", "spot-a")], []),
        _seen(10.0, [late], [_replica(CHAT, "i-1")]),
        _seen(20.0, [late], [_replica(CHAT, "i-1", "draining")]),
        _seen(30.0, [late], []),
        _seen(40.0, [], []),
    )
    assert found.reclaims() == ((130.0, 30.0),)


def test_a_reclaimed_node_that_never_emptied_says_so() -> None:
    late = _instance("i-1", "spot-a", reclaim_at_s=15.0)
    assert _facts(_seen(10.0, [late], [_replica(CHAT, "i-1")])).reclaims() == ((15.0, None),)


def test_given_back_is_what_the_controller_returned_and_nobody_reclaimed() -> None:
    def acted(verb: Literal["drain", "terminate"], key: str) -> ev.Acted:
        return ev.Acted(at_s=15.0, action="a", verb=verb, target=key, kind="acted")

    rows = [_instance(key, "od-b", token=key) for key in ("i-1", "i-2", "i-4")]
    reclaimed = _instance("i-3", "spot-a", token="i-3", reclaim_at_s=99.0)
    # i-1 was terminated, i-2 ended by itself, i-3 was reclaimed, i-4 ended by itself because it had been drained.
    acts = [acted("terminate", "i-1"), acted("drain", "i-3"), acted("drain", "i-4")]
    found = _facts(_seen(10.0, [*rows, reclaimed], []), *acts, _seen(20.0, [], []), _seen(30.0, [], []))
    assert all(held.gone for held in found.instances.values())
    assert found.given_back() == 2


def test_one_token_with_two_instances_is_a_violation() -> None:
    found = _facts(
        _tried(1.0, "spot-a"), _seen(2.0, [_instance(k, "spot-a", token="r/1/0") for k in ("i-1", "i-2")], [])
    )
    assert [kind for _, kind, _ in found.violations] == ["launched_twice"]
    asked_two = _tried(1.0, "spot-a", count=2)
    assert not _facts(
        asked_two, _seen(2.0, [_instance(k, "spot-a", token="r/1/0") for k in ("i-1", "i-2")], [])
    ).violations


def test_turns_of_a_target_are_counted() -> None:
    found = _facts(*(_plan(float(t), {CHAT: n}) for t, n in enumerate([1, 2, 2, 3, 2, 2, 1, 4])))
    assert found.direction_changes == 2


def test_priority_inversion_lasts_while_the_lesser_holds_more_than_its_floor() -> None:
    found = _facts(
        _plan(0.0, {CHAT: 1, NIGHTLY: 2}, short=CHAT),
        _plan(4.0, {CHAT: 2, NIGHTLY: 1}, short=CHAT),
        _plan(9.0, {CHAT: 2, NIGHTLY: 3}, short=NIGHTLY),
        _plan(20.0, {CHAT: 2, NIGHTLY: 3}),
    )
    assert found.priority_inversion_s == 4.0


def test_a_missing_view_changes_nothing() -> None:
    gone = Missing(why="down")
    found = _facts(
        _seen(1.0, [_instance("i-1", "od-b")], [_replica(CHAT, "i-1")]),
        ev.Observed(at_s=2.0, observation=Observation(at_s=2.0, loads=gone, serving=gone, cloud=gone)),
    )
    assert not found.instances["i-1"].gone
    assert not found.was_cold(CHAT, 2.5)


def test_the_report_has_the_contract_names_and_counts_misses() -> None:
    found = _facts(
        _seen(10.0, [], []),
        _seen(100.0, [_instance("i-1", "od-b")], [_replica(CHAT, "i-1")]),
    )
    outcomes = [
        _ok(0.5, 0.05, at_s=101.0),
        _ok(5.0, 0.05, at_s=50.0),
        _ok(5.0, 0.05, at_s=102.0),
        Outcome(service=CHAT, at_s=103.0, state="shed", e2e_s=1.0),
        Outcome(service=CHAT, at_s=104.0, state="failed", e2e_s=1.0, error="HTTP 500"),
    ]
    live = live_part("sim", found, 1, 0, 0)
    report = build(
        scenario="s",
        controller="qm",
        seed=1,
        duration_s=100.0,
        wall_s=1.0,
        outcomes=outcomes,
        policy=POLICY,
        facts=found,
        violations=[Violation(at_s=1.0, kind="k", detail="d")],
        live=live,
    )
    chat = report.services[CHAT]
    assert list(report.services) == [CHAT, NIGHTLY]
    assert (chat.requests, chat.shed, chat.failed, chat.cold_start_misses, chat.tokens) == (5, 1, 1, 1, 39)
    assert chat.slo_attainment == pytest.approx(0.2)
    assert report.services[NIGHTLY].slo_attainment is None
    assert set(report.model_dump()) == {
        "scenario", "controller", "seed", "duration_s", "wall_s", "requests", "cost_usd", "cost_usd_by", "services",
        "launches", "first_refusal_to_each_rung_s", "direction_changes", "priority_inversion_s", "idle_reservation_h",
        "violations", "live",
    }  # fmt: skip
    assert set(live.model_dump()) == {
        "engine", "max_ready_replicas", "nodes_used", "pools_used", "refused_then_granted_same_tick", "reclaims",
        "failed_requests", "leaked_instances", "leaked_processes",
    }  # fmt: skip
    assert report.cost_usd == pytest.approx(0.1)
    assert [row.kind for row in report.violations] == ["k"]
