"""llm-d's workload variant autoscaler V2 with its inventory limiter: tokens held against tokens that fit.

Written from the published formulas (docs/peers.md). May not read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from .facts import EPSILON, Facts, Seen, Service, Shape
from .layers import KARPENTER_MEMORY_S
from .packing import Fleet, Want, refused_at_s, usd_per_h
from .windows import Every

PERIOD_S = 60.0
KV_SHARE = 0.8
UP_AT, DOWN_AT = 0.85, 0.70
PRIOR_INPUT_TOKENS, PRIOR_OUTPUT_TOKENS = 1000.0, 200.0


@dataclass(slots=True)
class _Variant:
    """One variant while a service is planned: its replicas, tokens a replica holds, $/h a replica."""

    shape: Shape
    replicas: int
    tokens: float
    usd_per_h: float
    open: bool


class Wva:
    """Every 60 s: up to demand ÷ 0.85 where a token costs least, down to demand ÷ 0.70 where a replica costs most.

    A replica's compute-bound tokens (k2) are those of the requests in flight at its planned rate. The knob multiplies
    both thresholds. The limiter gives a variant new replicas only where instances were not refused
    within three minutes, and forgets what it gave a variant that got none.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._every = Every(PERIOD_S)
        self._current = {
            (shape.service, shape.variant): service.floor if shape is service.unit else 0
            for service in facts.services
            for shape in service.shapes
        }
        self._mix = {service.key: (PRIOR_INPUT_TOKENS, PRIOR_OUTPUT_TOKENS) for service in facts.services}

    def wants(self, now_s: float, seen: Mapping[str, Seen], fleet: Fleet) -> list[Want]:
        """One want for every variant."""
        due = self._every.due(now_s)
        for service in self._facts.services:
            load = seen[service.key]
            self._note_mix(service, load)
            if due and load.ongoing is not None:
                self._plan(now_s, service, load, fleet)
        return [
            Want(service, (shape,), self._current[shape.service, shape.variant] * shape.units)
            for service in self._facts.services
            for shape in service.shapes
        ]

    def _note_mix(self, service: Service, load: Seen) -> None:
        if load.arrival_rps and load.prefill_tps is not None and load.decode_tps is not None:
            self._mix[service.key] = load.prefill_tps / load.arrival_rps, load.decode_tps / load.arrival_rps

    def _plan(self, now_s: float, service: Service, load: Seen, fleet: Fleet) -> None:
        input_tokens, output_tokens = self._mix[service.key]
        held = input_tokens + output_tokens / 2.0
        demand = (load.running or 0.0) * held + (load.queued or 0.0) * input_tokens
        variants = [self._variant(now_s, shape, held, fleet) for shape in service.shapes]
        if not self._grow(variants, service, demand / (UP_AT * self._facts.knob)):
            self._shrink(variants, service, demand / (DOWN_AT * self._facts.knob))
        for variant in variants:
            self._current[service.key, variant.shape.variant] = variant.replicas

    def _variant(self, now_s: float, shape: Shape, held: float, fleet: Fleet) -> _Variant:
        usable = [
            place
            for place in shape.places
            if now_s - refused_at_s(fleet, place) >= KARPENTER_MEMORY_S
            and fleet.sells(place, now_s)
            and fleet.needed_with(shape, place) <= fleet.offerings[place].size
        ]
        alive = sum(fleet.replicas.get((shape.service, shape.variant, place), 0) for place in shape.places)
        current = self._current[shape.service, shape.variant]
        costs = [usd_per_h(fleet, shape, place) for place in usable or shape.places]
        return _Variant(
            shape=shape,
            replicas=current if usable else min(current, alive),
            tokens=min(KV_SHARE * shape.kv_tokens, shape.ongoing * held),
            usd_per_h=min(costs, default=0.0),
            open=bool(usable),
        )

    @staticmethod
    def _grow(variants: list[_Variant], service: Service, tokens: float) -> bool:
        """Whether anything was missing."""
        supply = sum(variant.replicas * variant.tokens for variant in variants)
        count = sum(variant.replicas for variant in variants)
        offered = [variant for variant in variants if variant.open]
        short = tokens - supply > EPSILON or count < service.floor
        if offered and short:
            best = min(offered, key=lambda variant: (variant.usd_per_h / variant.tokens, variant.shape.variant))
            missing = ceil((tokens - supply) / best.tokens - EPSILON)
            best.replicas += max(0, min(max(missing, service.floor - count), service.most - count))
        return short

    @staticmethod
    def _shrink(variants: list[_Variant], service: Service, tokens: float) -> None:
        supply = sum(variant.replicas * variant.tokens for variant in variants)
        count = sum(variant.replicas for variant in variants)
        for variant in sorted(variants, key=lambda variant: (-variant.usd_per_h, variant.shape.variant)):
            while variant.replicas and count > service.floor and supply - variant.tokens >= tokens - EPSILON:
                variant.replicas, count, supply = variant.replicas - 1, count - 1, supply - variant.tokens
