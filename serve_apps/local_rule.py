"""How many replicas an application should have: the plan's number while the plan is fresh, else a local queue rule.

Pure: may not import Ray, a clock, or anything that does I/O. Called by `serve_policy` about ten times a second, for
every application.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from serve_apps.wire import LocalRule, PlanMessage


class Load(NamedTuple):
    """What Serve knows of one deployment: replicas running and aimed at, requests queued or running."""

    running_replicas: int
    target_replicas: int
    requests: float


class Held(NamedTuple):
    """Memory of the local rule: hold `replicas` since `since_s`; `high` is the most wanted since then."""

    replicas: int
    since_s: float
    high: int


def choose(
    app: str,
    plan: PlanMessage | None,
    plan_age_s: float,
    rule: LocalRule,
    load: Load,
    held: Held | None,
    now_s: float,
) -> tuple[int | None, Held | None]:
    """``(replicas or None for "leave as it is", memory for the next call)``.

    A plan younger than its own `stale_after_s` is obeyed, and an application it does not name is left alone. Without
    one the local rule decides, starting from what is there: the plan's last rule for the application, else `rule`.
    """
    if plan is not None and plan_age_s <= plan.stale_after_s:
        return plan.targets.get(app), None
    rule = plan.local_rules.get(app, rule) if plan is not None else rule
    held = follow(rule, load, held, now_s)
    return held.replicas, held


def follow(rule: LocalRule, load: Load, held: Held | None, now_s: float) -> Held:
    """One step of the local rule: up at once, down only to the most wanted during `downscale_hold_s`."""
    wanted = math.ceil(load.requests / rule.target_ongoing_per_replica)
    wanted = min(max(wanted, rule.min_replicas), rule.max_replicas)
    if held is None:
        held = Held(max(load.target_replicas, load.running_replicas), now_s, 0)
    if wanted >= held.replicas:
        return Held(wanted, now_s, 0)
    high = max(held.high, wanted)
    if now_s - held.since_s >= rule.downscale_hold_s:
        return Held(high, now_s, wanted)
    return held._replace(high=high)
