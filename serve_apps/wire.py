"""What the controller, the gateways, Serve's policy and the nodes say to each other through the board.

Pure data and names: may not import Ray, a clock, or anything that does I/O. Messages are JSON with a version; a reader
that meets a newer major version keeps what it had (`decode` raises `WireError`). Ages are measured by the reader from
the moment of receipt, so no two machines' clocks need to agree.

Identifiers have one spelling each: a service is ``unit/service``, the Serve application that runs one of its variants
is ``unit.service.variant`` with the single deployment ``LLM_DEPLOYMENT``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

WIRE_VERSION = 1
BOARD_NAME = "qm_board"
BOARD_NAMESPACE = "quartermaster"
GATEWAY_APP = "qm-gateway"
GATEWAY_DEPLOYMENT = "Gateway"
LLM_DEPLOYMENT = "LLM"

# How long one answer may take once its time in the queue is over, and one call in all; then it is cut. Serve's proxy
# cuts a little later, which is what bounds a caller who does not read.
ANSWER_MAX_S = 3600.0
CALL_MAX_S = 8 * 3600.0
PROXY_MAX_S = CALL_MAX_S + 60.0

# Labels of a Ray node that Quartermaster started. Offering = type, zone and market (and the reservation, when there is
# one).
LABEL_INSTANCE_ID = "qm-instance-id"
LABEL_OFFERING = "qm-offering"
LABEL_INSTANCE_TYPE = "qm-instance-type"
LABEL_ZONE = "qm-zone"
LABEL_MARKET = "qm-market"


class WireError(ValueError):
    """A message that cannot be read: wrong version or wrong shape."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=False)


M = TypeVar("M", bound=_Message)


class VariantRoute(_Message):
    """One application that can serve a service, with what one of its replicas carries.

    `max_replicas` is how many of them Serve can have on its own when the plan is stale: what the owned instances hold.
    """

    app: str
    target_replicas: int
    max_replicas: int = 1
    ready_replicas: int
    max_concurrency_per_replica: int
    capacity_rps_per_replica: float


class OverflowRoute(_Message):
    """An OpenAI-compatible endpoint that takes what own capacity cannot serve in time, and where its key is found."""

    url: str
    model: str
    rpm: int
    usd_per_1m_tokens: float
    key_env: str | None = None
    key_file: str | None = None


class KeyRoute(_Message):
    """An API key, as the SHA-256 of it in hex. `service` (``unit/service``) is meant when a request names no other."""

    unit: str
    tenant: str
    sha256: str
    service: str | None = None


class ServiceRoute(_Message):
    """How the gateway treats a service. `max_queued` counts requests waiting for a slot, over all gateways.

    A request that has waited longer than `slack_s` can no longer meet its limits (None: it always can). Capacity that
    is not there yet is expected `next_capacity_s` after the plan was made (None: nothing is known), and a client that
    is turned away may come back after `retry_after_s` when the queue does not say better. `overflow` None: not used.
    `ttft_s`, `tpot_s` and `e2e_s` are the limits that an answer meets or misses (None: there is no such limit).
    """

    service: str
    priority: int
    variants: tuple[VariantRoute, ...]
    max_queued: int
    queue_timeout_s: float
    retry_after_s: float
    slack_s: float | None = None
    next_capacity_s: float | None = None
    overflow: OverflowRoute | None = None
    sacrifice: tuple[Literal["queue", "shed", "smaller_variant", "overflow"], ...] = ("queue", "shed")
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class Routes(_Message):
    """What a gateway needs: its services, and the keys of those units that ask for one."""

    services: tuple[ServiceRoute, ...] = ()
    keys: tuple[KeyRoute, ...] = ()


class LocalRule(_Message):
    """What Serve does for an app on its own when the plan is stale: enough replicas for the requests in flight."""

    target_ongoing_per_replica: float
    min_replicas: int
    max_replicas: int
    downscale_hold_s: float


class PlanMessage(_Message):
    """The controller's plan as the cluster sees it. `targets` and `local_rules` are keyed by application name."""

    version: int = WIRE_VERSION
    run_id: str
    seq: int
    published_at_s: float
    stale_after_s: float
    targets: dict[str, int]
    local_rules: dict[str, LocalRule]
    services: tuple[ServiceRoute, ...]
    keys: tuple[KeyRoute, ...] = ()


class ServiceCounters(_Message):
    """Cumulative counters of one gateway for one service since that gateway started, and two gauges (`queued`,
    `running`).

    `ttft_sum_s` and `tpot_sum_s` sum over `completed`; a request of fewer than two output tokens adds nothing to
    `tpot_count`. `tasks` counts the arrivals that began a task: the first with its id, and all without an id. What an
    overflow endpoint answered is in `arrivals`, `tasks`, `overflowed`, `met` and `overflow_tokens` (prompt and answer,
    probes included) only. `met` counts the answers, wherever they came from, within every limit of the service.
    """

    service: str
    arrivals: int = 0
    tasks: int = 0
    completed: int = 0
    failed: int = 0
    shed: int = 0
    cold_start_waits: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_sum_s: float = 0.0
    tpot_sum_s: float = 0.0
    tpot_count: int = 0
    overflowed: int = 0
    overflow_tokens: int = 0
    met: int = 0
    queued: int = 0
    running: int = 0


class GatewayReport(_Message):
    """One gateway's counters. `gateway_id` is new at each start, so that a restart is not read as a negative rate."""

    version: int = WIRE_VERSION
    gateway_id: str
    seq: int
    sent_at_s: float
    services: tuple[ServiceCounters, ...]


class NodeReport(_Message):
    """What a node says of itself: boot phase, a reclaim notice with the instant by which it must be empty, the fault
    after which it cannot serve, and the bytes it has received and read so far, which grow while a start gets on.
    """

    version: int = WIRE_VERSION
    instance_id: str
    phase: Literal["booting", "joined", "draining"]
    sent_at_s: float
    reclaim_at_s: float | None = None
    fault: str = ""
    detail: str = ""
    progress_bytes: float | None = None


def service_key(unit: str, service: str) -> str:
    """``unit/service``."""
    return f"{unit}/{service}"


@lru_cache(maxsize=4096)  # asked for every replica in every tick
def app_name(service: str, variant: str) -> str:
    """The Serve application of one variant of ``unit/service``. Names hold no dots, so `split_app` undoes this."""
    return f"{service.replace('/', '.')}.{variant}"


def split_app(app: str) -> tuple[str, str] | None:
    """``(service, variant)`` of an application name, or None when the application is not one of ours."""
    parts = app.split(".")
    return (f"{parts[0]}/{parts[1]}", parts[2]) if len(parts) == 3 and all(parts) else None


def encode(message: _Message) -> bytes:
    """JSON bytes of a message."""
    return message.model_dump_json().encode()


def decode(kind: type[M], raw: bytes) -> M:
    """The message in `raw`. Raises WireError for another version or shape."""
    try:
        message = kind.model_validate_json(raw)
    except ValidationError as error:
        raise WireError(
            f"{kind.__name__}: {error.error_count()} problems, first: {error.errors()[0]['msg']}"
        ) from error
    version = getattr(message, "version", WIRE_VERSION)
    if version != WIRE_VERSION:
        raise WireError(f"{kind.__name__}: version {version}, this side speaks {WIRE_VERSION}")
    return message
