"""Rates over time: the profile of a synthetic demand, and a recorded rate trace cut to the scenario.

Pure arithmetic on arrays, with a generator that is passed in; may not read a file or a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from chaos.demand import Floats, Rates
from chaos.scenario_format import Bursts, Demand, Flash, Profile

GRID_S = 60.0
FLASH_GRID_S = 1.0
NOISE_S = 900.0  # from one knot of a profile's noise to the next
DAY_S, WEEK_S = 86_400.0, 604_800.0
FIRST_MONDAY_S = 4 * DAY_S  # 5 January 1970
MAX_BINS = 5_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Requests per second, constant in each bin: bin i is ``[edges_s[i], edges_s[i + 1])`` of scenario time.

    `input_tokens` and `output_tokens` are means by bin, 0 where they are not known; shape (bins,) like `rps`.
    """

    edges_s: Floats
    rps: Floats
    input_tokens: Floats
    output_tokens: Floats

    @property
    def due(self) -> Floats:
        """Requests expected by each edge, shape (bins + 1,)."""
        return np.concatenate([[0.0], np.cumsum(np.diff(self.edges_s) * self.rps)])


def synthetic_curve(demand: Demand, start_at_s: float, duration_s: float, rng: np.random.Generator) -> Curve:
    """The curve of a demand's synthetic profile; its hours are those of the day that begins at `start_at_s` (UTC)."""
    profile = demand.synthetic
    assert profile is not None
    last_s = duration_s / demand.stretch
    switches_s = _switches(profile, last_s, rng) if isinstance(profile, Bursts) else np.zeros(0)
    edges_s = _grid(profile, last_s, switches_s)
    middle_s = (edges_s[:-1] + edges_s[1:]) / 2
    rps = _daily(profile, start_at_s + middle_s) * _noise(profile, middle_s, rng)
    if isinstance(profile, Flash):
        rps = rps * _flash(profile, middle_s)
    elif isinstance(profile, Bursts):
        rps = rps * (np.searchsorted(switches_s, middle_s) % 2)
    nothing = np.zeros_like(rps)
    return Curve(edges_s * demand.stretch, rps * demand.scale, nothing, nothing)


def recorded_curve(rates: Rates, demand: Demand, duration_s: float) -> Curve:
    """The curve of a rate trace, begun again when it ends. Raises ValueError for one that is repeated too often."""
    edges_s = np.append(rates.start_s, rates.start_s[-1] + rates.bin_s[-1])
    first_s, last_s = demand.start_s, demand.start_s + duration_s / demand.stretch
    rounds = math.floor(first_s / edges_s[-1]), math.ceil(last_s / edges_s[-1])
    if (rounds[1] - rounds[0]) * len(rates.rps) > MAX_BINS:
        raise ValueError(f"covers {edges_s[-1]:g} s and would be repeated {rounds[1] - rounds[0]:,} times; stretch it")
    starts = [rates.start_s + edges_s[-1] * number for number in range(*rounds)]
    whole_s = np.append(np.concatenate(starts), edges_s[-1] * rounds[1])
    bins = np.tile(np.arange(len(rates.rps)), rounds[1] - rounds[0])
    inside = (whole_s[1:] > first_s) & (whole_s[:-1] < last_s)
    bins, kept_s = bins[inside], np.clip(np.append(whole_s[:-1][inside], last_s), first_s, last_s)
    rps, inputs, outputs = (values[bins] for values in (rates.rps, rates.input_tokens, rates.output_tokens))
    return Curve((kept_s - first_s) * demand.stretch, rps * demand.scale, inputs, outputs)


def _grid(profile: Profile, last_s: float, switches_s: Floats) -> Floats:
    """Edges from 0 to `last_s`: a minute apart, closer where the profile changes faster."""
    extra = [switches_s]
    if isinstance(profile, Flash):
        start_s, full_s, fall_s, end_s = _corners(profile)
        slopes = ((start_s, full_s), (fall_s, end_s))
        extra = [np.linspace(a_s, b_s, int(min(1000.0, (b_s - a_s) / FLASH_GRID_S)) + 2) for a_s, b_s in slopes]
    edges_s = np.unique(np.concatenate([np.arange(0.0, last_s, GRID_S), [last_s], *extra]))
    kept: Floats = edges_s[edges_s <= last_s]
    return kept


def _daily(profile: Profile, at_s: Floats) -> Floats:
    """One wave a day, and less at the weekend; the mean of a weekday is `rps`."""
    wave = 1.0 + (profile.peak_to_mean - 1.0) * np.cos(2 * np.pi * (at_s - profile.peak_at_s) / DAY_S)
    weekday = np.floor((at_s - FIRST_MONDAY_S) % WEEK_S / DAY_S)
    rps: Floats = profile.rps * wave * np.where(weekday >= 5, profile.weekend, 1.0)
    return rps


def _noise(profile: Profile, at_s: Floats, rng: np.random.Generator) -> Floats:
    """A factor of mean 1 that wanders from knot to knot, lognormal with deviation `noise`."""
    if profile.noise == 0.0:
        return np.ones_like(at_s)
    knots = rng.standard_normal(int(at_s[-1] / NOISE_S) + 2)
    log = np.interp(at_s / NOISE_S, np.arange(len(knots)), profile.noise * knots)
    factor: Floats = np.exp(log - profile.noise**2 / 2)
    return factor


def _flash(profile: Flash, at_s: Floats) -> Floats:
    """The crowd's factor: a straight line up, a plateau, a straight line down."""
    return np.interp(at_s, _corners(profile), [1.0, profile.factor, profile.factor, 1.0])


def _corners(profile: Flash) -> tuple[float, float, float, float]:
    """Instants of its begin, its top, the end of its top and its end."""
    full_s = profile.at_s + profile.ramp_s
    return profile.at_s, full_s, full_s + profile.hold_s, full_s + profile.hold_s + profile.decay_s


def _switches(profile: Bursts, last_s: float, rng: np.random.Generator) -> Floats:
    """Instants at which work begins and ends, in turn, from second 0 on."""
    found: list[float] = []
    now_s = profile.first_at_s
    while now_s < last_s and len(found) < MAX_BINS:
        found += [now_s, now_s + rng.exponential(profile.on_s)]
        now_s = found[-1] + rng.exponential(profile.off_s)
    return np.array(found)
