"""Kinds of faults a scenario may schedule: what each acts on and what its value means. May not do I/O or act.

`chaos.world` makes them happen; `chaos.scenario` refuses a kind, a target or a value that is not described here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aim = Literal["pools", "services", "whole"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. `aim`: an offering, zone, instance type or market (`pools`), a service, or everything (``*`` alone).

    `value` says what the number means; `least` and `most` bound it, `default` stands where none is given.
    """

    aim: Aim
    value: str
    default: float
    least: float = 0.0
    most: float = 1.0


KINDS: dict[str, Kind] = {
    "capacity": Kind(
        "pools", "factor on what the pool can hold; a drop reclaims after the pool's notice", 0.0, most=10
    ),
    "dry": Kind("pools", "fraction of launches that are refused for lack of capacity; what runs stays", 1.0),
    "reclaim": Kind("pools", "fraction of our instances that get a reclaim notice at that instant", 1.0),
    "kill": Kind("pools", "fraction of our instances that are gone at that instant, without notice", 1.0),
    "manual_end": Kind("pools", "fraction of our instances that somebody ends by hand at that instant", 1.0),
    "price": Kind("pools", "factor on the price", 2.0, most=100),
    "price_gone": Kind("pools", "without meaning: the price is not known, so the pool is not offered", 1.0),
    "partial": Kind("pools", "fraction of what a launch would get that it is given, at least one instance", 0.5),
    "quota": Kind("pools", "factor on the account's quota for such instances", 0.5, most=10),
    "unknown_code": Kind("pools", "fraction of launches that are refused with a code nobody knows", 1.0),
    "launch_error": Kind("pools", "fraction of launches that are not done and answered with an internal error", 1.0),
    "ambiguous": Kind("pools", "fraction of launches that are done, but answered with a time-out", 1.0),
    "no_join": Kind("pools", "fraction of launched instances that never join the cluster", 1.0),
    "boot_slow": Kind("pools", "factor on the time to boot", 3.0, most=100),
    "node_slow": Kind("pools", "factor on every engine step of instances that start then", 1.5, least=1, most=100),
    "load_slow": Kind("services", "factor on the time to load the model", 3.0, most=100),
    "load_hang": Kind("services", "fraction of loads that never end", 1.0),
    "load_fail": Kind("services", "fraction of loads that fail and start again", 1.0),
    "replica_crash": Kind("services", "fraction of the ready replicas that crash at that instant", 1.0),
    "metrics_gone": Kind("services", "without meaning: the service's metrics are missing", 1.0),
    "metrics_absurd": Kind("services", "factor on every figure of the service's load", 1e6, most=1e12),
    "metrics_frozen": Kind("services", "without meaning: the service's metrics stay as they were", 1.0),
    "metrics_ghost": Kind(
        "services", "times its length that a step takes, by an engine that is no more", 100.0, most=1e6
    ),
    "manual_targets": Kind("services", "replicas that somebody sets as each variant's target by hand", 0.0, most=100),
    "overflow_gone": Kind("services", "without meaning: the overflow endpoint refuses", 1.0),
    "throttle": Kind("whole", "cloud calls per second that are let through", 0.2, most=1000),
    "describe_gone": Kind("whole", "without meaning: the cloud's listing fails", 1.0),
    "describe_twice": Kind("whole", "without meaning: the cloud lists every instance twice", 1.0),
    "describe_lag": Kind("whole", "seconds by which the cloud's listing is late", 60.0, most=3600),
    "serving_gone": Kind("whole", "without meaning: the cluster cannot be observed", 1.0),
    "publish_gone": Kind("whole", "without meaning: plans cannot be published", 1.0),
    "clock_step": Kind("whole", "seconds by which the controller's clock is wrong", 300.0, least=-86400, most=86400),
    "clock_drift": Kind("whole", "seconds by which the controller's clock gains in a second", 0.1, least=-0.9, most=10),
    "policy_change": Kind("whole", "factor on every service's max_replicas in the policy", 0.5, most=10),
    "policy_bad": Kind("whole", "without meaning: the policy files cannot be read", 1.0),
    "controller_down": Kind("whole", "without meaning: the controller does not run; it restarts from its journal", 1.0),
    "controller_crash": Kind(
        "whole",
        "records that it yet writes in its next tick; with .5 more it dies before one, else after",
        1.0,
        most=1000,
    ),
    "second_controller": Kind("whole", "without meaning: another one, with a journal of its own, acts too", 1.0),
    "journal_full": Kind("whole", "without meaning: the journal cannot be written", 1.0),
    "journal_torn": Kind(
        "whole", "without meaning: the power fails; what was not synced is lost, the last line torn", 1.0
    ),
}
INSTANT = (  # happen once; `for_s` has no meaning
    "reclaim",
    "kill",
    "manual_end",
    "replica_crash",
    "manual_targets",
    "controller_crash",
    "journal_torn",
)


def help_text() -> str:
    """All kinds, one a line, for the schema."""
    return "\n".join(f"{name}: {kind.value} (target: {kind.aim})" for name, kind in KINDS.items())
