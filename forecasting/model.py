"""The forecaster: quantiles of the maximum of a rate over a window that begins after the lead.

Pure; may not import a clock, a random generator, or anything that does I/O. Incremental and vectorised over services;
`State` is a dictionary of arrays that is never changed in place and can be written and read bit for bit.

1. Members give paths; the maximum of a path over the window is that member's centre.
2. A trained combiner (recursive ridge regression towards the plain mean) gives one centre more.
3. Every centre has quantiles of its own residuals, at two memories (`bands`).
4. The bands are mixed by exponential weights on pinball loss, per lead and quantile.
5. Quantile tracking (Gibbs & Candès 2021; Angelopoulos et al. 2023) moves each quantile by what was covered of late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import bands, members
from .members import Floats, Grid, State

COMBINED = (*members.NAMES, "mean", "trained")
MEMORIES_DAYS = (0.5, 2.0)
PRIOR_SIGMA, PRIOR_WEIGHT = 0.15, 10.0
RIDGE, TRAIN_DAYS = 1.0, 3.0
WEIGHT_RATE, WEIGHT_DAYS = 0.1, 2.0
TRACK_RATE = 0.001
BY_AGE = ("centres", "spoken")  # arrays whose first axis is bins ago, not services
CEILING = 3.0  # times the largest rate of a week: nothing is forecast beyond


@dataclass(frozen=True)
class Forecaster:
    """What is asked for; knows nothing. Leads and commitment are seconds; quantiles rise.

    `windows` are the (first, last) bins ahead of each lead's window, both inside [lead, lead + commitment] and at least
    one; `horizon` is how many bins ahead any of them reaches.
    """

    bin_s: float
    leads_s: Sequence[float]
    commitment_s: Sequence[float] | float
    quantiles: Sequence[float] = (0.5, 0.9, 0.95, 0.99)
    season_s: float = 86_400.0
    grid: Grid = field(init=False)
    windows: tuple[tuple[int, int], ...] = field(init=False)
    horizon: int = field(init=False)
    form: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", Grid(self.bin_s, self.season_s))
        object.__setattr__(self, "windows", self._windows())
        object.__setattr__(self, "horizon", max(last for _, last in self.windows))
        object.__setattr__(self, "form", {key: _but_rows(key, value) for key, value in self.empty(1).items()})

    def _windows(self) -> tuple[tuple[int, int], ...]:
        held = self.commitment_s if isinstance(self.commitment_s, Sequence) else [self.commitment_s] * len(self.leads_s)
        rows = []
        for lead, commitment in zip(self.leads_s, held, strict=True):
            first = max(1, int(np.ceil(lead / self.bin_s - 1e-9)))
            rows.append((first, max(first, int((lead + commitment) / self.bin_s + 1e-9))))
        return tuple(rows)

    def empty(self, n: int) -> State:
        """State of `n` series that nothing is known of."""
        leads, parts, experts = len(self.leads_s), len(members.NAMES), len(COMBINED)
        sigma = PRIOR_SIGMA * np.sqrt(np.array([last for _, last in self.windows]) * self.bin_s / 600.0)
        cells = bands.prior(np.broadcast_to(sigma[:, None, None], (leads, experts, len(MEMORIES_DAYS))), PRIOR_WEIGHT)
        levels = np.asarray(self.quantiles, dtype=np.float64)
        rows = (n, leads)
        return {f"member.{key}": value for key, value in members.empty(n, self.grid).items()} | {
            "index": np.array([-1.0]),
            "rates": np.full((n, self.horizon), np.nan),
            "highest": np.zeros((n, members.WEEK + 1)),
            "centres": np.full((self.horizon, *rows, experts), np.nan, dtype=np.float32),
            "spoken": np.full((self.horizon, *rows, len(levels)), np.nan, dtype=np.float32),
            "gram": np.zeros((*rows, parts - 1, parts - 1)),
            "moment": np.zeros((*rows, parts - 1)),
            "cells": np.tile(cells, (n, 1, 1, 1, 1)),
            "edges": np.tile(bands.edges(cells, self.quantiles), (n, 1, 1, 1, 1)),
            "regret": np.zeros((*rows, len(levels), experts * len(MEMORIES_DAYS))),
            "loss": np.zeros((*rows, len(levels))),
            "offset": np.zeros((*rows, len(levels))),
            "width": np.zeros(rows),
            "covered": np.tile(levels, (*rows, 1)),
            "windows": np.zeros(rows),
            "answer": np.full((*rows, len(levels)), np.nan),
        }

    def update(self, state: State, rate: Floats, index: int) -> State:
        """The state after bin `index` (its start ÷ bin_s) with rates [n]; NaN is not seen. Bins left out are not seen.

        Raises ValueError for a bin that is not after the last one.
        """
        before = int(state["index"][0])
        if before >= 0 and index <= before:
            raise ValueError(f"bin {index} does not come after bin {before}")
        if before >= 0 and index > before + 1:
            state = self._pass(state, before, index)
        doubt = members.doubtful(_part(state, "member."), rate)
        rate = np.where(doubt, np.nan, rate)
        new = dict(state)
        member = members.update(_part(state, "member."), rate, index, self.grid)
        member["doubted"] = doubt.astype(np.float64)
        new |= {f"member.{key}": value for key, value in member.items()}
        new["index"] = np.array([float(index)])
        new["rates"] = np.concatenate([state["rates"][:, 1:], rate[:, None]], axis=1)
        new["highest"] = self._highest(state["highest"], rate, index, before)
        self._learn(new)
        self._speak(new, member, index, ~np.isnan(rate))
        return new

    def forecast(self, state: State) -> Floats:
        """[n, leads, quantiles] of the maximum over each lead's window, in the rate's own unit; NaN before any bin."""
        return np.maximum(0.0, state["answer"])

    def member(self, state: Mapping[str, npt.NDArray[Any]], row: int, lead: int) -> str:
        """The member that carries the most weight at the highest quantile but one (or the only one)."""
        weight = _softmax(WEIGHT_RATE * state["regret"][row, lead, max(0, len(self.quantiles) - 2)])
        return COMBINED[int(weight.reshape(len(COMBINED), -1).sum(axis=-1).argmax())]

    def fits(self, state: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Whether the state is one of this forecaster's, and not of another with other leads, bins or members."""
        return {key: _but_rows(key, value) for key, value in state.items()} == self.form

    def joined(self, state: State, n: int) -> State:
        """The state with `n` more series at the end, which nothing is known of."""
        fresh = self.empty(n)
        if not state:
            return fresh
        rows = {key: (state[key], value) for key, value in fresh.items() if key != "index"}
        axis = {key: 1 if key in BY_AGE else 0 for key in rows}
        return {"index": state["index"]} | {key: np.concatenate(pair, axis=axis[key]) for key, pair in rows.items()}

    def _pass(self, state: State, before: int, index: int) -> State:
        """Bins that nobody saw, at once: windows that they cut are never learnt, and their slots are unknown."""
        grid = self.grid
        member = {key: value.copy() for key, value in _part(state, "member.").items()}
        missed = min(index - before - 1, grid.remembered * grid.per_slot)
        hour = min(missed, grid.per_hour)
        member["hour"] = np.concatenate(
            [member["hour"][:, hour:], np.full((len(member["last"]), hour), np.nan)], axis=1
        )
        slots = np.arange((index - missed) // grid.per_slot, (index - 1) // grid.per_slot + 1)
        member["week"][:, slots % grid.remembered] = np.nan
        if missed >= grid.per_slot:
            member["slot_sum"][:], member["slot_count"][:] = 0.0, 0.0
        gone = min(missed, self.horizon)
        new = state | {f"member.{key}": value for key, value in member.items()}
        for key, axis in (("rates", 1), ("centres", 0), ("spoken", 0)):
            kept = np.delete(state[key], np.arange(gone), axis=axis)
            shape = list(state[key].shape)
            shape[axis] = gone
            new[key] = np.concatenate([kept, np.full(shape, np.nan, dtype=kept.dtype)], axis=axis)
        return new

    def _highest(self, kept: Floats, rate: Floats, index: int, before: int) -> Floats:
        """[n, 8] largest rate of each of the last seasons."""
        day, then = index // self.grid.season, max(before, 0) // self.grid.season
        kept = kept.copy()
        for d in range(max(then + 1, day - members.WEEK), day + 1):
            kept[:, d % (members.WEEK + 1)] = 0.0
        k = day % (members.WEEK + 1)
        kept[:, k] = np.fmax(kept[:, k], rate)
        return kept

    def _learn(self, new: State) -> None:
        """What the windows that ended with this bin teach, all leads at once."""
        keys = ("gram", "moment", "cells", "edges", "regret", "loss", "offset", "width", "covered", "windows")
        new |= {key: new[key].copy() for key in keys}
        tops = [new["rates"][:, self.horizon - 1 - (last - first) :].max(axis=1) for first, last in self.windows]
        real = members.log_rate(_part(new, "member."), np.stack(tops)).T
        said_at = self.horizon - np.array([last for _, last in self.windows]), slice(None), np.arange(len(self.windows))
        centres, spoken = (np.swapaxes(new[key][said_at], 0, 1).astype(np.float64) for key in BY_AGE)
        day = self.grid.season
        self._learn_weights(new, real, centres)
        _learn_trained(new, real, centres, 0.5 ** (1.0 / (TRAIN_DAYS * day)))
        fade = 0.5 ** (1.0 / (np.array(MEMORIES_DAYS) * day))
        bands.learn(new["cells"], (real[..., None] - centres)[..., None], fade)
        self._track(new, real, spoken)
        self._refresh(new)

    def _refresh(self, new: State) -> None:
        """Quantiles of the residuals, each lead and memory once a slot: they move slowly, and cost most of a bin."""
        turn, turns = int(new["index"][0]) % self.grid.per_slot, self.grid.per_slot
        parts = [(k, j) for k in range(len(self.windows)) for j in range(len(MEMORIES_DAYS))]
        due = [part for place, part in enumerate(parts) if place * turns // len(parts) == turn]
        if due:
            leads, memories = (np.array(side) for side in zip(*due, strict=True))
            cells = new["cells"][:, leads, :, memories]  # the parts first, then the services
            new["edges"][:, leads, :, memories] = bands.edges(cells, self.quantiles)

    def _learn_weights(self, new: State, real: Floats, centres: Floats) -> None:
        """Discounted regret of every expert per quantile, in units of the mixture's mean loss."""
        qs = np.asarray(self.quantiles, dtype=np.float64)[:, None]
        said = np.swapaxes(self._bands(new, centres), -1, -2)
        mixed = (_softmax(WEIGHT_RATE * new["regret"]) * said).sum(axis=-1, keepdims=True)
        ok = ~np.isnan(mixed[..., 0] + real[..., None])
        losses, mine = (_pinball(real[..., None, None], np.where(ok[..., None], f, 0.0), qs) for f in (said, mixed))
        mine = mine[..., 0]
        step = np.where(new["loss"] > 0, 0.02, 1.0)
        new["loss"] = np.where(ok, new["loss"] + step * (mine - new["loss"]), new["loss"])
        fade = 0.5 ** (1.0 / (WEIGHT_DAYS * self.grid.season))
        gain = (mine[..., None] - losses) / np.maximum(new["loss"], 1e-9)[..., None]
        new["regret"] = np.where(ok[..., None], fade * new["regret"] + np.clip(gain, -20.0, 20.0), new["regret"])

    def _bands(self, state: State, centres: Floats) -> Floats:
        """[n, leads, experts, quantiles] what every centre says with every memory of its residuals."""
        said = centres[..., None, None] + state["edges"]
        return said.reshape(*centres.shape[:2], -1, len(self.quantiles))

    def _track(self, new: State, real: Floats, spoken: Floats) -> None:
        """Moves each quantile up after a miss and down after a hit, so that misses come as often as they should."""
        qs = np.asarray(self.quantiles, dtype=np.float64)
        ok = ~np.isnan(spoken[..., 0] + real)
        width = np.where(ok, spoken[..., -1] - spoken[..., 0], 0.0)
        step = np.where(new["width"] > 0, 0.02, 1.0)
        new["width"] = np.where(ok, new["width"] + step * (width - new["width"]), new["width"])
        new["windows"] = new["windows"] + ok
        hit = (real[..., None] <= spoken).astype(np.float64)
        move = TRACK_RATE * new["width"][..., None] * (qs - hit)
        ok = ok[..., None]
        new["offset"] = np.where(ok, np.maximum(0.0, new["offset"] + move), new["offset"])
        new["covered"] = np.where(ok, new["covered"] + (hit - new["covered"]) / 50.0, new["covered"])

    def _speak(self, new: State, member: State, index: int, seen: npt.NDArray[np.bool_]) -> None:
        """Centres and quantiles from this bin; kept for learning only where the bin itself was seen."""
        ways = members.paths(member, index, self.horizon, self.grid)
        centres = np.stack([ways[:, :, first - 1 : last].max(axis=2) for first, last in self.windows], axis=-1)
        centres = np.moveaxis(centres, 0, -1)  # [n, leads, members]
        last = member["last"][:, None, None]
        centres = np.clip(centres, last - bands.LARGEST, last + bands.LARGEST)
        mean = centres.mean(axis=-1)
        trained = np.clip(_trained(new, centres, mean), centres.min(axis=-1), centres.max(axis=-1))
        centres = np.concatenate([centres, mean[..., None], trained[..., None]], axis=-1)
        said = self._bands(new, centres)
        weight = _softmax(WEIGHT_RATE * new["regret"])
        spoken = np.sort((weight * np.moveaxis(said, -1, -2)).sum(axis=-1) + new["offset"], axis=-1)
        held = np.sort(centres[:, :, 0, None] + new["edges"][:, :, 0, -1], axis=-1)  # the last value and its own band
        burst = (member["alarm"] > 0)[:, None, None]
        spoken = np.where(burst, np.maximum(spoken, held), spoken)
        top = CEILING * np.fmax(new["highest"].max(axis=1), 0.0)[:, None, None]
        new["answer"] = np.minimum(np.exp(spoken) - members.floor(member)[:, None, None], top)
        for key, value in (("centres", centres), ("spoken", spoken)):
            row = np.where(seen[:, None, None], value, np.nan).astype(np.float32)
            new[key] = np.concatenate([new[key][1:], row[None]], axis=0)


def _but_rows(key: str, value: npt.NDArray[Any]) -> tuple[int, ...]:
    """The array's shape without the axis of the services."""
    axis = 1 if key in BY_AGE else 0
    return value.shape if key == "index" else value.shape[:axis] + value.shape[axis + 1 :]


def _part(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _softmax(values: Floats) -> Floats:
    raised = np.exp(values - values.max(axis=-1, keepdims=True))
    out: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return out


def _pinball(real: Floats, said: Floats, qs: Floats) -> Floats:
    """Of rates given as logarithms, as a fraction of what was real."""
    off = 1.0 - np.exp(np.clip(said - real, -20.0, 5.0))
    out: Floats = np.maximum(qs * off, (qs - 1.0) * off)
    return out


def _learn_trained(new: State, real: Floats, centres: Floats, fade: float) -> None:
    """Sufficient statistics of the ridge regression of what was real on the members, both against the last value."""
    parts = centres[..., : len(members.NAMES)]
    x = parts[..., 1:] - parts[..., :1]
    y = np.clip(real - parts.mean(axis=-1), -0.5, 0.5)
    ok = ~np.isnan(y)
    x, y = np.where(ok[..., None], x, 0.0), np.where(ok, y, 0.0)
    fades = np.where(ok, fade, 1.0)[..., None]
    new["gram"] = new["gram"] * fades[..., None] + x[..., :, None] * x[..., None, :]
    new["moment"] = new["moment"] * fades + x * y[..., None]


def _trained(state: State, centres: Floats, mean: Floats) -> Floats:
    """[n, leads] the mean of the members plus what regression says of their differences from the last value."""
    parts = centres[..., : len(members.NAMES)]
    x = parts[..., 1:] - parts[..., :1]
    size = x.shape[-1]
    spread = np.trace(state["gram"], axis1=-2, axis2=-1) / size
    ridge = (RIDGE * spread + 1e-6)[..., None, None] * np.eye(size)
    weight = np.linalg.solve(state["gram"] + ridge, state["moment"][..., None])[..., 0]
    out: Floats = mean + (x * weight).sum(axis=-1)
    return out
