"""What must hold at every tick of a run, judged by the world's truth and by the journal, not by the core's code.

The plan's own `check`, which the loop runs, is one more. May not change anything: the world is told of what broke.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from autoscaler.core.beliefs import Beliefs, InstanceBelief
from autoscaler.core.defects import DEFECT
from autoscaler.core.events import (
    Event,
    Forecasted,
    LaunchGranted,
    LaunchRefused,
    LaunchTried,
    Observed,
    Opened,
    Planned,
    PolicyRefused,
)
from autoscaler.core.lifecycle import INTENT_TIMEOUT_S, STARTING, InstanceState
from autoscaler.core.model import CloudView, Demand, Launch, Missing, Observation, Offering, Plan
from chaos.world.tally import RESERVED
from chaos.world.trouble import Fragile
from chaos.world.world import World
from policies.model import PolicySet, Service

TAIL = 60  # events kept for whoever reads of a failure
CLOSING_S = 2400.0  # before the end of a block
START_MAX_S = 3700.0  # no start is waited for longer
MONEY = frozenset({"budget", "budget_month"})
FORCED = MONEY | {"preempted", "quota_gpus"}  # what may reduce a service that is not seen
INVERTED_MAX_S = 300.0  # a place is taken, a model loads: what comes after that is waiting
UNSTEADY = (  # while these act, and for a while after, the more important may wait
    "metrics_gone", "metrics_frozen", "metrics_absurd", "describe_lag", "describe_gone", "serving_gone", "publish_gone",
    "controller_down", "second_controller", "journal_full", "throttle", "clock_step", "clock_drift", "policy_bad",
    "policy_change", "load_hang", "load_fail", "load_slow", "price_gone", "describe_twice", "node_slow", "ambiguous",
    "launch_error",
)  # fmt: skip
SETTLES_S = 600.0


@dataclass
class Checks:
    """The checkers of one run. `event` sees what our controller journals, `launching` … what it is about to do."""

    world: World
    journal: Fragile
    tail: deque[Event] = field(default_factory=lambda: deque(maxlen=TAIL))
    transitions: Counter[str] = field(default_factory=Counter)
    _states: dict[str, InstanceState] = field(default_factory=dict)
    _seen: Observation | None = None
    _tried: dict[str, int] = field(default_factory=dict)  # token → number of its record
    _owners: dict[str, str] = field(default_factory=dict)  # instance → token
    _refused: dict[str, tuple[int, float]] = field(default_factory=dict)  # offering → in a row, the last at
    _unheld: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _planned: int = 0
    _launches: tuple[Launch, ...] = ()
    _poor: set[str] = field(default_factory=set)  # by the last plan, services that their unit's budget keeps small
    _inverted_s: float = 0.0
    _steady_s: float = 0.0
    _tick_s: float = 0.0
    _defect: str = ""

    def event(self, event: Event, beliefs: Beliefs) -> None:
        """One more record of our controller."""
        self.tail.append(event)
        for text in self._defects(event, beliefs):
            self._tell("defect", text)
        if isinstance(event, Observed):
            self._seen = event.observation
        elif isinstance(event, Planned):
            self._planned, self._launches = self.journal.seq, event.plan.launches
            targets = event.plan.targets
            self._poor = {each.service for each in targets if any(reason.code in MONEY for reason in each.reasons)}
            self._plan(event.plan, beliefs)
        elif isinstance(event, LaunchTried):
            self._try(event)
        elif isinstance(event, LaunchGranted):
            self._grant(event)
        elif isinstance(event, LaunchRefused):
            self._refuse(event)
        elif isinstance(event, Opened):
            self._refused.clear()  # a torn journal may have lost some
            self._unheld.clear()
            self._states = {key: instance.state for key, instance in beliefs.instances.items()}
        self._lives(beliefs)

    def _tell(self, kind: str, detail: str) -> None:
        self.world.violate(kind, detail)

    def _defects(self, event: Event, beliefs: Beliefs) -> Iterator[str]:
        """What our own code raised and the loop bore: guards are there for what nobody thought of, not to hide it."""
        if beliefs.defect and beliefs.defect != self._defect:
            yield beliefs.defect
        self._defect = beliefs.defect
        if isinstance(event, Observed):
            seen = event.observation
            views = (seen.loads, seen.engines, seen.serving, seen.cloud)
            yield from (view.why for view in views if isinstance(view, Missing) and view.why.startswith(DEFECT))
        elif isinstance(event, Forecasted):
            yield from (row.failed for row in event.forecasts if row.failed)
        elif isinstance(event, PolicyRefused):
            yield from (text for text in event.problems if text.startswith(DEFECT))

    def _lives(self, beliefs: Beliefs) -> None:
        """Instances that are adopted begin as requested, as those that are granted do."""
        for key, instance in beliefs.instances.items():
            before = self._states.get(key, InstanceState.REQUESTED)
            self._states[key] = instance.state
            if before is not instance.state:
                self.transitions[f"{before.value} > {instance.state.value}"] += 1
                self._ended(instance)

    def _ended(self, instance: InstanceBelief) -> None:
        """A reservation that was full of ours has room again."""
        pool = self.world.pools.rows[instance.offering].supply
        if instance.state is InstanceState.GONE and pool.market in RESERVED:
            self._refused.pop(instance.offering, None)

    # ---- launches ---------------------------------------------------------------------------------------------------
    def _try(self, event: LaunchTried) -> None:
        if event.token in self._tried:
            self._tell("intent_twice", f"{event.token} is asked for again")
        self._tried[event.token] = self.journal.seq
        row, last_s = self._refused.get(event.offering, (0, 0.0))
        probed = any(each.id == event.intent and _why(each, "probe") for each in self._launches)
        if row and not probed and event.at_s - last_s < 0.5 * min(30.0 * 2.0 ** (row - 1), 900.0) - 1e-6:
            text = f"{event.offering} is asked {event.at_s - last_s:.0f} s after the last of {row} refusals"
            self._tell("asked_too_soon", text)

    def _grant(self, event: LaunchGranted) -> None:
        self._refused.pop(event.offering, None)
        for instance in event.instance_ids:
            owner = self._owners.setdefault(instance, event.token)
            if owner != event.token:
                self._tell("two_owners", f"{instance} was granted to {owner} and to {event.token}")

    def _refuse(self, event: LaunchRefused) -> None:
        if event.error in ("no_capacity", "refused"):
            row, _ = self._refused.get(event.offering, (0, 0.0))
            self._refused[event.offering] = (row + 1, event.at_s)

    def launching(self, token: str) -> None:
        """The cloud is about to be asked for instances."""
        if self._tried.get(token, 1 << 62) > self.journal.synced:
            self._tell("not_durable", f"the intent {token} is acted on before it is on disk")
        self.acting()

    def acting(self) -> None:
        """Cloud or cluster are about to be told something."""
        if self._planned > self.journal.synced:
            self._tell("not_durable", "a plan is acted on before it is on disk")

    def terminating(self, instance: str) -> None:
        """An instance is about to be given back."""
        self.acting()
        node = self.world.cluster.nodes.get(instance)
        if node is None or not node.alive or not any(replica.state == "ready" for replica in node.replicas):
            return
        if node.open:
            self._tell("undrained", f"{instance} is given back while replicas serve there, never drained")
        elif self.world.timeline.now_s < node.deadline_at_s - self._clock_wrong_s():
            self._tell("undrained", f"{instance} is given back before its drain's deadline, while replicas serve there")

    def _clock_wrong_s(self) -> float:
        faults = self.world.scenario.faults
        return 1e9 if any(fault.kind.startswith("clock_") for fault in faults) else self._tick_s

    # ---- plans ------------------------------------------------------------------------------------------------------
    def _plan(self, plan: Plan, beliefs: Beliefs) -> None:
        seen, policy = self._seen, beliefs.policy
        assert seen is not None
        assert policy is not None
        if isinstance(seen.serving, Missing) or isinstance(seen.cloud, Missing):
            return
        for text in self._floors(plan, policy):
            self._tell("floor", text)
        for text in self._budgets(plan, policy, beliefs):
            self._tell("budget", text)
        for text in self._blind(plan, policy, beliefs):
            self._tell("reduced_blind", text)
        for text in self._holds(plan, policy):
            self._tell("not_held", text)
        for text in self._rungs(plan, policy, seen.cloud, beliefs):
            self._tell("rung_skipped", text)
        for text in self._closing(plan, beliefs):
            self._tell("block_end", text)
        for text in self._late(plan, beliefs):
            self._tell("start_never_ends", text)

    def _floors(self, plan: Plan, policy: PolicySet) -> Iterator[str]:
        given = Counter[str]()
        for target in plan.targets:
            given[target.service] += target.wanted
        for shortfall in plan.shortfalls:
            given[shortfall.service] += shortfall.replicas
        for key, _, entry in policy.services():
            if not entry.scale_to_zero and given[key] < entry.min_replicas:
                yield f"{key}: {given[key]} replicas wanted or missed, min_replicas is {entry.min_replicas}"

    def _budgets(self, plan: Plan, policy: PolicySet, beliefs: Beliefs) -> Iterator[str]:
        """By the cheapest GPU there is of each type: a plan that is dearer even so is dearer anyway."""
        cheapest: dict[str, float] = {}
        for offer in beliefs.offers.values():
            usd = offer.price_usd_per_h / max(1, offer.gpus)
            cheapest[offer.instance_type] = min(usd, cheapest.get(offer.instance_type, usd))
        shapes = {(s.service, s.variant): s for s in beliefs.shapes}
        usd_per_h = Counter[str]()
        for target in plan.targets:
            shape = shapes[target.service, target.variant]
            price = cheapest.get(shape.instance_type, 0.0) * shape.gpus * shape.nodes
            usd_per_h[target.service.split("/")[0]] += target.wanted * price  # type: ignore[assignment]
        for unit in policy.units:
            if unit.budget_usd_per_h is not None and usd_per_h[unit.unit] > unit.budget_usd_per_h + 1e-6:
                yield f"{unit.unit}: {usd_per_h[unit.unit]:.2f} USD/h planned, the budget is {unit.budget_usd_per_h:g}"

    def _blind(self, plan: Plan, policy: PolicySet, beliefs: Beliefs) -> Iterator[str]:
        """Whom the world hides the metrics of, whatever the controller believes to have seen."""
        assert self._seen is not None
        assert not isinstance(self._seen.serving, Missing)
        leaving = {drain.instance_id for drain in plan.drains}
        joined = (i for i in beliefs.instances.values() if i.state is InstanceState.JOINED and not i.reclaim_at_s)
        stays = {i.instance_id for i in joined if i.missing_since_s is None} - leaving
        now = Counter(
            r.service for r in self._seen.serving.replicas if r.state in ("ready", "loading") and r.instance_id in stays
        )
        wanted = Counter[str]()
        for target in plan.targets:
            wanted[target.service] += target.wanted
        forced = {t.service for t in plan.targets if any(reason.code in FORCED for reason in t.reasons)}
        for key, _, entry in policy.services():
            hidden = self.world.faults.active("metrics_gone", (key,)) and key not in forced
            if hidden and wanted[key] < min(now[key], entry.max_replicas):
                yield f"{key}: reduced from {now[key]} to {wanted[key]} while its metrics are missing"

    def _holds(self, plan: Plan, policy: PolicySet) -> Iterator[str]:
        """Half a lead at least, whatever the goal."""
        entries = {key: entry for key, _, entry in policy.services()}
        for demand in plan.demands:
            if demand.service in entries:
                yield from self._held(plan, demand)

    def _held(self, plan: Plan, demand: Demand) -> Iterator[str]:
        rows = self._unheld.setdefault(demand.service, [])
        since_s = plan.at_s - 0.5 * demand.lead_s + 1e-6
        most = max((rps for at_s, rps in rows if at_s > since_s), default=0.0)
        if demand.arrival_rps < most - 1e-9:
            yield f"{demand.service}: {demand.arrival_rps:.3g} requests/s planned, {most:.3g} within half a lead before"
        rows.append((plan.at_s, demand.unheld_rps))
        del rows[:-400]

    def _rungs(self, plan: Plan, policy: PolicySet, cloud: CloudView, beliefs: Beliefs) -> Iterator[str]:
        entries = {key: entry for key, _, entry in policy.services()}
        for launch in plan.launches:
            entry = entries[launch.service]
            if _why(launch, "paid_anyway") or _why(launch, "probe") or "smaller_variant" in entry.sacrifice:
                continue
            missed = sorted(self._open(launch, entry, cloud, plan.at_s) - set(launch.alternates))
            missed = [name for name in missed if not _rests(name, beliefs, plan.at_s)]
            if missed:
                yield f"{launch.id} for {launch.service} leaves out {', '.join(missed)}, open and allowed"

    def _open(self, launch: Launch, entry: Service, cloud: CloudView, at_s: float) -> set[str]:
        """Offerings of the launch's instance types that the policy allows and that are open for an hour and more."""
        kinds = {o.offering: o.instance_type for o in cloud.offerings}
        asked = {kinds[name] for name in launch.alternates if name in kinds}
        return {
            o.offering
            for o in cloud.offerings
            if o.instance_type in asked
            and o.market in entry.markets
            and not (o.market == "spot" and entry.on_demand_floor)
            and (o.ends_at_s is None or o.ends_at_s - at_s > 2 * CLOSING_S)
            and (o.starts_at_s is None or o.starts_at_s <= at_s)
        }

    def _closing(self, plan: Plan, beliefs: Beliefs) -> Iterator[str]:
        ends = {name: o.ends_at_s for name, o in beliefs.offers.items() if o.ends_at_s is not None}
        for launch in plan.launches:
            for name in launch.alternates:
                if name in ends and ends[name] - plan.at_s < CLOSING_S:
                    yield f"{launch.id} asks {name} {ends[name] - plan.at_s:.0f} s before its end"
        leaving = {drain.instance_id for drain in plan.drains} | {each.instance_id for each in plan.terminates}
        for key, instance in beliefs.instances.items():
            here = instance.state is InstanceState.JOINED and instance.missing_since_s is None and key not in leaving
            left_s = ends.get(instance.offering, inf) - plan.at_s
            if here and left_s < CLOSING_S - 1e-6:
                yield f"{key} on {instance.offering} stays, {left_s:.0f} s before its end"

    def _late(self, plan: Plan, beliefs: Beliefs) -> Iterator[str]:
        ended = {each.instance_id for each in plan.terminates}
        for key, instance in beliefs.instances.items():
            age_s = plan.at_s - instance.since_s
            if instance.state in STARTING and age_s > START_MAX_S and key not in ended:
                yield f"{key} is {instance.state.value} for {age_s:.0f} s and still waited for"
        for token, intent in beliefs.intents.items():
            if plan.at_s - intent.tried_at_s > INTENT_TIMEOUT_S + START_MAX_S:
                yield f"the call {token} is still open after {plan.at_s - intent.tried_at_s:.0f} s"

    # ---- the world --------------------------------------------------------------------------------------------------
    def tick(self, at_s: float) -> None:
        """After each tick: how long the more important has waited behind the less important, while all was steady.

        Whose unit has no money left waits because it must.
        """
        self._tick_s = self.world.scenario.tick_s
        faults = [fault for fault in self.world.scenario.faults if fault.kind in UNSTEADY]
        if any(fault.at_s <= at_s <= fault.at_s + fault.for_s for fault in faults):
            self._steady_s = at_s + SETTLES_S
        behind = [
            key for key in self.world.scores.behind if key not in self._poor and not _may_wait(self.world.entries[key])
        ]
        self._inverted_s = self._inverted_s + self._tick_s if behind and at_s > self._steady_s else 0.0
        if self._inverted_s > INVERTED_MAX_S:
            text = f"{', '.join(behind)} has waited behind what is less important for {self._inverted_s:.0f} s"
            self._tell("priority", text)


def _why(launch: Launch, code: str) -> bool:
    return any(reason.code == code for reason in launch.reasons)


def _may_wait(entry: Service) -> bool:
    """Has nothing but a deadline, or is to wait rather than be served by what it could have at once."""
    words = entry.sacrifice
    queues = "smaller_variant" in words and "queue" in words and words.index("queue") < words.index("smaller_variant")
    return entry.slo.deadline_s is not None or queues


def _rests(name: str, beliefs: Beliefs, at_s: float) -> bool:
    """Whether it refused lately, or its type does not get up."""
    known = beliefs.offerings.get(name)
    offer: Offering = beliefs.offers[name]
    breaker = beliefs.breakers.get(offer.instance_type)
    return (known is not None and known.cool_until_s > at_s) or (breaker is not None and breaker.open_until_s > at_s)
