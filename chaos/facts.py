"""What a journal shows, summed up: launches, ready replicas, reclaims, cost. One pass over the records, oldest first.

Pure; may not read a clock, a file or a network. The same fold serves a live run and a simulated one, because both
write the same journal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from autoscaler.core.events import (
    Acted,
    CheckFailed,
    Configured,
    LaunchGranted,
    LaunchRefused,
    LaunchTried,
    Observed,
    Planned,
    Record,
)
from autoscaler.core.model import CloudInstance, CloudView, Offering, Plan, ServingView, Shape
from autoscaler.core.units import SECONDS_PER_HOUR
from policies.model import PolicySet

MIN_BILLED_S = 60.0
RESERVED = ("odcr", "block", "interruptible")
UNASSIGNED = "unassigned"  # cost of an instance that never held a replica
RUNGS = ("reservation", "market", "instance_type", "zone")  # how far from the refused offering, farthest first


def billed_usd(price_usd_per_h: float, held_s: float) -> float:
    """Cost of holding an instance: by the second, at least a minute."""
    return price_usd_per_h * max(MIN_BILLED_S, held_s) / SECONDS_PER_HOUR


@dataclass(slots=True)
class Held:
    """One instance of ours over its life. `unit_s` = replica-seconds by unit; `busy_s` = seconds with any replica."""

    offering: Offering
    token: str
    from_s: float
    until_s: float
    gone: bool = False
    returned: bool = False  # the controller gave it back: a drained node may end by itself before it is terminated
    reclaim_at_s: float | None = None
    empty_at_s: float | None = None
    busy_s: float = 0.0
    unit_s: dict[str, float] = field(default_factory=dict)

    @property
    def cost_usd(self) -> float:
        """What it cost so far."""
        return billed_usd(self.offering.price_usd_per_h, self.until_s - self.from_s)


@dataclass(frozen=True, slots=True, order=True)
class Peak:
    """Ready replicas at one instant, and the nodes and pools that held them."""

    replicas: int = 0
    nodes: int = 0
    pools: int = 0


@dataclass(slots=True)
class Facts:
    """The sums. Fill with `take`, oldest record first, or use `facts`."""

    policy: PolicySet | None = None
    shapes: tuple[Shape, ...] = ()
    offerings: dict[str, Offering] = field(default_factory=dict)
    instances: dict[str, Held] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)  # tokens of launches
    attempted: int = 0
    granted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    granted_by_pool: Counter[str] = field(default_factory=Counter)
    refused_by_pool: Counter[str] = field(default_factory=Counter)
    refused_then_granted: int = 0
    rungs_s: dict[str, float] = field(default_factory=dict)
    peak: Peak = Peak()
    direction_changes: int = 0
    priority_inversion_s: float = 0.0
    idle_reservation_h: float = 0.0
    violations: list[tuple[float, str, str]] = field(default_factory=list)
    ready_at: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    _first_refusal: LaunchRefused | None = None
    _refused_pools: dict[str, set[str]] = field(default_factory=dict)
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # service → last target, last direction
    _inverted_since_s: float | None = None
    _tokens: dict[str, tuple[int, set[str]]] = field(default_factory=dict)  # token → asked, instances seen

    # ---- the fold ---------------------------------------------------------------------------------------------------
    def take(self, record: Record) -> None:
        """Add one record."""
        match record.event:
            case Configured(policy=policy, shapes=shapes):
                self.policy, self.shapes = policy, shapes
            case Observed() as event:
                self._observed(event)
            case Planned(plan=plan):
                self._planned(plan)
            case Acted(verb="drain" | "terminate", target=target) if target in self.instances:
                self.instances[target].returned = True
            case CheckFailed(at_s=at_s, violations=violations):
                self.violations += [(at_s, "check_failed", text) for text in violations]
            case LaunchTried() as event:
                self.attempted += 1
                self.tried.add(event.token)
                self._tokens.setdefault(event.token, (event.count, set()))
                self._rung(event)
            case LaunchGranted() as event:
                self._granted(event)
            case LaunchRefused() as event:
                self._first_refusal = self._first_refusal or event
                self.refused[event.error] += 1
                self.refused_by_pool[self._pool(event.offering)] += 1
                self._refused_pools.setdefault(event.intent, set()).add(self._pool(event.offering))

    def _pool(self, offering: str) -> str:
        return self.offerings[offering].pool if offering in self.offerings else offering

    def _granted(self, event: LaunchGranted) -> None:
        self.granted += 1
        pool = self._pool(event.offering)
        self.granted_by_pool[pool] += len(event.instance_ids)
        # An intent belongs to one plan, so both answers to it came in one tick.
        self.refused_then_granted += bool(self._refused_pools.get(event.intent, set()) - {pool})

    def _rung(self, event: LaunchTried) -> None:
        first = self._first_refusal
        if first is None or not {first.offering, event.offering} <= self.offerings.keys():
            return
        refused, tried = self.offerings[first.offering], self.offerings[event.offering]
        rung = next((name for name in RUNGS if getattr(refused, name) != getattr(tried, name)), None)
        if rung is not None:
            self.rungs_s.setdefault(rung, event.at_s - first.at_s)

    def _observed(self, event: Observed) -> None:
        cloud, serving = event.observation.cloud, event.observation.serving
        if isinstance(cloud, CloudView):
            self._listed(cloud)
        if isinstance(serving, ServingView):
            self._served(event.at_s, serving)

    def _listed(self, cloud: CloudView) -> None:
        self.offerings.update((offering.offering, offering) for offering in cloud.offerings)
        alive = {seen.instance_id: seen for seen in cloud.instances if seen.state != "terminated"}
        for key, held in self.instances.items():
            if not held.gone:
                held.until_s = cloud.at_s
                held.gone = key not in alive
                if held.gone and held.reclaim_at_s is not None and held.empty_at_s is None:
                    held.empty_at_s = cloud.at_s
        for seen in alive.values():
            self._alive(seen, cloud.at_s)

    def _alive(self, seen: CloudInstance, at_s: float) -> None:
        if seen.offering not in self.offerings:
            return
        if seen.instance_id not in self.instances:
            self.instances[seen.instance_id] = Held(self.offerings[seen.offering], seen.token, seen.launched_at_s, at_s)
            asked, ids = self._tokens.setdefault(seen.token, (1, set()))
            ids.add(seen.instance_id)
            if len(ids) > asked:
                self.violations.append((at_s, "launched_twice", f"token {seen.token} asked {asked}, got {sorted(ids)}"))
        held = self.instances[seen.instance_id]
        held.reclaim_at_s = held.reclaim_at_s if held.reclaim_at_s is not None else seen.reclaim_at_s

    def _served(self, at_s: float, serving: ServingView) -> None:
        last_s = self.ready_at[-1][0] if self.ready_at else at_s
        ready = [seen for seen in serving.replicas if seen.state == "ready"]
        self.ready_at.append((at_s, frozenset(seen.service for seen in ready)))
        nodes = {seen.instance_id for seen in ready}
        pools = {self.instances[key].offering.pool for key in nodes if key in self.instances}
        self.peak = max(self.peak, Peak(len(ready), len(nodes), len(pools)))
        on_instance: dict[str, list[str]] = defaultdict(list)
        for seen in serving.replicas:
            on_instance[seen.instance_id].append(seen.service.split("/")[0])
        for key, held in self.instances.items():
            if not held.gone:
                self._occupied(held, on_instance[key], at_s, at_s - last_s)

    def _occupied(self, held: Held, units: list[str], at_s: float, step_s: float) -> None:
        held.busy_s += step_s if units else 0.0
        for unit in units:
            held.unit_s[unit] = held.unit_s.get(unit, 0.0) + step_s
        if not units and held.offering.market in RESERVED:
            self.idle_reservation_h += step_s / SECONDS_PER_HOUR
        if not units and held.reclaim_at_s is not None and held.empty_at_s is None:
            held.empty_at_s = at_s

    def _planned(self, plan: Plan) -> None:
        totals: Counter[str] = Counter()
        for target in plan.targets:
            totals[target.service] += target.replicas
        for service, total in totals.items():
            last, direction = self._counts.get(service, (total, 0))
            step = (total > last) - (total < last)
            self.direction_changes += step * direction < 0
            self._counts[service] = (total, step or direction)
        if self._inverted_since_s is not None:
            self.priority_inversion_s += plan.at_s - self._inverted_since_s
        self._inverted_since_s = plan.at_s if self._inverted(plan) else None

    def _inverted(self, plan: Plan) -> bool:
        """Whether a service is short while a less important one holds more than its floor on instances both can use."""
        if self.policy is None or not plan.shortfalls:
            return False
        services = {key: service for key, _, service in self.policy.services()}
        kinds = {(shape.service, shape.variant): shape.instance_type for shape in self.shapes}
        totals: Counter[str] = Counter()
        for target in plan.targets:
            totals[target.service] += target.replicas
        for short in plan.shortfalls:
            usable = {kind for (service, _), kind in kinds.items() if service == short.service}
            for target in plan.targets:
                lower = services[target.service].priority < services[short.service].priority
                spare = target.replicas > 0 and totals[target.service] > services[target.service].min_replicas
                if short.replicas > 0 and lower and spare and kinds.get((target.service, target.variant)) in usable:
                    return True
        return False

    # ---- the answers ------------------------------------------------------------------------------------------------
    def was_cold(self, service: str, at_s: float) -> bool:
        """Whether the service had no ready replica when last seen before `at_s` (or was not yet seen at all)."""
        index = bisect_right(self.ready_at, at_s, key=lambda row: row[0]) - 1
        return index < 0 or service not in self.ready_at[index][1]

    def given_back(self) -> int:
        """Instances that the controller returned of itself, with no reclaim notice, and that are gone."""
        return sum(held.gone and held.returned and held.reclaim_at_s is None for held in self.instances.values())

    def reclaims(self) -> tuple[tuple[float, float | None], ...]:
        """(deadline_at_s, empty_at_s) of every instance that got a notice, earliest deadline first."""
        held = [held for held in self.instances.values() if held.reclaim_at_s is not None]
        return tuple(sorted((seen.reclaim_at_s or 0.0, seen.empty_at_s) for seen in held))

    def cost_by_market(self) -> dict[str, float]:
        """USD by market."""
        sums: dict[str, float] = defaultdict(float)
        for held in self.instances.values():
            sums[held.offering.market] += held.cost_usd
        return dict(sorted(sums.items()))

    def cost_by_unit(self) -> dict[str, float]:
        """USD by unit: an instance's cost is shared by replica-seconds; one that held none is unassigned."""
        sums: dict[str, float] = defaultdict(float)
        for held in self.instances.values():
            whole = sum(held.unit_s.values())
            shares = {unit: part / whole for unit, part in held.unit_s.items()} if whole > 0 else {UNASSIGNED: 1.0}
            for unit, share in shares.items():
                sums[unit] += held.cost_usd * share
        return dict(sorted(sums.items()))


def facts(records: Iterable[Record]) -> Facts:
    """The facts in a journal's records, oldest first."""
    found = Facts()
    for record in records:
        found.take(record)
    return found
