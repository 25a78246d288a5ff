"""What the capacity model predicts, against the largest load that the request-level engine carries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from autoscaler.core.capacity import BURSTS, FEWEST, INPUT_CV, OUTPUT_CV, SAFETY, STEADY_SHARE, Mix, capacity
from chaos.engine import SINGLE, Engine, RequestBatch
from policies.model import Slo
from serve_apps.timing import Timing, decode_step_s, prefill_s
from tests.engine_scene import spec

TRIPLES = 30
REQUESTS = 4000  # a replica
HALVINGS = 9


@dataclass(frozen=True)
class Case:
    """A variant, a mix and an objective, with the replicas that share a gateway."""

    timing: Timing
    mix: Mix
    slo: Slo
    pool: int


def drawn(rng: np.random.Generator) -> Case:
    """Engines from a B200 to an L4, prompts of 200 to 8,000 tokens, limits from tight to loose."""
    a_s = rng.uniform(0.004, 0.04)
    timing = Timing(
        a_s=a_s,
        b_s_per_seq=a_s * rng.uniform(0.001, 0.01),
        c_s_per_ktoken=a_s * rng.uniform(0.002, 0.012),
        prefill_tps=10 ** rng.uniform(3.7, 4.7),
        kv_capacity_tokens=int(10 ** rng.uniform(4.8, 6.0)),
    )
    mix = Mix(input_tokens=10 ** rng.uniform(2.3, 3.9), output_tokens=10 ** rng.uniform(1.7, 2.8))
    slo = Slo(
        ttft_s=rng.uniform(3.0, 10.0) * (3.0 * mix.input_tokens / timing.prefill_tps + a_s),
        tpot_s=a_s * rng.uniform(1.6, 4.0),
        fraction=float(rng.choice([0.9, 0.95, 0.98])),
    )
    return Case(timing, mix, slo, int(rng.choice([1, 1, 4, 8])))


def requests(case: Case, rps: float, seed: int) -> RequestBatch:
    """Arrivals with Gamma gaps (Poisson where their variation is 1), of lognormal lengths."""
    rng = np.random.default_rng([seed, 1])
    bursts = case.mix.arrival_cv**2
    count = int(REQUESTS * bursts**0.5) * min(case.pool, 4)  # bursts are few, and must be many for a fraction

    def lengths(mean: float, cv: float) -> npt.NDArray[np.int32]:
        sigma = math.sqrt(math.log1p(cv * cv))
        drawn = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
        whole: npt.NDArray[np.int32] = np.maximum(1, np.rint(drawn)).astype(np.int32)
        return whole

    at_s = np.cumsum(rng.gamma(1.0 / bursts, bursts / rps, count))
    inputs = lengths(case.mix.input_tokens, INPUT_CV)
    return RequestBatch(
        at_s=at_s,
        input_tokens=inputs,
        output_tokens=lengths(case.mix.output_tokens, OUTPUT_CV),
        prefix_tokens=(case.mix.prefix_share * inputs).astype(np.int32),
        task=np.full(count, SINGLE, np.int32),
    )


def attainment(case: Case, slots: int, rps: float, seed: int) -> float:
    """Fraction of requests within the limits at this load."""
    batch = requests(case, rps, seed)
    slo = case.slo
    engine = Engine([spec(batch, queue_timeout_s=1e9, max_queued=10**9, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)])
    for _ in range(case.pool):
        engine.add_replica(0, 0, case.timing, slots=slots)
    engine.advance(float(batch.at_s[-1]) + 1e5)
    totals = engine.totals(0)
    return totals.met / totals.requests


def largest_rps(case: Case, slots: int, most: float, seed: int) -> float:
    """The largest load per replica at which the objective's fraction is met, by bisection."""
    low, high = 0.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if attainment(case, slots, middle * case.pool, seed) >= case.slo.fraction:
            low = middle
        else:
            high = middle
    return low


def predicted_over_found(case: Case, seed: int) -> float:
    """What the model promises a replica when all of the allowed misses are spent, over what the engine carries.

    Where the model says that bursts miss the objective at any load, its promise is none: right when the engine carries
    no more than a batch of FEWEST.
    """
    # A goal plans for less than the largest load; here the whole of the allowed misses is spent.
    spent = case.slo.model_copy(update={"fraction": 1.0 - (1.0 - case.slo.fraction) / STEADY_SHARE["latency"]})
    slots = capacity(case.timing, case.mix, case.slo, "latency", case.pool).batch
    made = capacity(case.timing, case.mix, spent, "latency", case.pool)
    calm = capacity(case.timing, replace(case.mix, arrival_cv=1.0), spent, "latency", case.pool)
    found = largest_rps(case, slots, 2.5 * calm.rps, seed)
    request_s = case.mix.output_tokens * decode_step_s(case.timing, 1, 0) + prefill_s(
        case.timing, case.mix.input_tokens
    )
    promised = 0.0 if any(reason.subject == BURSTS for reason in made.reasons) else made.rps
    least = FEWEST / request_s
    return 1.0 if promised == 0.0 and found <= least else promised / max(found, least / 2.0)


@pytest.mark.parametrize(
    ("arrival_cv", "prefix_share", "median_error"),
    [(1.0, 0.0, 0.10), (1.0, 0.6, 0.10), (2.0, 0.0, 0.12), (4.0, 0.0, 0.15)],
)
def test_the_largest_load_is_predicted_and_on_the_safe_side(
    arrival_cv: float, prefix_share: float, median_error: float
) -> None:
    rng = np.random.default_rng(20240513)
    cases = [drawn(rng) for _ in range(TRIPLES)]
    varied = {"arrival_cv": arrival_cv, "prefix_share": prefix_share}
    cases = [replace(case, mix=replace(case.mix, **varied)) for case in cases]
    ratios = [predicted_over_found(case, seed) for seed, case in enumerate(cases)]
    errors = [abs(ratio - 1.0) for ratio in ratios]
    assert float(np.median(errors)) <= median_error, ratios
    assert sum(ratio <= 1.0 for ratio in ratios) >= 0.8 * TRIPLES, ratios
    assert max(ratios) < 1.3, ratios
    assert float(np.median(ratios)) > SAFETY - 0.1, "safe, but not by giving away a tenth more than the margin"
