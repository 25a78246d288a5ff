"""How long capacity takes to come, as quantiles, and how long it is waited for.

Pure; may not do I/O, read a clock or draw a random number. A cold start is launch + boot (with the image's pull), from
the grant to a node in the cluster, and load (weights from their source, then the engine's own start), from a placed
replica to one that serves. Boots are learnt per instance type, loads per (instance type, model, source of the weights):
`network`, or `local` where the same instance has held the model before.

A quantile moves from the catalogue's lognormal prior to the observed starts (the newest `SAMPLES`) with the weight
n²/(n² + n0²), so that a first odd start moves little and a dozen are believed. Deadlines follow the measured times: a
start that is merely slow is not killed, one that never came teaches patience, and a load under way is finished. Where
nodes tell how many bytes they have received and read (serve_apps.node_agent), a deadline counts from the last time that
they had got on, so a start that moves is waited for, though not for ever, and one that stands still is not.

Sources: repeated weight loads of one model on one machine spread by 7 % (median) to 22 % (90th percentile), and weights
in the machine's own memory load 1.6–1.9 times as fast as from its disk, 3.3–5.3 GB/s (ServerlessLLM, safetensors, 32B
on H100, 2025), against 1 GB/s from network storage; an 8B on g6.2xlarge took 525 s, 258 s with its image cached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import exp
from statistics import NormalDist

from serve_apps.wire import app_name

from .beliefs import Beliefs, Breaker, InstanceBelief, Loading
from .lifecycle import limit_s
from .model import Demand, Replica, ServingView, Shape
from .reasons import ReasonCode, why

SAMPLES = 32
PRIOR_SIGMA = 0.2  # of the log of a start's time
PRIOR_STARTS = 3.0
LEAD_QUANTILE = 0.9
LOCAL_SPEEDUP = 4.0
WARM_UP_S = 60.0  # a new engine compiles and fills its caches

LOAD_LIMIT_MIN_S = 1200.0  # joined and not ready (docs/capacity.md)
LOAD_LIMIT_LOADS = 3.0
PROGRESS_BYTES = 256e6  # what counts as getting on: no idle node receives or reads as much within a deadline
PATIENCE = 3.0  # deadlines that a start which gets on is waited for at most: a trickle fills no GPU


@lru_cache(maxsize=4096)  # of every shape, some ten times a tick, and it changes with a start only
def quantile_s(samples: tuple[float, ...], prior_s: float, q: float) -> float:
    """The `q` quantile of a start's seconds, from the prior's median and what was observed (oldest first)."""
    prior = prior_s * exp(PRIOR_SIGMA * NormalDist().inv_cdf(q))
    if not samples:
        return prior
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    seen = ordered[low] + (place - low) * (ordered[high] - ordered[low])
    weight = len(ordered) ** 2 / (len(ordered) ** 2 + PRIOR_STARTS**2)
    return prior + weight * (seen - prior)


def boot_s(beliefs: Beliefs, shape: Shape, q: float = LEAD_QUANTILE) -> float:
    """Seconds from a granted launch to a node in the cluster."""
    return quantile_s(beliefs.boot_s.get(shape.instance_type, ()), shape.boot_prior_s, q)


def load_s(beliefs: Beliefs, shape: Shape, q: float = LEAD_QUANTILE, source: str = "network") -> float:
    """Seconds from a placed replica to a ready one, with the weights from `source`."""
    saved_s = shape.weights_s * (1.0 - 1.0 / LOCAL_SPEEDUP) if source == "local" else 0.0
    return quantile_s(beliefs.load_s.get(load_key(shape, source), ()), shape.load_prior_s - saved_s, q)


def load_key(shape: Shape, source: str) -> str:
    """Where the load times of a shape are kept: services that run one model on one instance type share them."""
    model = shape.model or app_name(shape.service, shape.variant)
    return f"{shape.instance_type} {model} {source}"


# ---- deadlines ------------------------------------------------------------------------------------------------------
def start_limit_s(beliefs: Beliefs, instance: InstanceBelief) -> float:
    """How long the instance may stay in the state it is in: twice the slowest boot seen of its type, and longer after
    each start of it that was given up.
    """
    offering = beliefs.offers.get(instance.offering)
    kind = offering.instance_type if offering is not None else ""
    expected = (boot_s(beliefs, shape) for shape in beliefs.shapes if shape.instance_type == kind)
    slowest_s = max((*expected, *beliefs.boot_s.get(kind, ())), default=0.0)
    return limit_s(instance.state, slowest_s, beliefs.breakers.get(kind, Breaker()).strikes)


def got_on(instance: InstanceBelief, progress_bytes: float | None, at_s: float) -> InstanceBelief:
    """The instance after its node has told its bytes; fewer than before are those of a node that began anew."""
    if progress_bytes is None or 0.0 <= progress_bytes - instance.progress_bytes < PROGRESS_BYTES:
        return instance
    return replace(instance, progress_bytes=progress_bytes, moved_at_s=at_s)


def waited_s(instance: InstanceBelief | None, since_s: float, limit_s: float, now_s: float) -> float:
    """How long a start that began at `since_s` has stood still; all its time once that is `PATIENCE` limits."""
    if instance is None or now_s - since_s > PATIENCE * limit_s:
        return now_s - since_s
    return now_s - max(since_s, min(instance.moved_at_s, now_s))


def load_limit_s(beliefs: Beliefs, shape: Shape, source: str = "network") -> float:
    """How long a replica of the shape may load before its place is given up."""
    slowest_s = max((load_s(beliefs, shape, source=source), *beliefs.load_s.get(load_key(shape, source), ())))
    return max(LOAD_LIMIT_MIN_S, LOAD_LIMIT_LOADS * slowest_s)


def stuck(beliefs: Beliefs, now_s: float) -> dict[str, tuple[float, float]]:
    """Instances with a replica whose load has stood still for too long: how long, and the limit, in seconds."""
    found: dict[str, tuple[float, float]] = {}
    if not beliefs.loading:
        return found
    shapes = {app_name(shape.service, shape.variant): shape for shape in beliefs.shapes}
    for row in beliefs.loading.values():
        shape = shapes.get(row.app)
        if shape is not None and row.instance_id:
            limit = load_limit_s(beliefs, shape, row.source)
            age_s = waited_s(beliefs.instances.get(row.instance_id), row.since_s, limit, now_s)
            if age_s > limit:
                found[row.instance_id] = (age_s, limit)
    return found


def protected(demand: Demand, serving: ServingView, beliefs: Beliefs, now_s: float) -> Demand:
    """The demand of a service without a ready replica never falls below the one that has loaded longest.

    Giving it up for a lull would begin the same load again with the next request.
    """
    mine = [row for row in serving.replicas if row.service == demand.service]
    if demand.replicas_floor > 0 or any(row.state == "ready" for row in mine):
        return demand
    late = stuck(beliefs, now_s)
    known = (beliefs.loading.get(row.replica_id) for row in mine if row.instance_id not in late)
    since = [row.since_s for row in known if row is not None]
    if not since:
        return demand
    kept = why(ReasonCode.LOADING_PROTECTED, loading=len(since), age_s=now_s - min(since))
    return replace(demand, replicas_floor=1, reasons=(*demand.reasons, kept))


# ---- learning -------------------------------------------------------------------------------------------------------
def ring(samples: tuple[float, ...], newest: float) -> tuple[float, ...]:
    """The samples with one more, as many as are kept."""
    return (*samples, newest)[-SAMPLES:]


def observe(beliefs: Beliefs, serving: ServingView) -> Beliefs:
    """The beliefs after this view: who loads since when and from where, and how long those took that are ready now."""
    shapes = {app_name(shape.service, shape.variant): shape for shape in beliefs.shapes}
    loading: dict[str, Loading] = {}
    load = dict(beliefs.load_s)
    fresh = {key: at_s for key, at_s in beliefs.fresh.items() if serving.at_s - at_s < WARM_UP_S}
    instances = beliefs.instances
    for replica in serving.replicas:
        shape = shapes.get(app_name(replica.service, replica.variant))
        known = beliefs.loading.get(replica.replica_id)
        if replica.state == "loading":
            loading[replica.replica_id] = known or _begun(replica, shape, instances, serving.at_s)
        elif replica.state == "ready" and known is not None:
            fresh[replica.replica_id] = serving.at_s
            if shape is not None:
                key = load_key(shape, known.source)
                load[key] = ring(load.get(key, ()), serving.at_s - known.since_s)
                instances = _held(instances, replica.instance_id, shape.model)
    return replace(beliefs, loading=loading, load_s=load, fresh=fresh, instances=instances)


def _begun(replica: Replica, shape: Shape | None, instances: dict[str, InstanceBelief], at_s: float) -> Loading:
    instance = instances.get(replica.instance_id)
    local = shape is not None and instance is not None and shape.model in instance.models
    app = app_name(replica.service, replica.variant)
    return Loading(app=app, since_s=at_s, instance_id=replica.instance_id, source="local" if local else "network")


def _held(instances: dict[str, InstanceBelief], instance_id: str, model: str) -> dict[str, InstanceBelief]:
    """The instance has the model's weights now."""
    instance = instances.get(instance_id)
    if not model or instance is None or model in instance.models:
        return instances
    return instances | {instance_id: replace(instance, models=(*instance.models, model))}
