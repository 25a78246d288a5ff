"""`qm bench tick`: what one tick costs on a large cluster, with the real loop, journal and parsers.

What the cluster and the cloud answer is generated once, as the bytes that Serve's dashboard, the GCS and the cloud
would send; reading them, learning, forecasting, deciding, checking, journalling (to disk, durable) and encoding the
message for the board are what is timed. The network is not. Demand changes by up to 20 % every tick, so that no tick
finds nothing to do.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import tempfile
import time  # noqa: TID251  # a benchmark times real code
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from autoscaler.act import Inline
from autoscaler.adapters.journal import FileJournal
from autoscaler.adapters.ray_serve import serving_view
from autoscaler.commands.outcome import OK, write_json
from autoscaler.core.model import (
    CloudInstance,
    CloudView,
    EngineLoad,
    Measured,
    Node,
    Offering,
    ServiceLoad,
    ServingView,
    Shape,
)
from autoscaler.loop import Controller
from autoscaler.ports import NoCapacity, Policy
from policies.model import PolicySet, Service, Slo, Unit, Variant
from serve_apps.timing import Timing
from serve_apps.wire import LLM_DEPLOYMENT, PlanMessage, app_name, encode

TYPES = ("g6.12xlarge", "g5.12xlarge")
GPUS = 4
ZONES = tuple("abcdef")
RPS_PER_SERVICE = 12.0
WARM_UP_TICKS = 5
TICK_S = 10.0
TIMING = Timing(a_s=0.02, b_s_per_seq=0.0005, c_s_per_ktoken=0.0002, prefill_tps=10_000.0, max_num_seqs=32)
_VIEW: TypeAdapter[CloudView] = TypeAdapter(CloudView)


@dataclass(frozen=True, slots=True)
class Size:
    """How large the cluster is."""

    services: int
    nodes: int
    replicas_per_service: int = 6


def tick_command(services: int, nodes: int, ticks: int, json_file: str | None) -> int:
    """Run the benchmark and show it; always 0, because a slow machine is no fault."""
    figures = bench_tick(Size(services, nodes), ticks)
    if json_file:
        write_json(json_file, json.dumps(figures).encode())
    else:
        print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return OK


def bench_tick(size: Size, ticks: int, seed: int = 1) -> dict[str, float]:
    """`{p50_ms, p99_ms, max_ms, rss_mib, ticks, replicas}` of `ticks` ticks after a warm-up."""
    world = _World(size, random.Random(seed))  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="qm-bench-") as folder:
        journal = FileJournal(Path(folder))
        try:
            controller = Controller(
                clock=world,
                metrics=world,
                serving=world,
                cloud=world,
                journal=journal,
                policy_source=world,
                executor=Inline(),
                tick_s=TICK_S,
            )
            took_ms = [_timed_ms(controller, world) for _ in range(WARM_UP_TICKS + ticks)][WARM_UP_TICKS:]
        finally:
            journal.close()
    ordered = sorted(took_ms)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max_ms": ordered[-1],
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
        "ticks": float(ticks),
        "replicas": float(size.services * size.replicas_per_service),
    }


def _timed_ms(controller: Controller, world: _World) -> float:
    world.step()
    began_s = time.perf_counter()
    controller.tick()
    return 1000.0 * (time.perf_counter() - began_s)


@dataclass
class _World:
    """Every port of the loop over generated answers. Nothing it is told changes it."""

    size: Size
    rng: random.Random
    at_s: float = 1_800_000_000.0
    published_bytes: int = 0
    _cloud: bytes = b""
    _serve: bytes = b""
    _nodes: tuple[Node, ...] = ()
    _policy: Policy | None = None
    _keys: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        policy = _policy(self.size.services)
        self._policy = Policy(policy=policy, shapes=shapes_of(policy), digest="bench")
        self._keys = tuple(key for key, _, _ in policy.services())
        names = [f"i-{n:04d}" for n in range(self.size.nodes)]
        self._nodes = tuple(Node(node_id=f"node-{n}", instance_id=n, alive=True, draining=False) for n in names)
        self._cloud = _VIEW.dump_json(_listing(names, self.at_s))
        self._serve = json.dumps(_applications(self._keys, names, self.size.replicas_per_service, self.at_s)).encode()

    def step(self) -> None:
        """One tick later."""
        self.at_s += TICK_S

    def now_s(self) -> float:
        """Clock."""
        return self.at_s

    def poll(self, now_s: float) -> Policy | None:  # noqa: ARG002
        """Policy source."""
        found, self._policy = self._policy, None
        return found

    def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
        """Metrics: every service's load moves by up to 20 %."""
        rates = [RPS_PER_SERVICE * self.rng.uniform(0.8, 1.2) for _ in self._keys]
        return tuple(_load(key, rps, now_s) for key, rps in zip(self._keys, rates, strict=True))

    def engines(self, now_s: float) -> tuple[EngineLoad, ...]:
        """Metrics: a half-full KV cache on every replica."""
        half = Measured(value=0.5, at_s=now_s)
        names = (f"i-{n:04d}-{slot}" for n in range(self.size.nodes) for slot in range(GPUS))
        return tuple(EngineLoad(replica_id=name, running=half, waiting=half, kv_fraction=half) for name in names)

    def observe(self, now_s: float) -> ServingView:
        """Serving: Serve's answer is parsed anew, as it would arrive."""
        return serving_view(now_s, json.loads(self._serve), self._nodes)

    def publish(self, message: PlanMessage) -> None:
        """Serving: encoded for the board."""
        self.published_bytes = len(encode(message))

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:
        """Serving: accepted."""

    def describe(self, now_s: float) -> CloudView:
        """Cloud: the listing is parsed anew."""
        return replace(_VIEW.validate_json(self._cloud), at_s=now_s)

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:  # noqa: ARG002
        """Cloud: always dry, the dearest answer for a controller."""
        raise NoCapacity(offering, "dry")

    def terminate(self, instance_id: str) -> None:
        """Cloud: accepted."""


def _policy(services: int) -> PolicySet:
    variants = tuple(Variant(id=name.split(".")[0], instance_type=name) for name in TYPES)
    entries = tuple(
        Service(
            name=f"s{n:03d}",
            model="m",
            goal=("latency", "throughput", "cost")[n % 3],
            priority=1000 - n,
            slo=Slo(ttft_s=2.0, tpot_s=0.1),
            max_replicas=40,
            variants=variants,
        )
        for n in range(services)
    )
    return PolicySet(units=(Unit(unit="u", owner="o", services=entries),))


def shapes_of(policy: PolicySet) -> tuple[Shape, ...]:
    """One GPU for every variant of the policy, all with one law."""
    return tuple(
        Shape(
            service=key,
            variant=variant.id,
            instance_type=variant.instance_type,
            gpus=1,
            nodes=1,
            timing=TIMING,
            load_prior_s=120.0,
            boot_prior_s=120.0,
            source="bench",
        )
        for key, _, entry in policy.services()
        for variant in entry.variants
    )


def _listing(names: list[str], at_s: float) -> CloudView:
    offerings = tuple(
        Offering(
            offering=f"{kind}-{zone}-{market}",
            pool=f"{kind}-{zone}-{market}",
            instance_type=kind,
            zone=zone,
            market=market,
            gpus=GPUS,
            price_usd_per_h=4.0 + len(zone),
            region="r",
        )
        for kind in TYPES
        for zone in ZONES
        for market in ("on_demand", "spot")
    )
    instances = tuple(
        CloudInstance(
            instance_id=name,
            offering=offerings[n % len(offerings)].offering,
            token=f"t{n}",
            state="running",
            launched_at_s=at_s - 3600.0,
        )
        for n, name in enumerate(names)
    )
    return CloudView(at_s=at_s, offerings=offerings, instances=instances)


def _applications(keys: tuple[str, ...], names: list[str], replicas: int, at_s: float) -> dict[str, Any]:
    """The shape of Serve's ``GET /api/serve/applications/`` with the fields that are read, and a GPU each at most."""
    apps: dict[str, Any] = {}
    slots = [(name, n) for n in range(GPUS) for name in names]
    for index, key in enumerate(keys):
        for kind in TYPES:
            mine = slots[index * replicas : (index + 1) * replicas] if kind == TYPES[index % 2] else []
            apps[app_name(key, kind.split(".")[0])] = {
                "deployments": {
                    LLM_DEPLOYMENT: {
                        "target_num_replicas": len(mine),
                        "replicas": [_replica(name, n, at_s) for name, n in mine],
                    }
                }
            }
    return {"applications": apps}


def _replica(name: str, slot: int, at_s: float) -> dict[str, Any]:
    return {
        "replica_id": f"{name}-{slot}",
        "state": "RUNNING",
        "node_id": f"node-{name}",
        "node_instance_id": name,
        "start_time_s": at_s - 3600.0,
    }


def _load(key: str, rps: float, now_s: float) -> ServiceLoad:
    values = (rps, rps * 1000.0, rps * 100.0, 0.0, rps)
    rps_, prefill, decode, queued, running = (Measured(value=value, at_s=now_s) for value in values)
    return ServiceLoad(
        service=key, arrival_rps=rps_, prefill_tps=prefill, decode_tps=decode, queued=queued, running=running
    )
