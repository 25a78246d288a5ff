"""The members: simple models of one log rate each, for many services at once, one bin after another.

Pure; may not import a clock, a random generator, or anything that does I/O. All state is in flat arrays, rows are
services. A member only ever says where the rate goes; how far it may be off is measured (`forecasting.bands`).

Sources: damped trend (Gardner & McKenzie 1985), theta (Assimakopoulos & Nikolopoulos 2000, as exponential smoothing
with half of the drift: Hyndman & Billah 2003); the rest is the level-and-profile arithmetic of operations practice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NAMES = (
    "last_value",
    "level_profile",
    "last_profile",
    "seasonal_ratio",
    "weekly_ratio",
    "holt_winters",
    "theta",
    "clock_hour",
    "burst",
)
SLOT_S = 600.0  # resolution of what is remembered of a day and a week
HOUR_S = 3600.0
WEEK = 7  # seasons
FLOOR = 0.02  # of the mean rate, at least, is added before the logarithm: a zero is low, not minus infinity
PARTIAL = 0.5  # of the rate before a gap: a bin next to the gap with less was seen in part
PROFILE_STEP = 0.25
CYCLE_STEP = 0.02
LEVEL_STEP, TREND_STEP, DAMPING = 0.5, 0.1, 0.9
THETA_STEP = 0.3
BURST_DAMPING = 0.7
BURST, BURST_LEAST, ERROR_STEP = 5.0, 0.02, 0.02  # a burst is a rise of five mean errors


@dataclass(frozen=True, slots=True)
class Grid:
    """The clock of a set of series: bins of `bin_s` seconds, a season of `season_s`."""

    bin_s: float
    season_s: float

    @property
    def per_slot(self) -> int:
        """Bins in one slot of the profile."""
        return max(1, round(SLOT_S / self.bin_s))

    @property
    def slots(self) -> int:
        """Slots in one season, at least one."""
        return max(1, round(self.season_s / (self.bin_s * self.per_slot)))

    @property
    def per_hour(self) -> int:
        """Bins in an hour, at least two: how far the members' local level looks back."""
        return max(2, round(HOUR_S / self.bin_s))

    @property
    def season(self) -> int:
        """Bins in a season."""
        return self.slots * self.per_slot

    @property
    def remembered(self) -> int:
        """Slots kept: a week, and the hour before it."""
        return WEEK * self.slots + self.per_hour // self.per_slot + 2


State = dict[str, npt.NDArray[Any]]


def empty(n: int, grid: Grid) -> State:
    """State of `n` series that nothing is known of. NaN is "not seen"."""
    nan = np.full
    return {
        "seen": np.zeros(n),
        "mean": np.zeros(n),
        "noise": np.zeros(n),
        "rate": nan(n, np.nan),
        "last": nan(n, np.nan),
        "doubted": np.zeros(n),
        "hour": nan((n, grid.per_hour), np.nan),
        "slot_sum": np.zeros(n),
        "slot_count": np.zeros(n),
        "week": nan((n, grid.remembered), np.nan),
        "base": nan(n, np.nan),
        "profile": nan((n, grid.slots), np.nan),
        "level": nan(n, np.nan),
        "trend": np.zeros(n),
        "error": np.zeros(n),
        "alarm": np.zeros(n),
        "smooth": nan(n, np.nan),
        "drift": np.zeros(n),
        "cycle": np.zeros((n, grid.per_hour)),
        "cycle_seen": np.zeros((n, grid.per_hour)),
    }


def floor(state: State) -> Floats:
    """[n] what is added to a rate before its logarithm: the mean change from bin to bin, at least `FLOOR`. Far above it
    errors are factors, as those of large services are; near it they are amounts, as those of counts are.
    """
    out: Floats = np.maximum(np.maximum(FLOOR * state["mean"], state["noise"]), 1e-9)
    return out


def log_rate(state: State, rate: Floats) -> Floats:
    """[n] logarithm of a rate (NaN stays NaN), finite at zero."""
    out: Floats = np.log(np.maximum(rate, 0.0) + floor(state))
    return out


def doubtful(state: State, rate: Floats) -> npt.NDArray[np.bool_]:
    """[n] first bins after a gap with less than half of what was before it: measured for a part of the bin only, so far
    as anyone knows. The next bin is believed whatever it says.
    """
    after_gap = np.isnan(state["hour"][:, -1]) & (state["doubted"] == 0.0) & (state["seen"] > 0)
    with np.errstate(invalid="ignore"):
        low = log_rate(state, rate) < state["last"] + np.log(PARTIAL)
    out: npt.NDArray[np.bool_] = after_gap & low
    return out


def update(state: State, rate: Floats, index: int, grid: Grid) -> State:
    """The state after bin number `index` (its start ÷ bin_s) with rates [n]; NaN is a bin that nobody saw."""
    new = {key: value.copy() for key, value in state.items()}
    ok = ~np.isnan(rate)
    seen = new["seen"] + ok
    step = np.where(ok, 1.0 / np.clip(seen, 1.0, grid.season), 0.0)
    new["mean"] += step * (np.where(ok, rate, 0.0) - new["mean"])
    moved = np.where(ok & ~np.isnan(new["rate"]), np.abs(rate - new["rate"]), new["noise"])
    new["noise"] += step * (moved - new["noise"])
    new["rate"] = np.where(ok, rate, new["rate"])
    new["seen"] = seen
    z = log_rate(new, rate)
    _drop_partial(new, ok)
    new["hour"] = np.concatenate([new["hour"][:, 1:], z[:, None]], axis=1)
    _learn_profile(new, z, ok, step, index, grid)
    _learn_trends(new, z, ok, index, grid)
    new["last"] = np.where(ok, z, new["last"])
    return new


def _drop_partial(new: State, ok: npt.NDArray[np.bool_]) -> None:
    """Where a gap begins after a bin of less than half of the one before it, that bin is no longer the last value."""
    hour = new["hour"]
    with np.errstate(invalid="ignore"):
        cut = ~ok & (hour[:, -1] < hour[:, -2] + np.log(PARTIAL))
    new["last"] = np.where(cut, hour[:, -2], new["last"])
    hour[:, -1] = np.where(cut, np.nan, hour[:, -1])


def _learn_profile(new: State, z: Floats, ok: npt.NDArray[np.bool_], step: Floats, index: int, grid: Grid) -> None:
    """Base level, and at the end of each slot its mean in the week's memory and the day's profile."""
    new["base"] = np.where(ok, np.where(np.isnan(new["base"]), z, new["base"] + step * (z - new["base"])), new["base"])
    new["slot_sum"] += np.where(ok, z, 0.0)
    new["slot_count"] += ok
    if (index + 1) % grid.per_slot:
        return
    slot = index // grid.per_slot
    have = new["slot_count"] > 0
    mean = np.where(have, new["slot_sum"] / np.maximum(new["slot_count"], 1.0), np.nan)
    new["week"][:, slot % grid.remembered] = mean
    s = slot % grid.slots
    known = new["profile"][:, s]
    shape = mean - new["base"]
    new["profile"][:, s] = np.where(
        have, np.where(np.isnan(known), shape, known + PROFILE_STEP * (shape - known)), known
    )
    new["slot_sum"][:] = 0.0
    new["slot_count"][:] = 0.0


def _learn_trends(new: State, z: Floats, ok: npt.NDArray[np.bool_], index: int, grid: Grid) -> None:
    """Damped Holt-Winters and theta on the deseasonalised log rate; the cycle within the clock hour."""
    flat = z - season(new, np.array([index]), grid)[:, 0]
    first = ok & np.isnan(new["level"])
    for key in ("level", "smooth"):
        new[key] = np.where(first, flat, new[key])
    on = ok & ~first
    before, slope = new["level"], DAMPING * new["trend"]
    level = LEVEL_STEP * flat + (1.0 - LEVEL_STEP) * (before + slope)
    _watch(new, np.where(on, flat - before - slope, np.nan), grid)
    new["level"] = np.where(on, level, before)
    new["trend"] = np.where(on, TREND_STEP * (level - before) + (1.0 - TREND_STEP) * slope, new["trend"])
    smooth = new["smooth"] + THETA_STEP * (flat - new["smooth"])
    moved = (smooth - new["smooth"] - new["drift"]) / grid.season
    new["drift"] = np.where(on, new["drift"] + moved, new["drift"])
    new["smooth"] = np.where(on, smooth, new["smooth"])
    k = index % grid.per_hour
    off = z - nanmean(new["hour"])
    learn = ok & (new["seen"] >= grid.per_hour)
    new["cycle_seen"][:, k] += learn
    rate = np.maximum(CYCLE_STEP, 1.0 / np.maximum(new["cycle_seen"][:, k], 1.0))
    new["cycle"][:, k] += np.where(learn, rate * (off - new["cycle"][:, k]), 0.0)


def _watch(new: State, surprise: Floats, grid: Grid) -> None:
    """Raises the alarm for an hour when a bin lies far above what was expected of it; what is far is measured."""
    ok = ~np.isnan(surprise)
    known = new["seen"] > grid.per_hour
    size = np.where(ok, np.abs(surprise), 0.0)
    burst = ok & known & (surprise > BURST * np.maximum(new["error"], BURST_LEAST))
    new["alarm"] = np.where(burst, float(grid.per_hour), np.maximum(0.0, new["alarm"] - 1.0))
    step = np.where(ok, np.maximum(ERROR_STEP, 1.0 / np.maximum(new["seen"], 1.0)), 0.0)
    usual = BURST * np.maximum(new["error"], BURST_LEAST)
    new["error"] = new["error"] + step * (np.minimum(size, usual) - new["error"])


def season(state: State, bins: npt.NDArray[np.int64], grid: Grid) -> Floats:
    """[n, bins] the day's profile, smoothed over three slots and interpolated between them; 0 until a whole season
    is known.
    """
    known: npt.NDArray[np.bool_] = ~np.asarray(np.isnan(state["profile"]).any(axis=1))
    if not known.any():
        return np.zeros((len(known), len(bins)))
    p = np.where(known[:, None], state["profile"], 0.0)
    p = (np.roll(p, 1, axis=1) + p + np.roll(p, -1, axis=1)) / 3.0
    return _between(p, bins, grid)


def _between(slots: Floats, bins: npt.NDArray[np.int64], grid: Grid) -> Floats:
    """[n, bins] values of a ring of slots at bins: linear between the slots' middles."""
    at = (bins + 0.5) / grid.per_slot - 0.5
    low = np.floor(at).astype(np.int64)
    share = at - low
    size = slots.shape[1]
    left = slots[:, low % size]
    if grid.per_slot == 1:
        return left
    out: Floats = (1.0 - share) * left + share * slots[:, (low + 1) % size]
    return out


def nanmean(values: Floats) -> Floats:
    """[n] row means without NaN; NaN where a row has nothing."""
    ok = ~np.isnan(values)
    count = ok.sum(axis=1)
    out: Floats = np.where(count > 0, np.where(ok, values, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)
    return out


def paths(state: State, index: int, horizon: int, grid: Grid) -> Floats:
    """[members, n, horizon] log rates of the bins after `index`; a member that cannot speak repeats the last value."""
    ahead = index + 1 + np.arange(horizon)
    back = index - np.arange(grid.per_hour)[::-1]
    steps = np.arange(1, horizon + 1)
    hour, last = state["hour"], state["last"][:, None]
    profile, past = season(state, ahead, grid), season(state, back, grid)
    flat = nanmean(hour - past)[:, None]
    now = season(state, np.array([index]), grid)
    damped = np.cumsum(DAMPING**steps)
    cycle = np.where((state["cycle_seen"] > 3).all(axis=1, keepdims=True), state["cycle"], 0.0)
    calm = nanmean((hour - cycle[:, back % grid.per_hour])[:, grid.per_hour // 2 :])[:, None]
    stacked = np.stack(
        [
            np.broadcast_to(last, profile.shape),
            flat + profile,
            last - now + profile,
            _lagged(state, ahead, back, grid.slots, grid),
            _lagged(state, ahead, back, WEEK * grid.slots, grid),
            state["level"][:, None] + state["trend"][:, None] * damped + profile,
            state["smooth"][:, None] + 0.5 * state["drift"][:, None] * steps + profile,
            calm + cycle[:, ahead % grid.per_hour],
            last + _slope(hour)[:, None] * np.cumsum(BURST_DAMPING**steps),
        ]
    )
    out: Floats = np.where(np.isnan(stacked), last, stacked)
    return out


def _lagged(state: State, ahead: npt.NDArray[np.int64], back: npt.NDArray[np.int64], slots: int, grid: Grid) -> Floats:
    """The same bins so many slots ago, times how the last hour compares with the same hour then."""
    shift = slots * grid.per_slot
    if shift < len(ahead):  # a season shorter than the horizon has not happened yet
        return np.full((len(state["last"]), len(ahead)), np.nan)
    then = _between(state["week"], ahead - shift, grid)
    return then + nanmean(state["hour"] - _between(state["week"], back - shift, grid))[:, None]


def _slope(hour: Floats) -> Floats:
    """[n] least-squares slope of the last hour per bin; 0 with fewer than four bins seen."""
    ok = ~np.isnan(hour)
    count = np.maximum(ok.sum(axis=1), 1)
    at = np.where(ok, np.arange(hour.shape[1]), 0.0)
    centred = np.where(ok, at - (at.sum(axis=1) / count)[:, None], 0.0)
    spread = (centred**2).sum(axis=1)
    slope = (centred * np.where(ok, hour, 0.0)).sum(axis=1) / np.maximum(spread, 1e-12)
    out: Floats = np.where(ok.sum(axis=1) >= 4, slope, 0.0)
    return out
