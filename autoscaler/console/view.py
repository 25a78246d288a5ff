"""What the page shows, as a fold of the journal: the same for a running controller and a finished or simulated run.

Pure: records in, plain JSON values out. May not read a file, a clock or the cluster. Rates are requests/s, money USD an
hour, instants UTC seconds, fractions 0–1.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoscaler.console.kept import Kept, counted
from autoscaler.core.beliefs import EMPTY, Beliefs, InstanceBelief, OfferingBelief
from autoscaler.core.events import (
    Acted,
    ActFailed,
    CheckFailed,
    Configured,
    Event,
    LaunchAmbiguous,
    LaunchGranted,
    LaunchRefused,
    Observed,
    Opened,
    Ordered,
    Planned,
    PolicyRefused,
    Record,
)
from autoscaler.core.learn import learn
from autoscaler.core.lifecycle import STARTING, InstanceState
from autoscaler.core.model import Launch, Measured, Missing, Observation, Plan, Replica
from autoscaler.core.odds import Odds
from autoscaler.core.orders import in_force
from autoscaler.core.reasons import Reason
from autoscaler.diagnose import Causes
from autoscaler.explain import order_words, words

Json = dict[str, Any]
HISTORY = 360  # points of a service's chart: an hour of ticks
LEVEL_S = 60.0
LOG = 100  # newest lines of the decision log
MARKETS = ("odcr", "block", "interruptible", "spot", "on_demand")  # supply is stacked in this order


class _Short(NamedTuple):
    """`lacking` replicas (instances, where a launch was refused) that a service lacks."""

    service: str
    lacking: int
    reasons: tuple[Reason, ...]
    expected_at_s: float | None = None


@dataclass(slots=True)
class View:
    """Call `take` for each record in order; `page` is what all of the page needs, `service` what one service's part
    needs besides.
    """

    beliefs: Beliefs = EMPTY
    seq: int = 0
    seen: Observation | None = None
    problems: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    launches: dict[str, Launch] = field(default_factory=dict)  # the last of each service
    log: deque[Json] = field(default_factory=lambda: deque(maxlen=LOG))
    history: dict[str, deque[Json]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=HISTORY)))
    causes: Causes = field(default_factory=lambda: Causes(None))
    kept: dict[str, Kept] = field(default_factory=lambda: defaultdict(Kept))
    _targets: dict[tuple[str, str], int] = field(default_factory=dict)
    _plan: Plan | None = None
    _got: Counter[str] = field(default_factory=Counter)  # granted, by launch of the plan
    _denied: set[str] = field(default_factory=set)  # launches of the plan that somebody refused
    _told: set[str] = field(default_factory=set)  # services whose shortage is in the log

    def take(self, record: Record) -> None:
        """One more record."""
        self.seq, event = record.seq, record.event
        self.beliefs = learn(self.beliefs, event)
        self.causes.take(record)
        match event:
            case Observed():
                for load, ended, met in counted(event.observation, self.seen):
                    self.kept[load.service].add(event.at_s, ended, met)
                self.seen = event.observation
            case PolicyRefused():
                self.problems = event.problems
            case Configured():
                self.problems = ()
            case CheckFailed():
                self.violations = event.violations
            case Planned():
                self.violations = ()
                self.launches |= {launch.service: launch for launch in event.plan.launches}
                self._remember(event.plan)
                self._settle()
                self._plan, self._denied = event.plan, set()
                self._got.clear()
                self._tell_plan(event.plan)
            case LaunchGranted():
                self._got[event.intent] += len(event.instance_ids)
            case LaunchRefused() | LaunchAmbiguous():
                self._denied.add(event.intent)
            case _:
                pass
        self._tell(event)

    # ---- the log ----------------------------------------------------------------------------------------------------
    def _say(self, at_s: float, kind: str, text: str, why: str = "", service: str = "") -> None:
        self.log.append({"seq": self.seq, "at_s": at_s, "kind": kind, "text": text, "why": why, "service": service})

    def _tell(self, event: Event) -> None:
        """The events that an operator reads; plans are told by what changed in them."""
        match event:
            case Opened():
                self._say(event.at_s, "policy", f"controller started, run {event.run_id}")
            case Configured():
                self._say(event.at_s, "policy", f"policy {event.digest} in force")
            case PolicyRefused():
                self._say(event.at_s, "fault", "policy not taken, the last good one stays", "; ".join(event.problems))
            case CheckFailed():
                self._say(event.at_s, "fault", "a plan broke an invariant, not acted on", "; ".join(event.violations))
            case Ordered():
                self._say(event.at_s, "ordered", order_words(event))
            case LaunchGranted():
                self._say(event.at_s, "granted", f"{len(event.instance_ids)} granted at {event.offering}")
            case LaunchRefused():
                self._say(event.at_s, "refused", f"{event.offering} refused", event.code)
            case LaunchAmbiguous():
                self._say(event.at_s, "fault", f"{event.offering} did not answer: the next listing shows", event.why)
            case ActFailed():
                self._say(event.at_s, "fault", f"{event.verb} {event.target} failed", event.error)
            case Acted(verb="drain" | "terminate"):
                self._say(event.at_s, "released", f"{event.verb} {event.target}", event.detail)
            case _:
                pass

    def _tell_plan(self, plan: Plan) -> None:
        for target in plan.targets:
            key = (target.service, target.variant)
            before = self._targets.get(key, 0)
            if before != target.wanted:
                text = f"{target.service}: {before} → {target.wanted} replicas of {target.variant}"
                self._say(plan.at_s, "plan", text, _why(target.reasons), target.service)
        self._targets = {(target.service, target.variant): target.wanted for target in plan.targets}
        for launch in plan.launches:
            text = (
                f"{launch.service}: ask for {launch.count} at {launch.alternates[0] if launch.alternates else 'none'}"
            )
            self._say(plan.at_s, "launch", text, _why(launch.reasons), launch.service)
        self._tell_short(tuple(_Short(row.service, row.replicas, row.reasons) for row in plan.shortfalls))

    def _tell_short(self, rows: tuple[_Short, ...]) -> None:
        for row in rows:
            if row.service not in self._told:
                self._told.add(row.service)
                text = f"{row.service}: short of {row.lacking}"
                self._say(self.beliefs.at_s, "short", text, _why(row.reasons), row.service)

    def _settle(self) -> None:
        """Before the next plan: what became of the last. A shortage is over when a whole tick went without it: a plan
        that asks a dry pool again reports none until the pool has answered.
        """
        rows = self._shortages()
        self._tell_short(rows)
        for service in sorted(self._told - {row.service for row in rows}):
            self._told.remove(service)
            self._say(self.beliefs.at_s, "recovered", f"{service}: no longer short", "", service)

    def _shortages(self) -> tuple[_Short, ...]:
        """What has no place by the plan in force, and what was asked for and refused since."""
        if self._plan is None:
            return ()
        rows = [_Short(row.service, row.replicas, row.reasons, row.expected_at_s) for row in self._plan.shortfalls]
        for launch in self._plan.launches:
            left = launch.count - self._got[launch.id]
            if launch.id in self._denied and left > 0:
                rows.append(_Short(launch.service, left, launch.reasons))
        return tuple(rows)

    # ---- history ----------------------------------------------------------------------------------------------------
    def _remember(self, plan: Plan) -> None:
        ready = _ready(self.seen)
        carries = {(row.service, row.variant): row.capacity_rps_per_replica for row in plan.routes}
        supply: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for replica in ready:
            rps = carries.get((replica.service, replica.variant), 0.0)
            supply[replica.service][self._market(replica.instance_id)] += rps
        now = _arrivals(self.seen)
        for demand in plan.demands:
            self.history[demand.service].append(
                {
                    "at_s": plan.at_s,
                    "rps": now.get(demand.service),
                    "planned_rps": demand.arrival_rps,
                    "supply_rps": {m: round(v, 4) for m, v in sorted(supply[demand.service].items())},
                }
            )

    def _market(self, instance_id: str) -> str:
        held = self.beliefs.instances.get(instance_id)
        offer = self.beliefs.offers.get(held.offering) if held is not None else None
        return offer.market if offer is not None else "unknown"

    # ---- the page ---------------------------------------------------------------------------------------------------
    def page(self) -> Json:
        """Everything but the parts of single services; one JSON object, the same keys always."""
        services = list(self._services())
        return {
            "seq": self.seq,
            "at_s": self.beliefs.at_s,
            "run_id": self.beliefs.run_id,
            "policy": self.beliefs.digest,
            "alarms": list(self._alarms()),
            "headline": _headline(services, self._blind()),
            "services": services,
            "units": self._units(services),
            "pools": self._pools(),
            "orders": [order_words(order) for order in in_force(self.beliefs, self.beliefs.at_s)],
            "log": list(reversed(self.log)),
        }

    def _blind(self) -> tuple[str, ...]:
        seen = self.seen
        ports = (("metrics", seen.loads), ("serving", seen.serving), ("cloud", seen.cloud)) if seen is not None else ()
        return tuple(f"{port}: {said.why}" for port, said in ports if isinstance(said, Missing))

    def _alarms(self) -> Iterator[str]:
        yield from (f"not seen: {line}" for line in self._blind())
        yield from (f"policy refused, the last good one stays: {line}" for line in self.problems)
        yield from (f"plan not acted on: {line}" for line in self.violations)
        yield from (f"not learnt: {line}" for line in (self.beliefs.defect,) if line)
        failed = sorted(row.service for row in self.beliefs.forecasts.values() if row.failed)
        yield from (f"forecast failed, the one before is used: {service}" for service in failed)

    def _services(self) -> Iterator[Json]:
        policy, plan = self.beliefs.policy, self.beliefs.last_plan
        if policy is None:
            return
        replicas = _replicas(self.seen)
        ready = Counter(row.service for row in _ready(self.seen))
        coming = Counter(row.service for row in replicas if row.state in ("pending", "loading"))
        now, cost = _arrivals(self.seen), self._cost_by_service()
        demands = {row.service: row for row in plan.demands} if plan is not None else {}
        short = {row.service: row for row in reversed(self._shortages())}
        lacks = Counter[str]()
        for row in self._shortages():
            lacks[row.service] += row.lacking
        for key, unit, entry in policy.services():
            demand, missing, kept = demands.get(key), short.get(key), self.kept[key].fraction()
            targets = [row for row in plan.targets if row.service == key] if plan is not None else []
            carries = sum(
                row.ready * row.capacity_rps_per_replica for row in (plan.routes if plan else ()) if row.service == key
            )
            yield {
                "service": key,
                "unit": unit.unit,
                "model": entry.model,
                "goal": entry.goal,
                "priority": entry.priority,
                "slo": entry.slo.model_dump(exclude_none=True),
                "kept": kept,
                "budget_left": None if kept is None else 1.0 - (1.0 - kept) / (1.0 - entry.slo.fraction),
                "rps": now.get(key),
                "planned_rps": demand.arrival_rps if demand is not None else None,
                "carries_rps": carries,
                "ready": ready[key],
                "coming": coming[key],
                "wanted": sum(row.wanted for row in targets),
                "target": sum(row.replicas for row in targets),
                "short": lacks[key],
                "expected_at_s": missing.expected_at_s if missing is not None else None,
                "usd_per_h": round(cost.get(key, 0.0), 4),
                "state": _state(
                    missing, self._level(key, now.get(key)), carries, ready[key], sum(row.wanted for row in targets)
                ),
                "why": _why(missing.reasons if missing is not None else demand.reasons if demand is not None else ()),
            }

    def _level(self, service: str, rps: float | None) -> float | None:
        """The mean rate of the last minute where it is seen now: a single tick's is mostly chance."""
        known = self.beliefs.services.get(service)
        rates = [row.arrival_rps for row in known.history if row.at_s > self.beliefs.at_s - LEVEL_S] if known else []
        return sum(rates) / len(rates) if rates and rps is not None else rps

    def _cost_by_service(self) -> dict[str, float]:
        """Each instance's price, shared by GPUs among the replicas on it; what nobody uses is under the empty name."""
        gpus = {(shape.service, shape.variant): shape.gpus for shape in self.beliefs.shapes}
        on: dict[str, list[Replica]] = defaultdict(list)
        for replica in _replicas(self.seen):
            for instance in (replica.instance_id, *replica.also_on):
                on[instance].append(replica)
        cost: dict[str, float] = defaultdict(float)
        for held in self._held():
            offer = self.beliefs.offers.get(held.offering)
            if offer is None:
                continue
            left = offer.price_usd_per_h
            for replica in on[held.instance_id]:
                part = min(
                    left, offer.price_usd_per_h * gpus.get((replica.service, replica.variant), 0) / max(1, offer.gpus)
                )
                cost[replica.service] += part
                left -= part
            cost[""] += left
        return cost

    def _held(self) -> Iterator[InstanceBelief]:
        return (row for row in self.beliefs.instances.values() if row.state is not InstanceState.GONE)

    def _units(self, services: list[Json]) -> list[Json]:
        policy = self.beliefs.policy
        rows: list[Json] = []
        for unit in policy.units if policy is not None else ():
            mine = [row for row in services if row["unit"] == unit.unit]
            spent = self.beliefs.spent.get(unit.unit)
            rows.append(
                {
                    "unit": unit.unit,
                    "owner": unit.owner,
                    "services": len(mine),
                    "short": sum(row["short"] for row in mine),
                    "usd_per_h": round(sum(row["usd_per_h"] for row in mine), 4),
                    "budget_usd_per_h": unit.budget_usd_per_h,
                    "month_usd": round(spent.usd, 2) if spent is not None else None,
                    "budget_usd_per_month": unit.budget_usd_per_month,
                    "quota_gpus": unit.quota_gpus,
                }
            )
        unused = self._cost_by_service().get("", 0.0)
        idle = {"unit": "", "owner": "", "services": 0, "short": 0, "usd_per_h": round(unused, 4)}
        none = dict.fromkeys(("budget_usd_per_h", "month_usd", "budget_usd_per_month", "quota_gpus"))
        return [*rows, idle | none]

    def _pools(self) -> list[Json]:
        odds = Odds(self.beliefs, self.beliefs.at_s)
        held = Counter(row.offering for row in self._held())
        starting = Counter(row.offering for row in self._held() if row.state in STARTING)
        rows: list[Json] = []
        for name, offer in sorted(self.beliefs.offers.items()):
            known = self.beliefs.offerings.get(name, OfferingBelief())
            rows.append(
                {
                    "offering": name,
                    "instance_type": offer.instance_type,
                    "zone": offer.zone,
                    "market": offer.market,
                    "usd_per_h": offer.price_usd_per_h,
                    "held": held[name],
                    "starting": starting[name],
                    "odds": round(odds.grant(offer), 4),
                    "refusals_in_row": known.refusals_in_row,
                    "last_refusal": known.last_refusal,
                    "cool_until_s": known.cool_until_s if known.cool_until_s > self.beliefs.at_s else None,
                    "ends_at_s": offer.ends_at_s,
                }
            )
        return rows

    # ---- one service ------------------------------------------------------------------------------------------------
    def service(self, name: str) -> Json | None:
        """History, forecast and ladder of one service; None when the policy has no such service."""
        policy = self.beliefs.policy
        if policy is None or name not in {key for key, _, _ in policy.services()}:
            return None
        cast, launch = self.beliefs.forecasts.get(name), self.launches.get(name)
        fan = None
        if cast is not None and cast.quantiles:
            fan = {"at_s": self.beliefs.at_s, "lead_s": cast.lead_s, "quantiles": [list(q) for q in cast.quantiles],
                   "member": cast.member, "coverage": cast.coverage}  # fmt: skip
        pools = {row["offering"]: row for row in self._pools()}
        alternates = launch.alternates if launch is not None else ()
        return {
            "service": name,
            "seq": self.seq,
            "markets": [*MARKETS, "unknown"],
            "history": list(self.history[name]) if name in self.history else [],
            "forecast": fan,
            "ladder": [pools[offering] for offering in alternates if offering in pools],
            "causes": self._causes(name),
            "instances": sorted({row.instance_id for row in _replicas(self.seen) if row.service == name} - {""}),
            "ladder_why": [words(reason) for reason in launch.reasons] if launch is not None else [],
        }

    def _causes(self, name: str) -> list[Json]:
        """Why requests missed their limits, by `qm diagnose`'s words, the most misses first."""
        rows = (row for row in self.causes.told().services if row.service == name)
        return [
            {"cause": each.cause.value, "share": each.share, "misses": each.misses, "evidence": each.evidence}
            for row in rows
            for each in row.causes
        ]


def _replicas(seen: Observation | None) -> tuple[Replica, ...]:
    return () if seen is None or isinstance(seen.serving, Missing) else seen.serving.replicas


def _ready(seen: Observation | None) -> list[Replica]:
    return [row for row in _replicas(seen) if row.state == "ready"]


def _arrivals(seen: Observation | None) -> dict[str, float | None]:
    """Requests/s by service as last measured, 0 where idle, None where not seen."""
    if seen is None or isinstance(seen.loads, Missing):
        return {}
    return {
        load.service: load.arrival_rps.value if isinstance(load.arrival_rps, Measured)
        else None if isinstance(load.arrival_rps, Missing) else 0.0
        for load in seen.loads
    }  # fmt: skip


def _why(reasons: tuple[Reason, ...]) -> str:
    return "; ".join(words(reason) for reason in reasons)


def _state(missing: _Short | None, rps: float | None, carries_rps: float, ready: int, wanted: int) -> str:
    """short: what is wanted has no place; over: more arrives than the ready replicas carry within the objective."""
    if missing is not None:
        return "short"
    if rps is None:
        return "unseen"
    if rps > carries_rps and rps > 0:
        return "over"
    return "coming" if ready < wanted else "served"


def _headline(services: list[Json], blind: tuple[str, ...]) -> Json:
    """The answer to: is everyone served?"""
    count = Counter(row["state"] for row in services)
    if not services:
        return {"state": "unseen", "text": "No policy is in force yet."}
    if count["short"] or count["over"]:
        parts = [f"{count['short']} short of capacity"] * bool(count["short"])
        parts += [f"{count['over']} over what is ready"] * bool(count["over"])
        worst = next(row["service"] for row in services if row["state"] in ("short", "over"))
        return {"state": "short", "text": f"{' and '.join(parts)}, of {len(services)}. First: {worst}."}
    if blind or count["unseen"]:
        return {"state": "unseen", "text": f"Not everything is seen: {count['unseen']} of {len(services)} unmeasured."}
    if count["coming"]:
        return {"state": "coming", "text": f"All {len(services)} served; {count['coming']} still growing."}
    return {"state": "served", "text": f"All {len(services)} services have what they need."}
