"""One application's engines on `tests.engine_fleet`, and what is learnt from them, window by window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autoscaler.core import calibrate
from autoscaler.core.beliefs import EMPTY, Beliefs, Calibration, InstanceBelief
from autoscaler.core.calibrate import CONSTANTS
from autoscaler.core.lifecycle import InstanceState
from autoscaler.core.model import EngineLoad, Measured, Replica, Shape, Signal
from serve_apps.timing import Timing, decode_step_s, prefill_s
from tests.engine_fleet import FleetEngine

TRUE = Timing(
    a_s=0.040,
    b_s_per_seq=0.0004,
    c_s_per_ktoken=0.0006,
    prefill_tps=4000.0,
    prefill_fixed_s=0.01,
    max_num_seqs=64,
    kv_capacity_tokens=100_000,
)
FULL_RPS = 2.6  # of one engine
TICK_S = 10.0
APP = "u.s.v"


def scaled(timing: Timing, **factors: float) -> Timing:
    """`timing` with the named constants (calibrate.CONSTANTS) multiplied."""
    f = dict.fromkeys(CONSTANTS, 1.0) | factors
    return replace(
        timing,
        a_s=timing.a_s * f["decode_base"],
        b_s_per_seq=timing.b_s_per_seq * f["batch_slope"],
        c_s_per_ktoken=timing.c_s_per_ktoken * f["kv_slope"],
        prefill_fixed_s=timing.prefill_fixed_s * f["prefill_fixed"],
        prefill_tps=timing.prefill_tps / f["prefill_rate"],
    )


def shape(timing: Timing, **over: Any) -> Shape:
    """The one application's shape."""
    fields: dict[str, Any] = {"service": "u/s", "variant": "v", "instance_type": "g", "gpus": 1, "nodes": 1}
    fields |= {"load_prior_s": 60.0, "boot_prior_s": 60.0, "source": "test", "uncertainty": 0.12}
    return Shape(timing=timing, **fields | over)


def placed(key: str, instance_id: str = "", service: str = "u/s") -> Replica:
    """A ready replica on its own instance."""
    instance_id = instance_id or f"i-{key}"
    return Replica(replica_id=key, service=service, variant="v", instance_id=instance_id, state="ready", since_s=0.0)


def owned(instance_id: str) -> InstanceBelief:
    """An instance that has joined."""
    return InstanceBelief(
        instance_id=instance_id, offering="o", token="t", state=InstanceState.JOINED, since_s=0.0, launched_at_s=0.0
    )


@dataclass
class Rig:
    """`count` engines that truly keep to `true`, believed to keep to `prior`. Loads swing by 40 % around `load` (1 =
    full) and differ from engine to engine. `slow` engines take 1.5 times as long.
    """

    count: int = 1
    true: Timing = TRUE
    prior: Timing = TRUE
    slow: tuple[int, ...] = ()
    now_s: float = 0.0
    ticks: int = 0
    engines: list[FleetEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engines = [
            FleetEngine(f"r{n}", self.true, slowdown=1.5 if n in self.slow else 1.0) for n in range(self.count)
        ]
        self.ready = {one.replica_id: placed(one.replica_id) for one in self.engines}
        instances = {row.instance_id: owned(row.instance_id) for row in self.ready.values()}
        self.beliefs: Beliefs = replace(EMPTY, shapes=(shape(self.prior),), instances=instances)

    def windows(self, load: float, swing: float = 0.4) -> tuple[EngineLoad, ...]:
        """What the engines say of the next ten seconds."""
        self.now_s += TICK_S
        for n, one in enumerate(self.engines):
            one.rps = FULL_RPS * load * (1.0 + swing * (((7 * self.ticks + 3 * n) % 10) / 4.5 - 1.0))
            one.run(self.now_s)
        self.ticks += 1
        return tuple(one.window(self.now_s) for one in self.engines)

    def run(self, for_s: float, load: float = 0.5, until: Callable[[Beliefs], object] | None = None) -> float:
        """Learn for so long, or until something is believed; returns the seconds that took."""
        began_s = self.now_s
        while self.now_s - began_s < for_s and not (until and until(self.beliefs)):
            windows = self.windows(load)
            self.beliefs = calibrate.observe(self.beliefs, windows, self.ready, self.now_s)
        return self.now_s - began_s

    @property
    def learnt(self) -> Calibration:
        """What is known of the application."""
        return self.beliefs.calibrations[APP]

    def timing(self) -> Timing:
        """The learnt law, without a margin."""
        return calibrate.timing_for(self.beliefs, self.beliefs.shapes[0], z=0.0)


def predicted_tpot_s(timing: Timing, seen: EngineLoad) -> float:
    """The law's token time at the load of a window: the step, and prefills of others that fall into it."""
    assert isinstance(seen.batch, Measured)
    assert isinstance(seen.kv_tokens, Measured)
    step_s = decode_step_s(timing, seen.batch.value, seen.kv_tokens.value)
    if not isinstance(seen.input_tokens, Measured):
        return step_s
    busy: float = 1.0 - seen.batch.value**-2.4
    return step_s + busy * seen.samples / seen.steps * prefill_s(timing, seen.input_tokens.value)


def tpot_error(timing: Timing, load: float, true: Timing = TRUE) -> float:
    """Relative error of the law's mean token time against an engine that was not learnt from, at a steady load."""
    other = Rig(true=true)
    other.engines[0].seed = 99
    other.windows(load, 0.0)
    rows = [row for row in (other.windows(load, 0.0) for _ in range(40)) if isinstance(row[0].tpot_s, Measured)]
    got = sum(row[0].tpot_s.value for row in rows if isinstance(row[0].tpot_s, Measured))
    error: float = sum(predicted_tpot_s(timing, row[0]) for row in rows) / got - 1.0
    return error


def window(
    key: str = "r0", *, batch: float | Signal = 10.0, tpot_s: float | Signal | None = None, **over: Any
) -> EngineLoad:
    """A made-up window at `batch` sequences of 700 tokens each, that keeps to TRUE unless something else is said."""

    def seen(value: float | Signal) -> Signal:
        return Measured(value=value, at_s=0.0) if isinstance(value, float) else value

    sequences = batch if isinstance(batch, float) else 10.0
    exact = EngineLoad(
        replica_id=key,
        running=seen(sequences),
        waiting=seen(0.0),
        kv_fraction=seen(0.07),
        batch=seen(sequences),
        kv_tokens=seen(700.0 * sequences),
        steps=200.0,
    )
    token_time = predicted_tpot_s(TRUE, exact) if tpot_s is None else tpot_s
    return replace(exact, **{"tpot_s": seen(token_time), "batch": seen(batch)} | over)
