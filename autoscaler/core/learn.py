"""`learn(beliefs, event) -> beliefs`: the only place where beliefs change.

Pure; may not do I/O, read a clock or draw a random number (the jitter of a cooldown is a hash of what it concerns, so
that a replay sees the same). A fold over the journal from `EMPTY` gives the beliefs of a controller that never stopped.
An event that cannot be learnt is in the journal and would be met again at every restart: it changes nothing but
`Beliefs.defect`, live as in a replay.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from . import bursts, calibrate, coldstart, odds, orders, prompts, series, spend, tasks
from .beliefs import (
    EMPTY,
    Beliefs,
    Breaker,
    InstanceBelief,
    IntentBelief,
    OfferingBelief,
    Sample,
    ServiceBelief,
)
from .defects import defect
from .events import (
    Acted,
    Configured,
    Event,
    Forecasted,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    LaunchTried,
    Observed,
    Opened,
    Ordered,
    Planned,
    PolicyRefused,
    RefusalClass,
    Snapshot,
)
from .lifecycle import INTENT_TIMEOUT_S, InstanceState, advance, expired, seen_state
from .model import (
    CloudInstance,
    CloudView,
    EngineLoad,
    Idle,
    Measured,
    Missing,
    Node,
    Observation,
    Replica,
    ServiceLoad,
    ServingView,
    Signal,
)
from .reasons import ReasonCode
from .snapshot import restore

T = TypeVar("T")

__all__ = ["EMPTY", "Beliefs", "fold", "learn"]

HISTORY_S = 900.0  # load kept per service
PLANNED_S = 3600.0  # the longest hold window that can be looked back on
MIX_TIME_CONSTANT_S = 120.0
GONE_KEPT_S = 60.0

COOLDOWN_BASE_S = 30.0
COOLDOWN_CAP_S = 900.0
NEVER_RUNS = "NeverRuns"  # our word, no code of a cloud
NODE_FAULT = "NodeFault"  # a broken node is emptied as if it were reclaimed; its pool took nothing
BREAKER_STRIKES = 3  # launches of a type that never joined, in a row, before the type itself is doubted
BREAKER_BASE_S = 120.0
BREAKER_CAP_S = 1800.0
DRY_AT_LAUNCH = "Server.InsufficientInstanceCapacity"  # granted, and then there was none after all
DRY: frozenset[RefusalClass] = frozenset({"no_capacity", "refused"})
FIXED_COOLDOWN_S: dict[RefusalClass, float] = {"quota": 1800.0, "misconfigured": 600.0, "not_found": 86_400.0}


def learn(beliefs: Beliefs, event: Event) -> Beliefs:
    """The beliefs after one more event. An event that teaches nothing returns the same object. Never raises."""
    handler = _HANDLERS.get(type(event))
    if handler is None:
        return beliefs
    at_s = max(beliefs.at_s, event.at_s)
    try:
        learnt = handler(beliefs, event)
    except Exception as error:
        return replace(beliefs, at_s=at_s, defect=f"{defect(error)} ({event.kind} not learnt)")
    return replace(learnt, at_s=at_s, defect="" if isinstance(event, Observed) else learnt.defect)


def fold(events: Iterable[Event], start: Beliefs = EMPTY) -> Beliefs:
    """`learn` over all events, oldest first."""
    for event in events:
        start = learn(start, event)
    return start


# ---- configuration and decisions ------------------------------------------------------------------------------------
def _configured(beliefs: Beliefs, event: Configured) -> Beliefs:
    return replace(beliefs, policy=event.policy, shapes=event.shapes, digest=event.digest, policy_refused=False)


def _snapshot(_: Beliefs, event: Snapshot) -> Beliefs:
    return restore(event.beliefs_json)


def _forecasted(beliefs: Beliefs, event: Forecasted) -> Beliefs:
    return replace(beliefs, forecasts=beliefs.forecasts | {row.service: row for row in event.forecasts})


def _planned(beliefs: Beliefs, event: Planned) -> Beliefs:
    services = dict(beliefs.services)
    for demand in event.plan.demands:
        known = services.get(demand.service, ServiceBelief())
        kept = _since(known.planned, event.at_s - PLANNED_S, itemgetter(0))
        services[demand.service] = replace(known, planned=(*kept, (event.at_s, demand.unheld_rps)))
    return replace(beliefs, services=services, last_plan=event.plan)


def _acted(beliefs: Beliefs, event: Acted) -> Beliefs:
    instance = beliefs.instances.get(event.target)
    if instance is None or event.verb == "publish":
        return beliefs
    if event.verb == "terminate":
        moved = _moved(instance, advance(instance.state, InstanceState.TERMINATING), event.at_s)
        return _put_instance(beliefs, replace(moved, excused=_given_back_unused(beliefs, event.target)))
    drains = beliefs.last_plan.drains if beliefs.last_plan else ()
    deadline = next((d.deadline_at_s for d in drains if d.instance_id == event.target), None)
    moved = _moved(instance, advance(instance.state, InstanceState.DRAINING), event.at_s)
    return _put_instance(beliefs, replace(moved, drain_deadline_at_s=deadline))


def _given_back_unused(beliefs: Beliefs, instance_id: str) -> bool:
    acts = beliefs.last_plan.terminates if beliefs.last_plan else ()
    reasons = [reason.code for act in acts if act.instance_id == instance_id for reason in act.reasons]
    return ReasonCode.SURPLUS_STARTING in reasons


# ---- launches -------------------------------------------------------------------------------------------------------
def _tried(beliefs: Beliefs, event: LaunchTried) -> Beliefs:
    intent = IntentBelief(token=event.token, offering=event.offering, count=event.count, tried_at_s=event.at_s)
    return replace(beliefs, intents=beliefs.intents | {event.token: intent})


def _granted(beliefs: Beliefs, event: LaunchGranted) -> Beliefs:
    instances = dict(beliefs.instances)
    for instance_id in event.instance_ids:
        instances.setdefault(
            instance_id,
            InstanceBelief(
                instance_id=instance_id,
                offering=event.offering,
                token=event.token,
                state=InstanceState.REQUESTED,
                since_s=event.at_s,
                launched_at_s=event.at_s,
            ),
        )
    known = odds.counted(beliefs.offerings.get(event.offering, OfferingBelief()), event.at_s, granted=1.0)
    offerings = beliefs.offerings | {
        event.offering: replace(
            known,
            refusals_in_row=0,
            cool_until_s=0.0,
            dry_since_s=None,
            granted=known.granted + len(event.instance_ids),
        )
    }
    return replace(beliefs, instances=instances, offerings=offerings, intents=_without(beliefs.intents, event.token))


def _refused(beliefs: Beliefs, event: LaunchRefused) -> Beliefs:
    beliefs = replace(beliefs, intents=_without(beliefs.intents, event.token))
    if event.error == "throttled":  # says nothing about capacity
        return beliefs
    return _cooled(beliefs, event.offering, event.error, event.code, event.at_s)


def _cooled(beliefs: Beliefs, offering: str, error: RefusalClass, code: str, at_s: float) -> Beliefs:
    """Everything that this refusal speaks for is left alone for a while, longer each time."""
    offerings = dict(beliefs.offerings)
    for name in _fails_together(beliefs, offering, error):
        known = offerings.get(name, OfferingBelief())
        if error in DRY:  # the other classes say nothing about what the pool holds
            known = odds.counted(known, at_s, refused=1.0)
            known = replace(known, dry_since_s=at_s if known.dry_since_s is None else known.dry_since_s)
        else:
            known = replace(known, dry_since_s=None)
        row = known.refusals_in_row + 1
        offerings[name] = replace(
            known,
            refusals_in_row=row,
            cool_until_s=max(known.cool_until_s, at_s + _cooldown_s(name, error, row)),
            last_refusal=code,
            last_refused_at_s=at_s,
            refused=known.refused + (name == offering),
        )
    return replace(beliefs, offerings=offerings)


def _fails_together(beliefs: Beliefs, offering: str, error: RefusalClass) -> tuple[str, ...]:
    """Offerings that one refusal speaks for: the pool when it is dry, family × market × region when a quota is full."""
    asked = beliefs.offers.get(offering)
    if asked is None:
        return (offering,)
    if error == "quota":
        alike = [
            o.offering
            for o in beliefs.offers.values()
            if (family(o.instance_type), o.market, o.region)
            == (family(asked.instance_type), asked.market, asked.region)
        ]
    elif error in DRY:
        alike = [o.offering for o in beliefs.offers.values() if o.pool == asked.pool]
    else:
        alike = [offering]
    return tuple(sorted(alike))


def family(instance_type: str) -> str:
    """The quota family of a type, its leading letters: ``p`` for p4d and p5, ``g`` for g5, g6 and g6e."""
    return re.match("[a-z]*", instance_type)[0]  # type: ignore[index]  # the pattern matches any text


def _cooldown_s(offering: str, error: RefusalClass, refusals_in_row: int) -> float:
    """30 s doubling to 15 min, times 50–100 % by a hash of the offering and the count, so that pools do not march in
    step.
    """
    fixed = FIXED_COOLDOWN_S.get(error)
    if fixed is not None:
        return fixed
    full = min(COOLDOWN_BASE_S * 2.0 ** min(refusals_in_row - 1, 10), COOLDOWN_CAP_S)
    return full * (0.5 + 0.5 * (zlib.crc32(f"{offering}/{refusals_in_row}".encode()) / 0xFFFFFFFF))


# ---- observations ---------------------------------------------------------------------------------------------------
def _observed(beliefs: Beliefs, event: Observed) -> Beliefs:
    seen = event.observation
    if not isinstance(seen.cloud, Missing):
        beliefs = _learn_cloud(beliefs, seen.cloud, seen)
    if not isinstance(seen.serving, Missing):
        beliefs = coldstart.observe(beliefs, seen.serving)
    beliefs = spend.observe(beliefs, seen)
    return _learn_engines(_learn_loads(beliefs, seen), seen)


def _learn_cloud(beliefs: Beliefs, cloud: CloudView, seen: Observation) -> Beliefs:
    nodes = _nodes_by_instance(seen.serving)
    listed = {row.instance_id: row for row in cloud.instances}
    beliefs = replace(
        beliefs,
        **odds.offered(beliefs, cloud),
        intents=_unsettled(beliefs.intents, cloud),
    )
    instances: dict[str, InstanceBelief] = {}
    for instance_id in sorted(listed.keys() | beliefs.instances.keys()):
        row, known = listed.get(instance_id), beliefs.instances.get(instance_id)
        if known is None and row is not None and row.state == "terminated":
            continue  # EC2 lists what has ended for an hour: its end was learnt from long ago
        if row is None:
            assert known is not None
            before, now = known, _unlisted(known, cloud.at_s)
        else:
            before = known or _adopted(row, cloud.at_s)
            now = _listed(before, row, nodes, cloud.at_s)
        beliefs = _learn_end(beliefs, before, now, row, cloud.at_s)
        if _never_runs(beliefs, now, cloud.at_s):
            beliefs = _cooled(beliefs, now.offering, "no_capacity", NEVER_RUNS, cloud.at_s)
        noticed = now.reclaim_at_s is not None and before.reclaim_at_s is None
        if noticed and row is not None and not row.state_reason.startswith(NODE_FAULT):
            beliefs = odds.reclaimed(beliefs, now, cloud.at_s)
        elif now.state is InstanceState.GONE and before.state is not InstanceState.GONE:
            beliefs = odds.given_back(beliefs, now)
        if not (now.state is InstanceState.GONE and cloud.at_s - now.since_s > GONE_KEPT_S):
            instances[instance_id] = now
    return replace(beliefs, instances=instances)


def _never_runs(beliefs: Beliefs, instance: InstanceBelief, at_s: float) -> bool:
    """Granted, and pending beyond its limit: besides the strike of its type that says something of the pool."""
    pending = instance.state is InstanceState.PENDING
    if not pending or at_s - instance.since_s <= coldstart.start_limit_s(beliefs, instance):
        return False
    asked = beliefs.offerings.get(instance.offering)
    return asked is None or asked.cool_until_s <= at_s


def _unsettled(intents: dict[str, IntentBelief], cloud: CloudView) -> dict[str, IntentBelief]:
    """Calls that neither this listing nor the time since answers."""
    tokens = {row.token for row in cloud.instances}
    return {
        token: intent
        for token, intent in intents.items()
        if token not in tokens and cloud.at_s - intent.tried_at_s <= INTENT_TIMEOUT_S
    }


def _adopted(row: CloudInstance, at_s: float) -> InstanceBelief:
    return InstanceBelief(
        instance_id=row.instance_id,
        offering=row.offering,
        token=row.token,
        state=InstanceState.REQUESTED,
        since_s=at_s,
        launched_at_s=row.launched_at_s,
    )


def _learn_end(
    beliefs: Beliefs, before: InstanceBelief, now: InstanceBelief, row: CloudInstance | None, at_s: float
) -> Beliefs:
    """What the end of a start teaches: how long a boot takes, or that nothing of this type gets up."""
    offer = beliefs.offers.get(now.offering)
    if offer is None:
        return beliefs
    kind = offer.instance_type
    if now.joined and not before.joined:
        boots = coldstart.ring(beliefs.boot_s.get(kind, ()), at_s - now.launched_at_s)
        return replace(beliefs, boot_s=beliefs.boot_s | {kind: boots}, breakers=_without(beliefs.breakers, kind))
    ended = now.state is InstanceState.GONE and before.state is not InstanceState.GONE
    if not ended or now.joined or now.excused or now.reclaim_at_s is not None or row is None:
        return beliefs
    if row.state_reason.startswith(DRY_AT_LAUNCH):
        return _cooled(beliefs, now.offering, "no_capacity", DRY_AT_LAUNCH, at_s)
    strikes = beliefs.breakers.get(kind, Breaker()).strikes + 1
    open_s = min(BREAKER_BASE_S * 2.0 ** (strikes - BREAKER_STRIKES), BREAKER_CAP_S)
    breaker = Breaker(strikes=strikes, open_until_s=at_s + open_s if strikes >= BREAKER_STRIKES else 0.0)
    return replace(beliefs, breakers=beliefs.breakers | {kind: breaker})


def _listed(before: InstanceBelief, row: CloudInstance, nodes: dict[str, Node] | None, at_s: float) -> InstanceBelief:
    """The instance after a listing. Without a view of the cluster (`nodes` None) nothing is said of its node."""
    node = nodes.get(row.instance_id) if nodes is not None else None
    moved = _moved(before, advance(before.state, seen_state(row, node)), at_s)
    in_cluster = moved.state in (InstanceState.JOINED, InstanceState.DRAINING)
    missing = before.missing_since_s
    if nodes is not None:
        missing = (missing or at_s) if node is None or not node.alive else None
    missing = missing if in_cluster else None
    joined = before.joined or moved.state is InstanceState.JOINED
    moved = coldstart.got_on(moved, row.progress_bytes, at_s)
    if (moved.reclaim_at_s, moved.missing_since_s, moved.joined) == (row.reclaim_at_s, missing, joined):
        return moved  # nearly always: most instances do nothing new in a tick
    return replace(moved, reclaim_at_s=row.reclaim_at_s, missing_since_s=missing, joined=joined)


def _unlisted(known: InstanceBelief, at_s: float) -> InstanceBelief:
    """A just-granted instance may be missing from a lagging listing; any other that vanished is gone."""
    if known.state is InstanceState.REQUESTED and not expired(known.state, at_s - known.since_s):
        return known
    return _moved(known, InstanceState.GONE, at_s)


def _moved(instance: InstanceBelief, state: InstanceState, at_s: float) -> InstanceBelief:
    return instance if state is instance.state else replace(instance, state=state, since_s=at_s)


def _put_instance(beliefs: Beliefs, instance: InstanceBelief) -> Beliefs:
    return replace(beliefs, instances=beliefs.instances | {instance.instance_id: instance})


def _nodes_by_instance(serving: ServingView | Missing) -> dict[str, Node] | None:
    """Live nodes win over dead ones of the same instance (a restarted raylet is a new node). None when not seen."""
    if isinstance(serving, Missing):
        return None
    return {node.instance_id: node for node in sorted(serving.nodes, key=lambda n: (n.alive, n.node_id))}


def _learn_loads(beliefs: Beliefs, seen: Observation) -> Beliefs:
    services = dict(beliefs.services)
    if isinstance(seen.loads, Missing):
        for service, known in services.items():
            services[service] = replace(known, blind_why=seen.loads.why)
        return replace(beliefs, services=services)
    for load in seen.loads:
        services[load.service] = _learn_load(services.get(load.service, ServiceBelief()), load, seen.at_s)
    return replace(beliefs, services=services, series=series.observe(beliefs.series, seen.loads, seen.at_s))


def _learn_load(known: ServiceBelief, load: ServiceLoad, at_s: float) -> ServiceBelief:
    if isinstance(load.arrival_rps, Missing):
        return replace(known, blind_why=load.arrival_rps.why)
    rps = _value(load.arrival_rps) or 0.0
    # Until a first answer nobody knows how long requests are. To call that blind would keep a service at zero for ever.
    prefill, decode = _value(load.prefill_tps) or 0.0, _value(load.decode_tps) or 0.0
    sample = Sample(at_s=at_s, arrival_rps=rps, prefill_tps=prefill, decode_tps=decode)
    kept = _since(known.history, at_s - HISTORY_S, attrgetter("at_s"))
    queued = _value(load.queued)
    return replace(
        known,
        history=(*kept, sample),
        input_tokens=_mixed(known, known.input_tokens, prefill, rps, at_s),
        output_tokens=_mixed(known, known.output_tokens, decode, rps, at_s),
        queued=known.queued if queued is None else queued,
        blind_why="",
        bursts=bursts.observe(known.bursts, [(row.at_s, row.arrival_rps) for row in kept[-2:]], at_s, rps),
        tasks=_tasks(known, load.tasks_rps, rps, at_s),
    )


def _tasks(known: ServiceBelief, begun: Signal, rps: float, at_s: float) -> tasks.Tasks:
    """The first observation has no span; of gateways that do not count tasks nothing is learnt."""
    begun_rps = _value(begun)
    if not known.history or begun_rps is None:
        return known.tasks
    return tasks.observe(known.tasks, at_s - known.history[-1].at_s, rps, begun_rps)


def _learn_engines(beliefs: Beliefs, seen: Observation) -> Beliefs:
    """What engines say of themselves. Those that Serve no longer lists as ready have no say."""
    if isinstance(seen.engines, Missing) or isinstance(seen.serving, Missing):
        return beliefs
    ready = {row.replica_id: row for row in seen.serving.replicas if row.state == "ready"}
    beliefs = calibrate.observe(beliefs, seen.engines, ready, seen.at_s)
    return _learn_services(beliefs, seen.engines, ready, seen.at_s)


def _learn_services(
    beliefs: Beliefs, engines: tuple[EngineLoad, ...], ready: dict[str, Replica], at_s: float
) -> Beliefs:
    """KV use of the fullest engine of each service, and the prompts that its engines prefilled."""
    fullest: dict[str, float] = {}
    prefilled: dict[str, tuple[float, float]] = {}
    for engine in engines:
        replica, used = ready.get(engine.replica_id), _value(engine.kv_fraction)
        if replica is None:
            continue
        if used is not None:
            fullest[replica.service] = max(used, fullest.get(replica.service, 0.0))
        if isinstance(engine.input_tokens, Measured):
            count, tokens = prefilled.get(replica.service, (0.0, 0.0))
            prefilled[replica.service] = (count + engine.samples, tokens + engine.samples * engine.input_tokens.value)
    services = {
        key: replace(known, kv_fraction=fullest.get(key), prompts=_prompts(known, prefilled.get(key, (0.0, 0.0)), at_s))
        for key, known in beliefs.services.items()
    }
    return replace(beliefs, services=services)


def _prompts(known: ServiceBelief, prefilled: tuple[float, float], at_s: float) -> prompts.Prompts:
    """Arrivals and prefills of one tick belong together: without a view of both, nothing is learnt."""
    if len(known.history) < 2 or known.history[-1].at_s != at_s:
        return known.prompts
    last, now = known.history[-2:]
    return prompts.observe(known.prompts, now.at_s - last.at_s, now.arrival_rps, now.prefill_tps, prefilled)


def _mixed(known: ServiceBelief, mean: float, tps: float, rps: float, at_s: float) -> float:
    """Exponential mean of tokens per request, by time and not by tick, that silence does not change."""
    if rps <= 0.0 or tps <= 0.0:
        return mean
    if mean <= 0.0 or not known.history:
        return tps / rps
    weight = min(1.0, max(0.0, at_s - known.history[-1].at_s) / MIX_TIME_CONSTANT_S)
    return mean + weight * (tps / rps - mean)


def _value(signal: Signal) -> float | None:
    if isinstance(signal, Measured):
        return signal.value
    return 0.0 if isinstance(signal, Idle) else None


def _since(rows: tuple[T, ...], at_s: float, when: Callable[[T], float]) -> tuple[T, ...]:
    """The rows, which are in order of time, from after `at_s` on."""
    return rows[bisect_right(rows, at_s, key=when) :]


def _without(rows: dict[str, T], gone: str) -> dict[str, T]:
    return {key: value for key, value in rows.items() if key != gone}


_HANDLERS: dict[type, Callable[[Beliefs, Any], Beliefs]] = {
    Opened: lambda beliefs, event: replace(beliefs, run_id=event.run_id),
    Configured: _configured,
    PolicyRefused: lambda beliefs, _: replace(beliefs, policy_refused=True),
    Snapshot: _snapshot,
    Observed: _observed,
    Forecasted: _forecasted,
    Planned: _planned,
    Acted: _acted,
    LaunchTried: _tried,
    LaunchGranted: _granted,
    LaunchRefused: _refused,
    LaunchAmbiguous: lambda beliefs, _: beliefs,  # until a listing shows its token or its time is over
    Ordered: orders.ordered,
}
