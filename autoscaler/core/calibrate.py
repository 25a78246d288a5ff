"""The iteration law as the engines themselves show it: constants learnt, drifts and slow nodes named.

Pure; may not do I/O, read a clock or draw a random number. Called by `core.learn` for every observation.

Each engine gives two readings of `serve_apps.timing`, both linear in the catalogue's constants times five factors
(`CONSTANTS`; the expert-coverage term of a mixture of experts stays as it is in the catalogue). With B sequences and K
thousand KV tokens in a step, n prompts of L tokens prefilled over N decode steps, and h = the share of time in which
the engine decodes at all:

    token time    = a + b B + c K  +  h n/N (g + L/r)          a prefill delays everyone who decodes
    time to first = j h (a + b B + c K)  +  (1 + m)(g + L/r)      j steps a prompt, shared with m others' prompts

Residuals are relative. One observation of an application is a Kalman step: Huber weights, noise that engines share (so
that a hundred engines are not a hundred witnesses), and a covariance that relaxes towards the catalogue's own
uncertainty over a day of work, never over time without work. A two-sided CUSUM of the standardised mean residual finds
drifts; after an alarm the law is learnt anew, and the constant that then has moved most is named. A node is compared
with the other nodes of the same applications at the same moment, so that a slow fleet makes no node slow.

Sources: R. Kalman 1960; P. Huber 1964; E. Page 1954.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import exp, log
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from serve_apps.timing import Timing, decode_step_s, prefill_s
from serve_apps.wire import app_name

from .beliefs import Beliefs, Calibration, Drift, Pace
from .model import EngineLoad, Measured, Replica, Shape
from .reasons import Reason, ReasonCode, why

F8 = NDArray[np.float64]

CONSTANTS = ("decode_base", "batch_slope", "kv_slope", "prefill_fixed", "prefill_rate")
ENGINES_PER_TICK = 800  # of a larger fleet every tick reads a part, in turns
MIN_STEPS = 10.0  # fewer decode steps say little of a mean
KV_FULL = 0.95
FACTOR_MIN, FACTOR_MAX = 0.1, 10.0

PRIOR_SPREAD_MIN = 0.3  # a catalogue that is sure of itself can still be told otherwise
NOISE = (0.03, 0.08)  # relative, of one engine's token time and prefill time over one window
SAMPLING = (0.1, 0.15)  # of one step, of one request: shrinks with the root of their number
CROWDING = 0.6  # relative error of the share that other prompts have in a prefill
COMMON_NOISE = 0.02  # of the law itself, the same for all engines of an application
RELAX_S = 86_400.0
HUBER = 1.5
SETTLED_TICKS = 12
CUSUM_SLACK, CUSUM_ALARM, CUSUM_CLIP = 0.5, 6.0, 3.0
DRIFT_MIN, DRIFT_SD = 0.07, 2.0  # the least log of a change that is called one, and how clear it must be

SLOW_AT, SLOW_OVER = 1.25, 1.12  # named from here on, and cleared below there
PACE_TICKS, PACE_MEMORY = 4, 12

QUANTILE_Z = 0.84  # decisions use the 80th percentile of the predicted step time,
STILL = 0.03
MARGIN_WIDTH_MAX = 0.15  # but no more than this width: more would plan for limits that are missed by doubt alone
CHUNK_TOKENS = 8192.0  # prompt tokens per step
TINY_S = 1e-9


# ---- what decisions ask ---------------------------------------------------------------------------------------------
def timing_width(beliefs: Beliefs, shape: Shape) -> float:
    """Relative standard deviation of a predicted decode step of this shape."""
    known = _known(beliefs, shape)
    return shape.uncertainty if known is None else known.width


def timing_for(beliefs: Beliefs, shape: Shape, *, z: float = QUANTILE_Z) -> Timing:
    """The shape's timing as learnt, every time at `z` standard deviations above its mean (0: the mean itself)."""
    known = _known(beliefs, shape)
    if known is None:
        return slower(shape.timing, _margin(shape.uncertainty, z))
    return slower(known.timing, _margin(known.width, z), _margin(known.prefill_width, z))


def _margin(width: float, z: float) -> float:
    return 1.0 + z * min(width, MARGIN_WIDTH_MAX)


def reasons_for(beliefs: Beliefs, shape: Shape) -> tuple[Reason, ...]:
    """What was learnt of the shape, with the figures that `timing_for` used; nothing before the first reading."""
    known = _known(beliefs, shape)
    if known is None:
        return ()
    named = dict(zip(CONSTANTS, _factors(known), strict=True))
    learnt = why(ReasonCode.CALIBRATED, width=known.width, ticks=known.ticks, **named)
    if known.drift is None:
        return (learnt,)
    moved = known.drift
    return (learnt, why(ReasonCode.DRIFTED, moved.constant, ratio=moved.ratio, at_s=moved.at_s))


def _factors(known: Calibration) -> tuple[float, ...]:
    """What the constants in use are of the prior's (1 where the prior has none)."""
    pairs = zip(_constants(known.timing)[:5], _constants(known.prior)[:5], strict=True)
    return tuple(used / prior if prior > 0.0 else 1.0 for used, prior in pairs)


def slow_instances(beliefs: Beliefs) -> dict[str, float]:
    """How many times longer each instance that was named slow takes for a token than others of its applications."""
    return {key: exp(pace.log_ratio) for key, pace in beliefs.paces.items() if pace.slow}


@lru_cache(maxsize=4096)  # asked several times a tick; what was learnt reaches decisions in steps
def slower(timing: Timing, decode: float, prefill: float | None = None) -> Timing:
    """`timing` with its decode steps `decode` times as long and its prefills `prefill` times (default: the same)."""
    prefill = decode if prefill is None else prefill
    if decode == prefill == 1.0:
        return timing
    return replace(
        timing,
        a_s=timing.a_s * decode,
        b_s_per_seq=timing.b_s_per_seq * decode,
        c_s_per_ktoken=timing.c_s_per_ktoken * decode,
        moe_w_s=timing.moe_w_s * decode,
        prefill_fixed_s=timing.prefill_fixed_s * prefill,
        prefill_tps=timing.prefill_tps / prefill,
    )


def _known(beliefs: Beliefs, shape: Shape) -> Calibration | None:
    """What was learnt from this very prior: a changed catalogue begins anew."""
    known = beliefs.calibrations.get(app_name(shape.service, shape.variant))
    if known is None or not (known.prior is shape.timing or known.prior == shape.timing):
        return None
    return known


# ---- readings -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Readings:
    """Warm and unsaturated engines of this tick, one row each, ordered by application: `app` indexes `shapes`, `cell`
    numbers (application, instance), `instances` names each cell's instance. `seen` (rows, 7): token time, batch, KV
    tokens, steps, prefill time (0: none), prompt tokens, prompts. `laws` (apps, 7): the catalogue's five constants,
    the expert term's time, and the fraction of experts that a token leaves idle.
    """

    shapes: list[Shape]
    laws: F8
    app: NDArray[np.intp]
    cell: NDArray[np.intp]
    instances: list[str]
    seen: F8


def observe(beliefs: Beliefs, engines: Sequence[EngineLoad], ready: Mapping[str, Replica], at_s: float) -> Beliefs:
    """The beliefs after these engines' windows. `ready`: the replicas that serve, by id."""
    turns = -(-len(engines) // ENGINES_PER_TICK)
    if turns > 1:
        engines = engines[beliefs.turn % turns :: turns]
        beliefs = replace(beliefs, turn=beliefs.turn + 1)
    read = _read(beliefs, engines, ready)
    if read is None:
        return beliefs
    priors = [beliefs.calibrations.get(app_name(s.service, s.variant)) for s in read.shapes]
    known = [_start(s) if c is None or c.prior != s.timing else c for s, c in zip(read.shapes, priors, strict=True)]
    factors, cov = np.array([c.factors for c in known]), np.array([c.cov for c in known]).reshape(-1, 5, 5)
    terms, offset, got, noise = _law(read)
    app = np.repeat(read.app, 2)  # a decode and a prefill row of each engine
    predicted = np.maximum(offset + (terms * factors[app]).sum(axis=1), TINY_S)
    share = terms / predicted[:, None]
    residual = np.minimum(np.maximum(got / predicted - 1.0, -0.9), 3.0)  # np.clip takes as long as all of this
    paces, slow, named = _paces(beliefs, read, residual[0::2])
    sums = _sums(app, share, residual, noise, cov, np.repeat(slow, 2))
    learnt = _step(read, known, factors, cov, sums, named, at_s)
    calibrations = beliefs.calibrations | {app_name(c[0].service, c[0].variant): c[1] for c in learnt}
    return replace(beliefs, calibrations=calibrations, paces=paces)


def _start(shape: Shape) -> Calibration:
    spread = max(shape.uncertainty, PRIOR_SPREAD_MIN)
    cov = tuple(float(x) for x in (spread**2 * np.eye(5)).ravel())
    return Calibration(
        prior=shape.timing,
        timing=shape.timing,
        factors=(1.0,) * 5,
        cov=cov,
        width=spread,
        prefill_width=spread,
    )


def _read(beliefs: Beliefs, engines: Sequence[EngineLoad], ready: Mapping[str, Replica]) -> _Readings | None:
    """Rows of these engines; None when nothing can be learnt from any."""
    shapes = {(s.service, s.variant): i for i, s in enumerate(beliefs.shapes)}
    fresh, cells = beliefs.fresh, dict[tuple[int, str], int]()
    rows: list[tuple[float, ...]] = []
    for engine in engines:
        key = engine.replica_id
        replica = ready.get(key)
        if replica is None or engine.steps < MIN_STEPS or key in fresh:
            continue
        app = shapes.get((replica.service, replica.variant))
        if app is None or (row := _row(engine)) is None:
            continue
        rows.append((app, cells.setdefault((app, replica.instance_id), len(cells)), *row))
    if not rows:
        return None
    rows.sort(key=itemgetter(0))
    table = np.fromiter(chain.from_iterable(rows), np.float64, 9 * len(rows)).reshape(-1, 9)
    table = table[np.isfinite(table).all(axis=1)]
    if not len(table):
        return None
    order = table[:, 0].astype(np.intp)
    new = np.concatenate([[True], order[1:] != order[:-1]])
    read = [beliefs.shapes[i] for i in order[new].tolist()]
    return _Readings(
        shapes=read,
        laws=np.array([_constants(shape.timing) for shape in read]),
        app=np.cumsum(new) - 1,
        cell=table[:, 1].astype(np.intp),
        instances=[key[1] for key in cells],
        seen=table[:, 2:],
    )


def _constants(t: Timing) -> tuple[float, ...]:
    idle = 1.0 - t.moe_active_fraction
    return (t.a_s, t.b_s_per_seq, t.c_s_per_ktoken, t.prefill_fixed_s, 1.0 / t.prefill_tps, t.moe_w_s, idle)


def _row(engine: EngineLoad) -> tuple[float, ...] | None:
    """One engine's figures, or None while it is saturated or says too little."""
    tpot, batch, resident = engine.tpot_s, engine.batch, engine.kv_tokens
    kv, waiting, running = engine.kv_fraction, engine.waiting, engine.running
    if type(tpot) is not Measured or type(batch) is not Measured or tpot.value <= 0.0:
        return None
    queued = waiting.value if type(waiting) is Measured else 0.0
    if queued > 1.0 and not (type(running) is Measured and queued <= 0.1 * running.value):
        return None
    if type(resident) is not Measured or (type(kv) is Measured and kv.value > KV_FULL):
        return None
    mean_batch = batch.value if batch.value > 1.0 else 1.0
    prefill, prompt = engine.prefill_s, engine.input_tokens
    if type(prefill) is Measured and type(prompt) is Measured and engine.samples > 0.0:
        return (tpot.value, mean_batch, resident.value, engine.steps, prefill.value, prompt.value, engine.samples)
    return (tpot.value, mean_batch, resident.value, engine.steps, 0.0, 0.0, 0.0)


def _law(read: _Readings) -> tuple[F8, F8, F8, F8]:
    """Per row (decode and prefill of each engine, in turn): the five terms, the expert term, what was got, its noise.

    A missing prefill is a row of infinite noise.
    """
    tpot, batch, kv, steps, prefill, prompt, prompts = read.seen.T
    a, b, c, fixed, per_token, experts_s, idle = read.laws[read.app].T
    moe = experts_s * (1.0 - idle**batch)
    busy = 1.0 - batch**-2.4  # Poisson arrivals: 1 - exp(-x) where x / (1 - exp(-x)) = batch, to .04
    per_step = busy * prompts / steps
    passes = busy * np.maximum(1.0, prompt / CHUNK_TOKENS + 0.5)
    plain = np.maximum(0.0, tpot - per_step * prefill)  # steps without a prefill; a long step gathers more arrivals
    others = per_step * (plain**2 + per_step * prefill**2) / tpot**2
    rows = np.empty((7, 2, len(tpot)))  # the five terms, the expert term, what was got; decode and prefill
    for i, term in enumerate((a, b * batch, c * kv / 1000.0)):
        rows[i] = term, passes * term
    for i, term in enumerate((fixed, per_token * prompt), 3):
        rows[i] = per_step * term, (1.0 + others) * term
    rows[5] = moe, passes * moe
    rows[6] = tpot, prefill
    with np.errstate(divide="ignore"):
        own = NOISE[1] ** 2 + SAMPLING[1] ** 2 / prompts + (CROWDING * others) ** 2
    noise = np.array([NOISE[0] ** 2 + SAMPLING[0] ** 2 / steps, own])
    paired = rows.transpose(2, 1, 0).reshape(-1, 7)
    return paired[:, :5], paired[:, 5], paired[:, 6], noise.T.ravel()


# ---- the estimate ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Sums:
    """Weighted sums per application and kind of row (apps, 2, …), and the weight that noise in common leaves them."""

    gram: F8  # (apps, 2, 5, 5) of share x share
    pull: F8  # (apps, 2, 5) of share x residual
    weight: F8  # (apps, 2)
    residual: F8  # (apps, 2)
    doubt: F8  # (apps, 2): of the predictions' own variance
    kept: F8  # (apps, 2)


def _sums(app: NDArray[np.intp], share: F8, residual: F8, noise: F8, cov: F8, slow: NDArray[np.bool_]) -> _Sums:
    doubt = np.einsum("ij,ijk,ik->i", share, cov[app], share)
    with np.errstate(divide="ignore"):
        far = np.abs(residual) / np.sqrt(noise + doubt)
        weight = np.where(slow, 0.0, np.minimum(1.0, HUBER / far)) / noise
    n = len(app) // 2
    apps = int(app[-1]) + 1
    columns = np.empty((2 * n, 33))
    columns[:, :25] = (share[:, :, None] * share[:, None, :]).reshape(-1, 25)
    columns[:, 25:30] = share * residual[:, None]
    columns[:, 30], columns[:, 31], columns[:, 32] = 1.0, residual, doubt
    columns *= weight[:, None]
    starts = np.searchsorted(app[0::2], np.arange(apps))
    table = np.add.reduceat(columns.reshape(n, 66), starts, axis=0).reshape(apps, 2, 33)
    kept = 1.0 / (1.0 + COMMON_NOISE**2 * table[:, :, 30])
    return _Sums(
        gram=table[:, :, :25].reshape(apps, 2, 5, 5),
        pull=table[:, :, 25:30],
        weight=table[:, :, 30],
        residual=table[:, :, 31],
        doubt=table[:, :, 32],
        kept=kept,
    )


def _step(
    read: _Readings, known: list[Calibration], factors: F8, cov: F8, sums: _Sums, named: list[bool], at_s: float
) -> list[tuple[Shape, Calibration]]:
    """One Kalman step of every application that was read."""
    spread = np.array([max(s.uncertainty, PRIOR_SPREAD_MIN) for s in read.shapes])
    prior = spread[:, None, None] ** 2 * np.eye(5)
    busy_s = np.bincount(read.app, weights=read.seen[:, 0] * read.seen[:, 3]) / np.bincount(read.app)
    relax = 1.0 - np.exp(-busy_s / RELAX_S)
    before = cov + relax[:, None, None] * (prior - cov)
    gram = (sums.kept[:, :, None, None] * sums.gram).sum(axis=1)
    pull = (sums.kept[:, :, None] * sums.pull).sum(axis=1)
    after = np.linalg.solve(np.eye(5) + before @ gram, before)
    after = (after + after.transpose(0, 2, 1)) / 2.0
    moved = np.minimum(np.maximum(factors + (after @ pull[:, :, None])[:, :, 0], FACTOR_MIN), FACTOR_MAX)
    scored = _scores(sums)
    load, planned, widths = _planned(read, moved, after)
    flat, factor_rows = after.reshape(-1, 25).tolist(), moved.tolist()
    rows = []
    for i, (shape, was) in enumerate(zip(read.shapes, known, strict=True)):
        now = replace(was, factors=tuple(factor_rows[i]), cov=tuple(flat[i]), ticks=was.ticks + 1)
        if was.ticks == 0 or _has_moved(was, load[i], planned[i]):
            timing = _applied(shape.timing, factor_rows[i])
            now = replace(now, timing=timing, width=widths[i][0], prefill_width=widths[i][1])
        if named[i]:  # until now a slow node had a say
            now = _anew(now, prior[i])
        rows.append((shape, _tested(now, scored[i], prior[i], at_s)))
    return rows


def _has_moved(held: Calibration, load: list[float], planned: list[float]) -> bool:
    """Whether what is planned on the law has moved by more than `STILL` since decisions were last given it.

    Every reading moves the law by a little, and a fleet whose size follows each of these steps never stands still.
    """
    batch, kv, prompt = load
    step_s = decode_step_s(held.timing, batch, kv) * _margin(held.width, QUANTILE_Z)
    fill_s = prefill_s(held.timing, prompt) * _margin(held.prefill_width, QUANTILE_Z)
    low, high = 1.0 - STILL, 1.0 + STILL
    return not (low * step_s <= planned[0] <= high * step_s and low * fill_s <= planned[1] <= high * fill_s)


def _applied(prior: Timing, factors: Sequence[float]) -> Timing:
    a, b, c, fixed, per_token = factors
    return replace(
        prior,
        a_s=prior.a_s * a,
        b_s_per_seq=prior.b_s_per_seq * b,
        c_s_per_ktoken=prior.c_s_per_ktoken * c,
        prefill_fixed_s=prior.prefill_fixed_s * fixed,
        prefill_tps=prior.prefill_tps / per_token,
    )


def _planned(read: _Readings, factors: F8, cov: F8) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Of each application: a load (twice the mean batch and KV tokens of this tick, and the mean prompt), the seconds
    of a step and of a prefill there as decisions would plan them, and their relative standard deviations.
    """
    counts = np.bincount(read.app)
    batch, kv, prompt = (np.bincount(read.app, weights=read.seen[:, i]) / counts for i in (1, 2, 5))
    terms = np.zeros((len(counts), 2, 5))
    terms[:, 0, 0], terms[:, 0, 1], terms[:, 0, 2] = 1.0, 2.0 * batch, 2.0 * kv / 1000.0
    terms[:, 1, 3], terms[:, 1, 4] = 1.0, np.maximum(1.0, prompt)
    terms *= read.laws[:, None, :5]
    mean = np.einsum("aki,ai->ak", terms, factors)
    mean[:, 0] += read.laws[:, 5] * (1.0 - read.laws[:, 6] ** (2.0 * batch))
    variance = np.einsum("aki,aij,akj->ak", terms, cov, terms)
    widths = np.sqrt(variance) / np.maximum(mean, TINY_S)
    planned = mean * (1.0 + QUANTILE_Z * np.minimum(widths, MARGIN_WIDTH_MAX))
    load = np.stack([2.0 * batch, 2.0 * kv, np.maximum(1.0, prompt)], axis=1)
    return load.tolist(), planned.tolist(), widths.tolist()


# ---- drifts ---------------------------------------------------------------------------------------------------------
def _scores(sums: _Sums) -> list[list[float]]:
    """Standardised mean residual of each application's decode and prefill rows; 0 where there is none."""
    weight = np.maximum(sums.weight, 1e-12)
    variance = 1.0 / weight + COMMON_NOISE**2 + sums.doubt / weight
    score = np.minimum(np.maximum(sums.residual / weight / np.sqrt(variance), -CUSUM_CLIP), CUSUM_CLIP)
    found: list[list[float]] = np.where(sums.weight > 0.0, score, 0.0).tolist()
    return found


def _tested(now: Calibration, score: list[float], prior: F8, at_s: float) -> Calibration:
    """The drift test. An alarm makes the law doubtful and learnt anew; what has moved is said when that has settled."""
    if now.ticks < SETTLED_TICKS:
        return now
    if now.before:
        return replace(now, before=(), drift=_moved(now, at_s) or now.drift)
    rise = (_sum(now.rise[0], score[0]), _sum(now.rise[1], score[1]))
    fall = (_sum(now.fall[0], -score[0]), _sum(now.fall[1], -score[1]))
    if max(*rise, *fall) < CUSUM_ALARM:
        return replace(now, rise=rise, fall=fall)
    return replace(_anew(now, prior), before=now.factors)


def _sum(before: float, score: float) -> float:
    return max(0.0, before + score - CUSUM_SLACK)


def _anew(now: Calibration, prior: F8) -> Calibration:
    """The same factors, no longer believed more than the catalogue was."""
    return replace(now, cov=tuple(prior.ravel().tolist()), ticks=0, rise=(0.0, 0.0), fall=(0.0, 0.0))


def _moved(now: Calibration, at_s: float) -> Drift | None:
    """The constant that changed most since the alarm, of those whose change is clear."""
    best, most = 0, DRIFT_MIN
    for i, (before, after) in enumerate(zip(now.before, now.factors, strict=True)):
        clear = abs(after - before) > DRIFT_SD * now.cov[6 * i] ** 0.5
        if clear and abs(log(after / before)) > most:
            best, most = i, abs(log(after / before))
    if most == DRIFT_MIN:
        return None
    return Drift(constant=CONSTANTS[best], ratio=now.factors[best] / now.before[best], at_s=at_s)


# ---- slow nodes -----------------------------------------------------------------------------------------------------
def _paces(beliefs: Beliefs, read: _Readings, residual: F8) -> tuple[dict[str, Pace], NDArray[np.bool_], list[bool]]:
    """The instances that seem to lag, after this tick; which rows are of those called slow; which applications have an
    engine on one that was called so only now.
    """
    cells = len(read.instances)
    mean = np.bincount(read.cell, weights=np.log1p(residual)) / np.bincount(read.cell)
    app = np.zeros(cells, dtype=np.intp)
    app[read.cell] = read.app
    size = np.bincount(app)
    first = np.cumsum(size) - size
    reference = mean[np.lexsort((mean, app))][first + (size - 1) // 2]  # the lower middle: of two nodes the faster
    behind = np.where(size[app] > 1, mean - reference[app], np.nan)  # one alone lags behind nobody
    paces = {key: pace for key, pace in beliefs.paces.items() if key in beliefs.instances}
    suspects = np.flatnonzero(behind > log(SLOW_OVER)).tolist()
    if not paces and not suspects:
        return paces, np.zeros(len(residual), dtype=np.bool_), [False] * len(size)
    lags: dict[str, list[float]] = {read.instances[i]: [] for i in suspects if read.instances[i] in beliefs.instances}
    for instance, lag in zip(read.instances, behind.tolist(), strict=True):
        if lag == lag and (instance in lags or instance in paces):
            lags.setdefault(instance, []).append(lag)
    for instance, rows in lags.items():
        paced = _paced(paces.pop(instance, None), sum(rows) / len(rows))
        if paced is not None:
            paces[instance] = paced
    slow = np.array([_is_slow(paces, instance) for instance in read.instances])
    new = slow & ~np.array([_is_slow(beliefs.paces, instance) for instance in read.instances])
    return paces, slow[read.cell], (np.bincount(app, weights=new) > 0.0).tolist()


def _is_slow(paces: Mapping[str, Pace], instance: str) -> bool:
    return instance in paces and paces[instance].slow


def _paced(known: Pace | None, lag: float) -> Pace | None:
    """A suspect's record after one more observation, or None once it keeps up."""
    before = known or Pace(0.0, 0, False)
    ticks = min(before.ticks + 1, PACE_MEMORY)
    mean = before.log_ratio + (lag - before.log_ratio) / ticks
    if mean < log(SLOW_OVER):
        return None
    return Pace(mean, ticks, before.slow or (ticks >= PACE_TICKS and mean >= log(SLOW_AT)))
