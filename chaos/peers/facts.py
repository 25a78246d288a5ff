"""What a peer is told: the scenario once, a view each tick. Docs: docs/peers.md. May not do I/O or read a clock.

Time is in seconds from the scenario's start. A service's load is counted in *units*: one unit is what a replica of its
first variant carries by the same capacity figures that Quartermaster plans with, so a rule that knows only "replicas"
may be served by any variant that the policy allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from serve_apps.timing import Timing, decode_step_s, prefill_s

RESERVED = frozenset({"odcr", "block", "interruptible"})
PAID = frozenset({"odcr", "block"})  # billed whether used or not
BLOCK_CLOSES_S = 2400.0  # before a Capacity Block's end, by its contract
EPSILON = 1e-9

Key = tuple[str, str, str]  # service, variant, offering


@dataclass(frozen=True, slots=True)
class Shape:
    """One variant of a service.

    `ongoing`: requests in flight on a replica that serves its planned rate; `max_batch`: the most within the SLO;
    `units`: what it carries relative to the first variant; `places`: offering ids.
    """

    service: str
    variant: str
    gpus: int
    nodes: int
    capacity_rps: float
    ongoing: float
    max_batch: float
    kv_tokens: float
    units: float
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """One service; `floor` and `most` bound its units, the first of `shapes` is the unit."""

    key: str
    priority: int
    goal: str
    floor: int
    most: int
    shapes: tuple[Shape, ...]

    @property
    def unit(self) -> Shape:
        """The variant that a replica-only rule counts in."""
        return self.shapes[0]


@dataclass(frozen=True, slots=True)
class Offering:
    """A place to get instances. `size` is known of a reservation, and infinite of any other market."""

    id: str
    instance_type: str
    zone: str
    market: str
    gpus: int
    size: float
    start_s: float
    end_s: float

    @property
    def rank(self) -> int:
        """0 reserved, 1 spot, 2 on-demand: the order in which Karpenter considers them."""
        return 0 if self.market in RESERVED else 1 if self.market == "spot" else 2

    def sells(self, now_s: float) -> bool:
        """Whether it exists at `now_s`, by its own calendar."""
        return self.start_s <= now_s < self.end_s


@dataclass(frozen=True, slots=True)
class Facts:
    """The scenario as far as a peer may know it. `services`: most important first, ties by key. `knob`: multiplier.

    `quota_gpus`: by unit, infinite without one. `replicas`: what `static` and `trivial` are told.
    """

    services: tuple[Service, ...]
    offerings: dict[str, Offering]
    quota_gpus: dict[str, float]
    knob: float
    replicas: Mapping[str, int] | int | None


@dataclass(slots=True)
class Seen:
    """One service in one tick; None = the metric is missing. `ready` and `starting` are units."""

    arrival_rps: float | None
    prefill_tps: float | None
    decode_tps: float | None
    queued: float | None
    running: float | None
    ready: float = 0.0
    starting: float = 0.0

    @property
    def ongoing(self) -> float | None:
        """Requests queued or running."""
        return None if self.queued is None or self.running is None else self.queued + self.running


def facts_of(scenario: Mapping[str, Any]) -> Facts:
    """Read what `attr(scenario)` is given: the scenario as a dict with `shapes`; `peer: {knob, replicas}` if any."""
    gpus = {row["instance_type"]: int(row["instance_gpus"]) for row in scenario["shapes"]}
    supply = [row for row in scenario["supply"] if row["market"] != "overflow" and row["instance_type"] in gpus]
    offerings = {row["id"]: _offering(row, gpus[row["instance_type"]]) for row in supply}
    rows = [(f"{unit['unit']}/{entry['name']}", entry) for unit in scenario["policies"] for entry in unit["services"]]
    services = [_service(key, entry, scenario["shapes"], offerings) for key, entry in rows]
    ordered = tuple(sorted(services, key=lambda service: (-service.priority, service.key)))
    peer = scenario.get("peer") or {}
    quotas = {unit["unit"]: unit.get("quota_gpus") for unit in scenario["policies"]}
    return Facts(
        services=ordered,
        offerings=offerings,
        quota_gpus={unit: inf if gpus is None else gpus for unit, gpus in quotas.items()},
        knob=float(peer.get("knob", 1.0)),
        replicas=peer.get("replicas"),
    )


def _offering(row: Mapping[str, Any], gpus: int) -> Offering:
    known = row["market"] in RESERVED and isinstance(row["count"], int)
    end_s = inf if row.get("end_s") is None else row["end_s"]
    return Offering(
        id=row["id"],
        instance_type=row["instance_type"],
        zone=row.get("zone") or "",
        market=row["market"],
        gpus=gpus,
        size=row["count"] if known else inf,
        start_s=row.get("start_s") or 0.0,
        end_s=end_s - BLOCK_CLOSES_S if row["market"] == "block" else end_s,
    )


def _service(key: str, entry: Mapping[str, Any], shapes: Any, offerings: Mapping[str, Offering]) -> Service:
    own = [row for row in shapes if row["service"] == key]
    unit_rps = own[0]["capacity_rps"]
    return Service(
        key=key,
        priority=entry["priority"],
        goal=entry["goal"],
        floor=0 if entry["scale_to_zero"] else entry["min_replicas"],
        most=entry["max_replicas"],
        shapes=tuple(_shape(row, entry, unit_rps, offerings) for row in own),
    )


def _shape(
    row: Mapping[str, Any], entry: Mapping[str, Any], unit_rps: float, offerings: Mapping[str, Offering]
) -> Shape:
    return Shape(
        service=row["service"],
        variant=row["variant"],
        gpus=row["gpus"],
        nodes=row["nodes"],
        capacity_rps=row["capacity_rps"],
        ongoing=planned_ongoing(row),
        max_batch=row["max_batch"],
        kv_tokens=row["timing"]["kv_capacity_tokens"],
        units=row["capacity_rps"] / unit_rps,
        places=tuple(
            offering.id
            for offering in offerings.values()
            if offering.instance_type == row["instance_type"]
            and offering.market in entry["markets"]
            and (not entry["zones"] or offering.zone in entry["zones"])
            and (not entry["instance_types"] or offering.instance_type in entry["instance_types"])
        ),
    )


def planned_ongoing(row: Mapping[str, Any]) -> float:
    """Requests in flight on a replica that serves `capacity_rps`, by the law that the capacity model uses.

    A batch of b finishes b / (O·t(b) + b·p) requests a second (docs/performance.md): the b at which that is the planned
    rate, which is less than the rate's share of the largest batch because a smaller batch is also faster.
    """
    timing = Timing(**row["timing"])
    output, prefill = row["output_tokens"], prefill_s(timing, row["input_tokens"])
    resident = row["input_tokens"] + output / 2.0
    low, high = 0.0, float(row["max_batch"])
    for _ in range(40):
        batch = (low + high) / 2.0
        rate = batch / (output * decode_step_s(timing, batch, batch * resident) + batch * prefill)
        low, high = (batch, high) if rate < row["capacity_rps"] else (low, batch)
    return high


def clip(replicas: float, service: Service) -> int:
    """`replicas` rounded up and held within the policy's bounds."""
    return max(service.floor, min(service.most, ceil(replicas - EPSILON)))
