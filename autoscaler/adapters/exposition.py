"""What a scrape shows of the newest beliefs, plan and views: one table of series, worked out when it is asked for.

So a tick pays for none of it. Labels take values from the policy, the cloud's offerings and our own enums only, which
bounds the number of series. Names and meanings are documented in docs/operations.md. May not change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from autoscaler.core.beliefs import EMPTY, Beliefs, OfferingBelief, ServiceBelief
from autoscaler.core.berths import SUNK
from autoscaler.core.coldstart import boot_s, load_s
from autoscaler.core.lifecycle import STARTING, InstanceState
from autoscaler.core.model import Idle, Measured, Missing, Observation, Plan, Replica, ServingView, Signal
from autoscaler.core.odds import Odds
from autoscaler.core.orders import in_force
from autoscaler.core.spend import rates_usd_per_h
from policies.model import PolicySet, Unit

Rows = Iterable[tuple[tuple[str, ...], float | None]]  # label values, and None where nothing is known
NOTHING = PolicySet(units=())
NO_PLAN = Plan(id="", at_s=0.0, demands=(), targets=(), launches=(), drains=(), terminates=(), routes=(), shortfalls=())


@dataclass
class Now:
    """The newest of everything. `plan_seq` is the journal's number of the plan; views are the last that were seen."""

    beliefs: Beliefs = EMPTY
    seen: Observation | None = None
    serving: ServingView | None = None
    plan_seq: int = 0

    def take(self, seen: Observation) -> None:
        """One more observation."""
        self.seen = seen
        if not isinstance(seen.serving, Missing):
            self.serving = seen.serving


@dataclass(frozen=True)
class Scrape:
    """One moment of `Now`, with what several series need."""

    beliefs: Beliefs
    seen: Observation | None
    serving: ServingView | None
    plan_seq: int

    @property
    def plan(self) -> Plan:
        return self.beliefs.last_plan or NO_PLAN

    @property
    def policy(self) -> PolicySet:
        return self.beliefs.policy or NOTHING

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self.serving.replicas if self.serving is not None else ()

    @cached_property
    def odds(self) -> Odds:
        return Odds(self.beliefs, self.beliefs.at_s)

    @cached_property
    def held(self) -> tuple[tuple[str, str, InstanceState], ...]:
        """(instance, offering, state) of all that is not gone."""
        rows = self.beliefs.instances.values()
        return tuple((row.instance_id, row.offering, row.state) for row in rows if row.state is not InstanceState.GONE)

    @cached_property
    def by_state(self) -> dict[tuple[str, str, str], int]:
        """Replicas by service, variant and state."""
        return Counter((row.service, row.variant, row.state) for row in self.replicas)

    @cached_property
    def units_usd_per_h(self) -> dict[str, float] | None:
        return rates_usd_per_h(self.beliefs, self.seen) if self.seen is not None else None

    def market(self, instance_id: str) -> str:
        """Of an instance of ours; empty where it is not known."""
        held = self.beliefs.instances.get(instance_id)
        offer = self.beliefs.offers.get(held.offering) if held is not None else None
        return offer.market if offer is not None else ""


def _signal(signal: Signal) -> float | None:
    return signal.value if isinstance(signal, Measured) else 0.0 if isinstance(signal, Idle) else None


# ---- services -------------------------------------------------------------------------------------------------------
def _loads(now: Scrape, name: str) -> Rows:
    loads = now.seen.loads if now.seen is not None else ()
    for load in () if isinstance(loads, Missing) else loads:
        yield (load.service,), _signal(getattr(load, name))


def _forecasts(now: Scrape) -> Rows:
    for service, made in now.beliefs.forecasts.items():
        yield from (((service, f"{quantile:g}"), rps) for quantile, rps in made.quantiles)


def _short(now: Scrape) -> Rows:
    lacking = {row.service: row.replicas for row in now.plan.shortfalls}
    yield from (((row.service,), lacking.get(row.service, 0)) for row in now.plan.demands)


def _needed(now: Scrape) -> Rows:
    placed = Counter[str]()
    for target in now.plan.targets:
        placed[target.service] += target.wanted
    yield from (((service,), placed[service] + (lacking or 0)) for (service,), lacking in _short(now))


def _believed(now: Scrape, of: Callable[[ServiceBelief], float | None]) -> Rows:
    yield from (((service,), of(known)) for service, known in now.beliefs.services.items())


def _reasons(now: Scrape) -> Rows:
    causes = {(row.service, reason.code.value) for row in now.plan.demands for reason in row.reasons}
    causes |= {(row.service, reason.code.value) for row in now.plan.targets for reason in row.reasons}
    yield from ((cause, 1.0) for cause in sorted(causes))


def _kept(now: Scrape) -> Rows:
    count = Counter(reason.subject for row in now.plan.holds for reason in row.reasons)
    yield from (((row.service,), count[row.service]) for row in now.plan.demands)


def _ends(now: Scrape) -> Rows:
    first: dict[str, float] = {}
    for replica in now.replicas:
        held = now.beliefs.instances.get(replica.instance_id)
        offer = now.beliefs.offers.get(held.offering) if held is not None else None
        if offer is not None and offer.ends_at_s is not None:
            first[replica.service] = min(offer.ends_at_s, first.get(replica.service, offer.ends_at_s))
    yield from (((service,), at_s) for service, at_s in first.items())


# ---- variants -------------------------------------------------------------------------------------------------------
def _replicas(now: Scrape, *states: str) -> Rows:
    for shape in now.beliefs.shapes:
        key = (shape.service, shape.variant)
        yield key, sum(now.by_state.get((*key, state), 0) for state in states)


def _rungs(now: Scrape) -> Rows:
    count = Counter((row.service, now.market(row.instance_id)) for row in now.replicas if row.state == "ready")
    yield from ((key, number) for key, number in count.items() if key[1])


def _boots(now: Scrape) -> Rows:
    yield from (
        ((kind,), seconds)
        for kind, seconds in {s.instance_type: boot_s(now.beliefs, s) for s in now.beliefs.shapes}.items()
    )


# ---- pools ----------------------------------------------------------------------------------------------------------
def _pools(now: Scrape, of: Callable[[OfferingBelief], float]) -> Rows:
    yield from (((name,), of(now.beliefs.offerings.get(name, OfferingBelief()))) for name in now.beliefs.offers)


def _instances(now: Scrape, wanted: Callable[[InstanceState], bool]) -> Rows:
    count = Counter(offering for _, offering, state in now.held if wanted(state))
    yield from (((name,), count[name]) for name in now.beliefs.offers)


def _idle_reserved(now: Scrape) -> Rows:
    busy = {each for row in now.replicas for each in (row.instance_id, *row.also_on)}
    count = Counter(offering for key, offering, state in now.held if state is InstanceState.JOINED and key not in busy)
    yield from (((name,), count[name]) for name, offer in now.beliefs.offers.items() if offer.market in SUNK)


# ---- units and the whole --------------------------------------------------------------------------------------------
def _units(now: Scrape, of: Callable[[Unit], float | None]) -> Rows:
    yield from (((unit.unit,), of(unit)) for unit in now.policy.units)


def _unit_gpus(now: Scrape) -> Rows:
    gpus = {(shape.service, shape.variant): shape.gpus * shape.nodes for shape in now.beliefs.shapes}
    used = Counter[str]()
    for row in now.plan.targets:
        used[row.service.split("/")[0]] += row.wanted * gpus.get((row.service, row.variant), 0)
    yield from _units(now, lambda unit: used[unit.unit])


def _month_usd(now: Scrape) -> Rows:
    yield from (((unit,), spent.usd) for unit, spent in now.beliefs.spent.items())


def _cost(now: Scrape) -> Rows:
    offers = now.beliefs.offers
    yield (), sum(offers[offering].price_usd_per_h for _, offering, _ in now.held if offering in offers)


def _blind(now: Scrape) -> Rows:
    seen = now.seen
    if seen is not None:
        views = {"metrics": seen.loads, "engines": seen.engines, "serving": seen.serving, "cloud": seen.cloud}
        yield from (((port,), isinstance(view, Missing)) for port, view in views.items())


@dataclass(frozen=True)
class Series:
    """One metric: its name, what it means in a line, its labels, and its samples."""

    name: str
    text: str
    labels: tuple[str, ...]
    rows: Callable[[Scrape], Rows] = field(repr=False)


SERVICE, VARIANT, OFFERING, UNIT = ("service",), ("service", "variant"), ("offering",), ("unit",)

SERIES: tuple[Series, ...] = (
    Series("qm_arrivals_rps", "Requests per second that arrive now", SERVICE, lambda now: _loads(now, "arrival_rps")),
    Series("qm_queued_requests", "Requests waiting in gateways", SERVICE, lambda now: _loads(now, "queued")),
    Series(
        "qm_demand_rps",
        "Requests per second that a service is made ready for",
        SERVICE,
        lambda now: (((row.service,), row.arrival_rps) for row in now.plan.demands),
    ),
    Series("qm_forecast_rps", "Forecast of the largest rate over the lead", ("service", "level"), _forecasts),
    Series(
        "qm_forecast_coverage_fraction",
        "What the .95 quantile covered of late",
        SERVICE,
        lambda now: (((service,), made.coverage) for service, made in now.beliefs.forecasts.items()),
    ),
    Series(
        "qm_forecast_failed",
        "1 while the forecast in force is an older one, because the newest raised",
        SERVICE,
        lambda now: (((service,), bool(made.failed)) for service, made in now.beliefs.forecasts.items()),
    ),
    Series(
        "qm_lead_seconds",
        "The shortest way to more capacity, boot and load at P90",
        SERVICE,
        lambda now: (((row.service,), row.lead_s) for row in now.plan.demands),
    ),
    Series("qm_needed_replicas", "Replicas needed, with a place or without", SERVICE, _needed),
    Series("qm_shortfall_replicas", "Replicas wanted that nothing can hold", SERVICE, _short),
    Series("qm_reason", "1 for every cause of what the plan gives a service", ("service", "code"), _reasons),
    Series("qm_kept_instances", "Idle instances kept: they could not be had again", SERVICE, _kept),
    Series("qm_ends_at", "UTC seconds when the first offering under its replicas ends", SERVICE, _ends),
    Series(
        "qm_kv_cache_fraction",
        "KV cache in use by a service's fullest engine",
        SERVICE,
        lambda now: _believed(now, lambda known: known.kv_fraction),
    ),
    Series(
        "qm_service_blind",
        "1 while the load of a service is not seen",
        SERVICE,
        lambda now: _believed(now, lambda known: bool(known.blind_why)),
    ),
    Series(
        "qm_slo_target_fraction",
        "Fraction of requests that must meet their limits",
        SERVICE,
        lambda now: (((key,), entry.slo.fraction) for key, _, entry in now.policy.services()),
    ),
    Series(
        "qm_wanted_replicas",
        "Replicas with a place now or coming",
        VARIANT,
        lambda now: (((row.service, row.variant), row.wanted) for row in now.plan.targets),
    ),
    Series(
        "qm_target_replicas",
        "Replicas published to Serve",
        VARIANT,
        lambda now: (((row.service, row.variant), row.replicas) for row in now.plan.targets),
    ),
    Series("qm_ready_replicas", "Replicas seen ready", VARIANT, lambda now: _replicas(now, "ready")),
    Series(
        "qm_coming_replicas",
        "Replicas without a place or loading",
        VARIANT,
        lambda now: _replicas(now, "pending", "loading"),
    ),
    Series(
        "qm_replica_capacity_rps",
        "Requests per second that one ready replica carries within the objective",
        VARIANT,
        lambda now: (((row.service, row.variant), row.capacity_rps_per_replica) for row in now.plan.routes),
    ),
    Series(
        "qm_load_seconds",
        "From a placed replica to a ready one, P90",
        VARIANT,
        lambda now: (((s.service, s.variant), load_s(now.beliefs, s)) for s in now.beliefs.shapes),
    ),
    Series("qm_rung_replicas", "Ready replicas by the market they stand on", ("service", "market"), _rungs),
    Series("qm_boot_seconds", "From a granted launch to a node in the cluster, P90", ("instance_type",), _boots),
    Series(
        "qm_breaker_open_until",
        "UTC seconds until which none of the type is launched",
        ("instance_type",),
        lambda now: (((kind,), row.open_until_s) for kind, row in now.beliefs.breakers.items()),
    ),
    Series(
        "qm_pool_odds",
        "Chance that a launch is granted now",
        OFFERING,
        lambda now: (((name,), now.odds.grant(offer)) for name, offer in now.beliefs.offers.items()),
    ),
    Series(
        "qm_cooldown_until",
        "UTC seconds until which it is not asked again",
        OFFERING,
        lambda now: _pools(now, lambda known: known.cool_until_s),
    ),
    Series(
        "qm_refusals_in_row",
        "Refusals since the last grant",
        OFFERING,
        lambda now: _pools(now, lambda known: known.refusals_in_row),
    ),
    Series("qm_instances", "Instances held", OFFERING, lambda now: _instances(now, lambda _: True)),
    Series(
        "qm_starting_instances",
        "Instances paid for, not in the cluster yet",
        OFFERING,
        lambda now: _instances(now, lambda state: state in STARTING),
    ),
    Series("qm_idle_reserved_instances", "Instances of reservations that no replica uses", OFFERING, _idle_reserved),
    Series(
        "qm_price_usd_per_h",
        "Price of one instance",
        OFFERING,
        lambda now: (((name,), offer.price_usd_per_h) for name, offer in now.beliefs.offers.items()),
    ),
    Series(
        "qm_unit_cost_usd_per_h",
        "Price of the GPUs that a unit's replicas hold",
        UNIT,
        lambda now: (
            _units(now, lambda unit: (now.units_usd_per_h or {}).get(unit.unit, 0.0))
            if now.units_usd_per_h is not None
            else ()
        ),
    ),
    Series(
        "qm_unit_budget_usd_per_h", "Hourly budget", UNIT, lambda now: _units(now, lambda unit: unit.budget_usd_per_h)
    ),
    Series("qm_unit_month_usd", "Spent this month, of units with a monthly budget", UNIT, _month_usd),
    Series(
        "qm_unit_budget_usd_per_month",
        "Monthly budget",
        UNIT,
        lambda now: _units(now, lambda unit: unit.budget_usd_per_month),
    ),
    Series("qm_unit_gpus", "GPUs that a unit's plan takes", UNIT, _unit_gpus),
    Series("qm_unit_quota_gpus", "A unit's share of GPUs", UNIT, lambda now: _units(now, lambda unit: unit.quota_gpus)),
    Series("qm_cost_usd_per_h", "Price of all instances held", (), _cost),
    Series("qm_blind", "1 while a port says nothing", ("port",), _blind),
    Series(
        "qm_policy_refused",
        "1 while the policy folder holds a refused policy",
        (),
        lambda now: [((), now.beliefs.policy_refused)],
    ),
    Series("qm_defect", "1 while an event is not learnt", (), lambda now: [((), bool(now.beliefs.defect))]),
    Series(
        "qm_orders", "Operators' orders in force", (), lambda now: [((), len(in_force(now.beliefs, now.beliefs.at_s)))]
    ),
    Series("qm_plan_seq", "The journal's number of the newest plan", (), lambda now: [((), now.plan_seq)]),
    Series("qm_plan_at", "UTC seconds of the newest plan", (), lambda now: [((), now.plan.at_s)]),
)


class Exposition(Collector):
    """The table as a collector over `now`, which another thread may replace parts of at any time: they are values."""

    def __init__(self, now: Now) -> None:
        self._now = now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every family, with samples or without."""
        now = self._now
        scrape = Scrape(now.beliefs, now.seen, now.serving, now.plan_seq)
        for series in SERIES:
            family = GaugeMetricFamily(series.name, series.text, labels=series.labels)
            for labels, value in series.rows(scrape):
                if value is not None:
                    family.add_metric(labels, float(value))
            yield family
