"""Fakes of the ports with the semantics of the real ones: time moves only when a test moves it, and nothing is scripted
that the real thing would not do. Each fake raises the errors in its `failures` first, one a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoscaler.adapters.aws_codes import port_error
from autoscaler.adapters.local_supply import CloudConfig, Refusal, Supply
from autoscaler.core.model import (
    CloudView,
    EngineLoad,
    Idle,
    Measured,
    Missing,
    Node,
    Replica,
    ReplicaState,
    ServiceLoad,
    ServingView,
    Shape,
    Signal,
)
from autoscaler.ports import NotFound, PortError, Transient
from serve_apps.wire import PlanMessage, app_name, split_app


@dataclass
class FakeClock:
    """Stands still until it is moved."""

    at_s: float = 1_000_000.0

    def now_s(self) -> float:
        return self.at_s

    def advance(self, by_s: float) -> float:
        self.at_s += by_s
        return self.at_s


class _Fails:
    """Raises what a test queued before doing anything else."""

    def __init__(self) -> None:
        self.failures: list[PortError] = []

    def _maybe_fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class FakeCloud(_Fails):
    """The local cloud's own books without processes. `lose_replies` launches take effect and then answer nothing."""

    def __init__(self, config: CloudConfig, clock: FakeClock) -> None:
        super().__init__()
        self.supply = Supply(config)
        self.clock = clock
        self.lose_replies = 0
        self.launches: list[tuple[str, int, str]] = []

    def describe(self, now_s: float) -> CloudView:
        self._maybe_fail()
        self.settle()
        return self.supply.view(now_s)

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        self._maybe_fail()
        self.settle()
        self.launches.append((offering, count, token))
        try:
            granted = self.supply.launch(offering, count, token, self.clock.now_s())
        except Refusal as refusal:
            raise port_error(refusal.code, str(refusal), offering=offering) from None
        if self.lose_replies:
            self.lose_replies -= 1
            raise Transient("the reply was lost")
        return granted

    def terminate(self, instance_id: str) -> None:
        self._maybe_fail()
        self.settle()
        try:
            self.supply.terminate(instance_id)
        except Refusal as refusal:
            raise port_error(refusal.code, str(refusal)) from None

    def set_supply(self, offering: str, count: int) -> None:
        self.supply.set_supply(offering, count)

    def reclaim(self, instance_id: str, notice_s: float | None = None) -> None:
        self.supply.reclaim(instance_id, self.clock.now_s(), notice_s)

    def settle(self) -> None:
        """Time has passed; what was terminating has ended."""
        now_s = self.clock.now_s()
        self.supply.advance(now_s)
        for machine in tuple(self.supply.machines.values()):
            if machine.state == "terminating":
                self.supply.ended(machine.instance_id, now_s, "")


@dataclass
class _Engine:
    replica_id: str
    app: str
    since_s: float
    instance_id: str = ""
    draining: bool = False


@dataclass
class FakeServing(_Fails):
    """Ray and Serve over a FakeCloud: a running instance joins after `join_s`; targets make replicas, placed first come
    first served on nodes of their shape's type with free GPUs, ready `load_s` (or the shape's prior) after placement.
    Replicas of a drained node serve until their successors are ready, they are surplus, or the deadline comes; the node
    leaves `finish_s` after the last."""

    cloud: FakeCloud
    clock: FakeClock
    shapes: Sequence[Shape]
    load_s: float | None = None
    join_s: float = 1.0
    finish_s: float = 1.0
    published: list[PlanMessage] = field(default_factory=list)
    failures: list[PortError] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    _engines: list[_Engine] = field(default_factory=list)
    _joined_at_s: dict[str, float] = field(default_factory=dict)
    _drained_at_s: dict[str, float] = field(default_factory=dict)
    _deadline_at_s: dict[str, float] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)
    _made: int = 0

    def __post_init__(self) -> None:
        self._shape = {app_name(shape.service, shape.variant): shape for shape in self.shapes}
        self.targets = dict.fromkeys(self._shape, 0) | self.targets

    def observe(self, now_s: float) -> ServingView:
        self._maybe_fail()
        self._settle()
        return ServingView(
            at_s=now_s,
            replicas=tuple(self._replica(engine) for engine in self._engines),
            nodes=tuple(
                Node(
                    node_id=f"n-{instance_id}",
                    instance_id=instance_id,
                    alive=instance_id not in self._left,
                    draining=instance_id in self._drained_at_s,
                )
                for instance_id in self._joined_at_s
            ),
            targets=tuple(sorted(self.targets.items())),
        )

    def publish(self, message: PlanMessage) -> None:
        self._maybe_fail()
        self.published.append(message)
        self.targets.update({app: count for app, count in message.targets.items() if app in self._shape})

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:
        self._maybe_fail()
        self._settle()
        if instance_id not in self._joined_at_s or instance_id in self._left:
            raise NotFound(f"no live node of {instance_id!r}")
        self._drained_at_s.setdefault(instance_id, self.clock.now_s())
        self._deadline_at_s[instance_id] = deadline_at_s

    def _settle(self) -> None:
        self.cloud.settle()
        running = {m.instance_id for m in self.cloud.supply.machines.values() if m.state == "running"}
        now_s = self.clock.now_s()
        for instance_id in sorted(running - self._joined_at_s.keys()):
            if now_s >= self.cloud.supply.machines[instance_id].boots_at_s + self.join_s:
                self._joined_at_s[instance_id] = now_s
        busy = {engine.instance_id for engine in self._engines}
        empty = {i for i, at_s in self._drained_at_s.items() if now_s >= at_s + self.finish_s and i not in busy}
        self._left |= empty | (self._joined_at_s.keys() - running)
        self._engines = [engine for engine in self._engines if engine.instance_id not in self._left]
        for engine in self._engines:
            engine.draining = engine.draining or engine.instance_id in self._drained_at_s
        for app, target in self.targets.items():
            self._match(app, target)
        for engine in self._engines:
            if not engine.instance_id:
                self._place(engine)

    def _match(self, app: str, target: int) -> None:
        """Start the missing replicas, or stop the surplus: those without a place first, then the newest."""
        serving = [engine for engine in self._engines if engine.app == app and not engine.draining]
        for _ in range(target - len(serving)):
            self._made += 1
            self._engines.append(_Engine(f"r{self._made}", app, self.clock.now_s()))
        surplus = sorted(serving, key=lambda e: (bool(e.instance_id), -e.since_s))[: max(0, len(serving) - target)]
        self._engines = [engine for engine in self._engines if engine not in surplus]
        leaving = [engine for engine in self._engines if engine.app == app and engine.draining]
        ready = sum(self._state(engine) == "ready" for engine in serving if engine not in surplus)
        now_s = self.clock.now_s()
        late = [e for e in leaving if now_s >= self._deadline_at_s[e.instance_id]]
        stop = {id(e) for e in (*late, *leaving[: max(0, ready + len(leaving) - target)])}
        self._engines = [engine for engine in self._engines if id(engine) not in stop]

    def _place(self, engine: _Engine) -> None:
        shape = self._shape[engine.app]
        for instance_id in self._joined_at_s:
            if instance_id in self._left or instance_id in self._drained_at_s:
                continue
            machine = self.cloud.supply.machines[instance_id]
            spec = self.cloud.supply.offerings[machine.offering]
            used = sum(self._shape[e.app].gpus for e in self._engines if e.instance_id == instance_id)
            if spec.instance_type == shape.instance_type and used + shape.gpus <= spec.gpus:
                engine.instance_id, engine.since_s = instance_id, self.clock.now_s()
                return

    def _state(self, engine: _Engine) -> ReplicaState:
        if not engine.instance_id:
            return "pending"
        load_s = self._shape[engine.app].load_prior_s if self.load_s is None else self.load_s
        return "ready" if self.clock.now_s() >= engine.since_s + load_s else "loading"

    def _replica(self, engine: _Engine) -> Replica:
        parts = split_app(engine.app)
        assert parts is not None
        return Replica(
            replica_id=engine.replica_id,
            service=parts[0],
            variant=parts[1],
            instance_id=engine.instance_id,
            state=self._state(engine),
            since_s=engine.since_s,
        )


class FakeMetrics(_Fails):
    """Loads that a test set, stamped with the time of the call."""

    def __init__(self) -> None:
        super().__init__()
        self._loads: dict[str, ServiceLoad] = {}
        self.engine_loads: list[EngineLoad] = []

    def loads(self, now_s: float) -> tuple[ServiceLoad, ...]:
        self._maybe_fail()
        return tuple(_at(load, now_s) for _, load in sorted(self._loads.items()))

    def engines(self, now_s: float) -> tuple[EngineLoad, ...]:
        return tuple(replace(engine, kv_fraction=_stamped(engine.kv_fraction, now_s)) for engine in self.engine_loads)

    def set(
        self,
        service: str,
        rps: float,
        *,
        input_tokens: float = 0,
        output_tokens: float = 0,
        queued: float = 0,
        running: float = 0,
        tasks_rps: float | None = None,
        met: float = 1.0,
    ) -> None:
        """Offered load from now on; tokens are means per request, and without `tasks_rps` each is a task of its own;
        all end as they come, the part `met` of them within its limits.
        """
        begun_rps = rps if tasks_rps is None else tasks_rps
        values = (rps, rps * input_tokens, rps * output_tokens, queued, running, begun_rps, rps, rps * met)
        self._put(service, *(Measured(value=float(value), at_s=0.0) for value in values))

    def set_idle(self, service: str) -> None:
        self._put(service, *(Idle(at_s=0.0),) * 8)

    def set_missing(self, service: str, why: str = "no gateway reports") -> None:
        self._put(service, *(Missing(why=why),) * 8)

    def _put(self, service: str, *signals: Signal) -> None:
        rps, prefill, decode, queued, running, begun, ended, within = signals
        self._loads[service] = ServiceLoad(
            service=service,
            arrival_rps=rps,
            prefill_tps=prefill,
            decode_tps=decode,
            queued=queued,
            running=running,
            tasks_rps=begun,
            ended_rps=ended,
            met_rps=within,
        )


def _stamped(signal: Signal, now_s: float) -> Signal:
    return signal if isinstance(signal, Missing) else replace(signal, at_s=now_s)


def _at(load: ServiceLoad, now_s: float) -> ServiceLoad:
    return replace(
        load,
        arrival_rps=_stamped(load.arrival_rps, now_s),
        prefill_tps=_stamped(load.prefill_tps, now_s),
        decode_tps=_stamped(load.decode_tps, now_s),
        queued=_stamped(load.queued, now_s),
        running=_stamped(load.running, now_s),
        tasks_rps=_stamped(load.tasks_rps, now_s),
        ended_rps=_stamped(load.ended_rps, now_s),
        met_rps=_stamped(load.met_rps, now_s),
    )
