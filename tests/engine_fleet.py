"""Engines in virtual time on `serve_apps.batching` under Poisson load, saying of each window what vLLM would."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoscaler.core.model import EngineLoad, Measured, Missing, Signal
from serve_apps.batching import Batch, Sequence
from serve_apps.timing import Timing

UNSEEN = Missing(why="nothing in this window")


@dataclass
class FleetEngine:
    """One engine under Poisson arrivals of `rps` requests/s with exponential prompts and outputs around their means."""

    replica_id: str
    timing: Timing
    slowdown: float = 1.0
    rps: float = 0.0
    input_tokens: float = 600.0
    output_tokens: float = 120.0
    seed: int = 1
    now_s: float = 0.0
    next_at_s: float = 0.0
    _made: int = 0
    _prefills: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = Batch(self.timing)
        self.rng = np.random.default_rng([self.seed, sum(self.replica_id.encode())])
        self._clear()

    def _clear(self) -> None:
        self.steps, self.tokens, self.token_s, self.kv = 0, 0, 0.0, 0.0
        self._prefills = []

    def run(self, until_s: float) -> None:
        """Arrivals and steps up to `until_s`; the step under way then ends later."""
        while self.now_s < until_s:
            self._arrive()
            duration_s = self.batch.start_step(self.now_s)
            if duration_s is None:
                self.now_s = min(self.next_at_s, until_s) if self.rps else until_s
                continue
            decoding = [(one, one.kv_tokens) for one in self.batch.running if one.to_prefill == 0]
            self.now_s += duration_s * self.slowdown
            served = self.batch.end_step(self.now_s)
            if decoding:
                self.steps += 1
                self.tokens += len(decoding)
                self.token_s += duration_s * self.slowdown * len(decoding)
                self.kv += sum(kv for _, kv in decoding)
            for one in served:
                if one.output_tokens == 1 and one.admitted_at_s is not None:
                    self._prefills.append((self.now_s - one.admitted_at_s, one.input_tokens))

    def _arrive(self) -> None:
        while self.rps and self.next_at_s <= self.now_s:
            self._made += 1
            prompt = 1 + int(self.rng.exponential(self.input_tokens))
            answer = 2 + int(self.rng.exponential(self.output_tokens))
            at_s = self.next_at_s
            self.batch.add(
                Sequence(request_id=str(self._made), input_tokens=prompt, max_tokens=answer, arrived_at_s=at_s)
            )
            self.next_at_s += float(self.rng.exponential(1.0 / self.rps))
        if not self.rps:
            self.next_at_s = self.now_s

    def window(self, at_s: float) -> EngineLoad:
        """What the metrics say of the time since the last call."""

        def mean(total: float, count: int) -> Signal:
            return Measured(value=total / count, at_s=at_s) if count else UNSEEN

        load = EngineLoad(
            replica_id=self.replica_id,
            running=Measured(value=float(len(self.batch.running)), at_s=at_s),
            waiting=Measured(value=float(len(self.batch.waiting)), at_s=at_s),
            kv_fraction=Measured(value=self.batch.kv_tokens / self.timing.kv_capacity_tokens, at_s=at_s),
            tpot_s=mean(self.token_s, self.tokens),
            prefill_s=mean(sum(row[0] for row in self._prefills), len(self._prefills)),
            input_tokens=mean(sum(row[1] for row in self._prefills), len(self._prefills)),
            batch=mean(self.tokens, self.steps),
            kv_tokens=mean(self.kv, self.steps),
            steps=float(self.steps),
            samples=float(len(self._prefills)),
        )
        self._clear()
        return load
