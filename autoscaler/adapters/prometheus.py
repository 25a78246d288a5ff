"""The Metrics port: load from the gateways' counters; and, beside it, engine gauges from the nodes' metrics endpoints.

Counters become rates here and NaN dies here. What was not seen is Missing, never a guess: a gateway that falls silent
makes every service Missing, because its share of the load is unknown. May not import Ray; the board's reports and the
endpoints' addresses come from callables.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import httpx

from autoscaler.core.model import EngineLoad, Idle, Measured, Missing, ServiceLoad, Signal
from autoscaler.ports import Transient
from serve_apps.law_metrics import COUNTERS, PREFIX
from serve_apps.wire import GatewayReport, ServiceCounters, WireError, decode

REPORT_TTL_S = 10.0
REPORT_PERIOD_S = 1.0  # gateways count their reports, so the number tells how long one has run at least
MIN_INTERVAL_S = 0.5  # a clock that steps must not make a rate explode
SILENT_FOR_S = 20.0  # a gateway unheard for longer is taken to be replaced
KEPT_FOR_S = 3600.0  # but was it only cut off, its next report is read from where it was
MEAN_OVER_REQUESTS = 100.0  # memory of the mean tokens per request
SCRAPE_PERIOD_S = 10.0  # a node's endpoint takes a tenth of a second to write its megabyte
SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Flow:
    """What one gateway did for one service: rates over its last interval, and its two gauges."""

    arrival_rps: float
    queued: int
    running: int
    overflow_tps: float
    tasks_rps: float
    ended_rps: float
    met_rps: float


@dataclass(slots=True)
class _Tokens:
    """Decayed sums over requests, whose ratios are the mean tokens of recent requests."""

    input_tokens: float = 0.0
    started: float = 0.0
    output_tokens: float = 0.0
    ended: float = 0.0

    def add(self, before: ServiceCounters, after: ServiceCounters) -> None:
        """Count an interval. Tokens count as they flow, so a request still running counts as started and half ended."""
        completed = after.completed - before.completed
        running = after.running - before.running
        keep = math.exp(-completed / MEAN_OVER_REQUESTS)
        self.input_tokens = keep * self.input_tokens + after.input_tokens - before.input_tokens
        self.started = keep * self.started + completed + after.failed - before.failed + running
        self.output_tokens = keep * self.output_tokens + after.output_tokens - before.output_tokens
        self.ended = keep * self.ended + completed + running / 2.0

    def means(self) -> tuple[float, float] | None:
        """Mean input and output tokens of a request, or None before the first has got anywhere."""
        if self.started < 1.0 or self.ended < 0.5 or self.output_tokens <= 0.0:
            return None
        return self.input_tokens / self.started, self.output_tokens / self.ended


@dataclass(slots=True)
class _Gateway:
    report: GatewayReport
    heard_at_s: float
    flows: dict[str, _Flow] | None  # None until a second report gives an interval


class GatewayMetrics:
    """Load per service from the gateways' reports. `read` returns ``{gateway_id: (age_s, GatewayReport bytes)}``, and
    may raise a port error. The load is what is offered, served or not: arrivals × mean tokens of recent requests.
    """

    def __init__(self, read: Callable[[], Mapping[str, tuple[float, bytes]]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._heard: dict[str, _Gateway] = {}
        self._gateways: dict[str, _Gateway] = {}  # of these, those that count
        self._tokens: dict[str, _Tokens] = {}
        self._called_at_s: float | None = None

    def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
        """Load per service since the previous call, by name. Raises Transient when no gateway has been heard lately."""
        raw = self._read()
        with self._lock:
            fresh = {report.gateway_id: (age_s, report) for age_s, report in _fresh(raw)}
            for age_s, report in fresh.values():
                self._hear(report, now_s - age_s)
            self._heard = {k: g for k, g in self._heard.items() if now_s - g.heard_at_s <= KEPT_FOR_S}
            self._gateways = {k: g for k, g in self._heard.items() if now_s - g.heard_at_s <= SILENT_FOR_S}
            if not fresh:
                raise Transient(f"no gateway has reported within {REPORT_TTL_S:g} s", "NoGateway")
            self._called_at_s = now_s
            services = sorted({row.service for gateway in self._gateways.values() for row in gateway.report.services})
            why = self._blind(fresh, now_s)
            return tuple(_missing(service, why) if why else self._load(service, now_s) for service in services)

    def _hear(self, report: GatewayReport, heard_at_s: float) -> None:
        """Take in a report. A gateway never heard before has counted since the last call when its number of reports is
        no more than that time holds; else it ran before, and says only with its next report what came when.
        """
        known = self._heard.get(report.gateway_id)
        if known is not None and report.seq <= known.report.seq:
            return
        earlier: dict[str, ServiceCounters] = {}
        if known is not None:
            earlier = {row.service: row for row in known.report.services}
            over_s = report.sent_at_s - known.report.sent_at_s
        else:
            over_s = heard_at_s - self._called_at_s if self._called_at_s is not None else 0.0
            if self._called_at_s is None or report.seq > over_s / REPORT_PERIOD_S + 2.0:
                self._heard[report.gateway_id] = _Gateway(report, heard_at_s, None)
                return
        flows = {}
        for row in report.services:
            was = earlier.get(row.service, ServiceCounters(service=row.service))
            self._tokens.setdefault(row.service, _Tokens()).add(was, row)
            over_s = max(over_s, MIN_INTERVAL_S)
            flows[row.service] = _Flow(
                arrival_rps=(row.arrivals - was.arrivals) / over_s,
                queued=row.queued,
                running=row.running,
                overflow_tps=(row.overflow_tokens - was.overflow_tokens) / over_s,
                tasks_rps=(row.tasks - was.tasks) / over_s,
                ended_rps=(_ended(row) - _ended(was)) / over_s,
                met_rps=(row.met - was.met) / over_s,
            )
        self._heard[report.gateway_id] = _Gateway(report, heard_at_s, flows)

    def _blind(self, fresh: Collection[str], now_s: float) -> str:
        """Why the load is not known, or nothing when every gateway that counts was heard twice."""
        for gateway_id, gateway in self._gateways.items():
            if gateway_id not in fresh:
                return f"gateway {gateway_id} is silent for {now_s - gateway.heard_at_s:.0f} s"
            if gateway.flows is None:
                return f"only one report of gateway {gateway_id} so far"
        return ""

    def _load(self, service: str, now_s: float) -> ServiceLoad:
        flows = [flow for g in self._gateways.values() if g.flows is not None and (flow := g.flows.get(service))]
        rps = sum(flow.arrival_rps for flow in flows)
        queued, running = sum(flow.queued for flow in flows), sum(flow.running for flow in flows)
        elsewhere_tps = sum(flow.overflow_tps for flow in flows)
        idle, measured = Idle(at_s=now_s), partial(Measured, at_s=now_s)
        elsewhere = measured(value=elsewhere_tps) if elsewhere_tps > 0.0 else idle
        ended_rps, met_rps = sum(flow.ended_rps for flow in flows), sum(flow.met_rps for flow in flows)
        ended, met = (measured(value=ended_rps), measured(value=met_rps)) if ended_rps > 0.0 else (idle, idle)
        if rps <= 0.0 and not queued and not running:
            return _load_of(service, idle, idle, idle, idle, idle, elsewhere, idle, ended, met)
        means = self._tokens[service].means()
        unknown: Signal = Missing(why="no request has got an answer yet")
        return _load_of(
            service,
            measured(value=rps),
            measured(value=rps * means[0]) if means else unknown,
            measured(value=rps * means[1]) if means else unknown,
            measured(value=float(queued)),
            measured(value=float(running)),
            elsewhere,
            measured(value=sum(flow.tasks_rps for flow in flows)),
            ended,
            met,
        )


def _ended(row: ServiceCounters) -> int:
    return row.completed + row.overflowed + row.shed + row.failed


def _fresh(raw: Mapping[str, tuple[float, bytes]]) -> Iterator[tuple[float, GatewayReport]]:
    """Readable reports younger than the TTL; a gateway that speaks another version is as good as silent."""
    for _, (age_s, message) in sorted(raw.items()):
        if age_s <= REPORT_TTL_S:
            try:
                yield age_s, decode(GatewayReport, message)
            except WireError:
                continue


def _missing(service: str, why: str) -> ServiceLoad:
    missing = Missing(why=why)
    return _load_of(service, *[missing] * 9)


def _load_of(
    service: str,
    rps: Signal,
    prefill: Signal,
    decoded: Signal,
    queued: Signal,
    running: Signal,
    elsewhere: Signal,
    begun: Signal,
    ended: Signal,
    met: Signal,
) -> ServiceLoad:
    return ServiceLoad(
        service=service,
        arrival_rps=rps,
        prefill_tps=prefill,
        decode_tps=decoded,
        queued=queued,
        running=running,
        overflow_tps=elsewhere,
        tasks_rps=begun,
        ended_rps=ended,
        met_rps=met,
    )


# ---- engines --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStat:
    """One engine's gauges: requests running and waiting, fraction of the KV cache in use. None: not exported. `law`:
    its counters so far, by name (serve_apps.law_metrics).
    """

    running: float | None = None
    waiting: float | None = None
    kv_fraction: float | None = None
    law: Mapping[str, float] = field(default_factory=dict)


FIELDS = {"num_requests_running": "running", "num_requests_waiting": "waiting", "kv_cache_usage_perc": "kv_fraction"}
# One pass over a megabyte of text: only the wanted names at a line's start are ever looked at closely.
_SERIES = re.compile(
    rf"^ray_(?:vllm_({'|'.join(FIELDS)})|{PREFIX}({'|'.join(COUNTERS)})_total)"
    r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} (\S+)',
    re.MULTILINE,
)
_REPLICA = re.compile(r'(?:^|,)ReplicaId="([^"]+)"')


def parse_engines(text: str) -> dict[str, EngineStat]:
    """``{replica_id: EngineStat}`` of one exposition; NaN, infinite and negative values are dropped."""
    stats: dict[str, EngineStat] = {}
    for gauge, counter, labels, literal in _SERIES.findall(text):
        replica = _REPLICA.search(labels)
        try:
            value = float(literal)
        except ValueError:
            continue
        if replica and math.isfinite(value) and value >= 0.0:
            known = stats.get(replica[1], EngineStat())
            more = {FIELDS[gauge]: value} if gauge else {"law": {**known.law, counter: value}}
            stats[replica[1]] = replace(known, **more)
    return stats


class EngineScraper:
    """Reads all engines' gauges on a thread of its own, so that a slow node delays nobody."""

    def __init__(self, urls: Callable[[], Iterable[str]], *, period_s: float = SCRAPE_PERIOD_S) -> None:
        self._urls = urls
        self._period_s = period_s
        self._stats: dict[str, EngineStat] = {}
        self._told: dict[str, EngineStat] = {}  # what the last call of `engines` saw
        self._known = False  # whether the last scrape knew which nodes there are
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="qm-engine-scraper", daemon=True)

    def start(self) -> None:
        """Begin to scrape."""
        self._thread.start()

    def stop(self) -> None:
        """End within one scrape's time-out."""
        self._stop.set()
        self._thread.join()

    def engines(self, now_s: float) -> tuple[EngineLoad, ...]:
        """All engines of the last scrape, by replica: Ray exports a dead engine's last values for minutes. Their means
        are over the time between that scrape and the one of the last call.

        Raises Transient before the first scrape, and when it was not known which nodes there are.
        """
        if not self._known:
            raise Transient("no node's metrics endpoint is known", "NoMetricsEndpoint")
        before, self._told = self._told, self._stats
        return tuple(_engine(key, stat, before.get(key), now_s) for key, stat in sorted(self._told.items()))

    def scrape_once(self, client: httpx.Client) -> None:
        """Read every endpoint; one that does not answer leaves its engines out."""
        stats: dict[str, EngineStat] = {}
        try:
            for url in self._urls():
                stats.update(_scrape(client, url))
            self._known = True
        except Transient:
            self._known = False
        self._stats = stats

    def _loop(self) -> None:
        with httpx.Client(timeout=SCRAPE_TIMEOUT_S, trust_env=False) as client:
            while not self._stop.is_set():
                self.scrape_once(client)
                self._stop.wait(self._period_s)


def _scrape(client: httpx.Client, url: str) -> dict[str, EngineStat]:
    try:
        reply = client.get(url)
        return parse_engines(reply.text) if reply.is_success else {}
    except httpx.HTTPError:
        return {}


def _engine(replica_id: str, stat: EngineStat, before: EngineStat | None, now_s: float) -> EngineLoad:
    def signal(value: float | None, why: str = "not exported") -> Signal:
        return Missing(why=why) if value is None else Measured(value=value, at_s=now_s)

    done = _since(before, stat)

    def mean(total: str, count: str) -> Signal:
        return signal(done[total] / done[count] if done[count] > 0.0 else None, "nothing since the last look")

    return EngineLoad(
        replica_id=replica_id,
        running=signal(stat.running),
        waiting=signal(stat.waiting),
        kv_fraction=signal(stat.kv_fraction),
        tpot_s=mean("token_seconds", "step_tokens"),
        prefill_s=mean("prefill_seconds", "prefills"),
        input_tokens=mean("prefill_tokens", "prefills"),
        batch=mean("step_tokens", "steps"),
        kv_tokens=mean("kv_token_steps", "steps"),
        steps=done["steps"],
        samples=done["prefills"],
    )


def _since(before: EngineStat | None, after: EngineStat) -> dict[str, float]:
    """What was counted between two looks at an engine; nothing at the first, and when a counter began anew."""
    rises = {name: after.law.get(name, 0.0) - before.law.get(name, 0.0) for name in COUNTERS} if before else {}
    return rises if rises and min(rises.values()) >= 0.0 else dict.fromkeys(COUNTERS, 0.0)


@dataclass(frozen=True, slots=True)
class ClusterMetrics:
    """The Metrics port of a live cluster: load from the gateways, gauges from the engines."""

    gateways: GatewayMetrics
    scraper: EngineScraper

    def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
        """See `GatewayMetrics.loads`."""
        return self.gateways.loads(now_s)

    def engines(self, now_s: float) -> tuple[EngineLoad, ...]:
        """See `EngineScraper.engines`."""
        return self.scraper.engines(now_s)
