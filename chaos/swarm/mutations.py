"""Twelve deliberate breaks of the core, by name: each must be seen by a checker, or the checkers prove nothing.

``python -m chaos.swarm.mutations [NAME…]`` looks for the first seed of 300 that sees each. A break lasts as long as its
`with` block and is in this process's memory only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autoscaler import act
from autoscaler.core import decide, demand, learn, place, rank, release, shares
from autoscaler.core.model import Idle, Missing, Terminate
from chaos.replaced import Change, replaced
from chaos.scenario import scenario_of

from .draw import drawn
from .promises import keep
from .run import run
from .shrink import what_broke

SEEDS = 300


def _ladder_skipped() -> list[Change]:
    real = place._order

    def order(*given: Any) -> Any:
        made = real(*given)
        return made and replace(made, alternates=made.alternates[:1])

    return [(place, "_order", order)]


def _starting_never_expires() -> list[Change]:
    return [(module, "waited_s", lambda *_: 0.0) for module in (decide, release)]


def _nan_as_zero() -> list[Change]:
    real = learn._learn_load

    def load(known: Any, seen: Any, at_s: float) -> Any:
        nothing = Idle(at_s=at_s)
        gone = isinstance(seen.arrival_rps, Missing)
        return real(known, replace(seen, arrival_rps=nothing, queued=nothing, running=nothing) if gone else seen, at_s)

    return [(learn, "_learn_load", load)]


def _hold_removed() -> list[Change]:
    return [(demand, "held_rps", lambda _, rps, *__: (rps, ()))]


def _floor_ignored() -> list[Change]:
    return [(demand, "_floor", lambda *_: (0, ()))]


def _drain_skipped() -> list[Change]:
    drains, terminates = release.drains, release.terminates

    def ended(beliefs: Any, berths: Any, presence: Any, plan_id: str, now_s: float) -> Any:
        at_once = drains(beliefs, berths, presence, frozenset(), plan_id, now_s)
        rows = tuple(Terminate(id=f"{d.id}/now", instance_id=d.instance_id, reasons=d.reasons) for d in at_once)
        return (*terminates(beliefs, berths, presence, plan_id, now_s), *rows)

    return [(decide, "drains", lambda *_: ()), (decide, "terminates", ended)]


def _quota_off_by_one() -> list[Change]:
    real = shares.Purse.over
    return [(shares.Purse, "over", lambda self, held: real(self, held - 1))]


def _budget_ignored() -> list[Change]:
    return [(shares.Purse, "_budget", lambda *_, **__: None)]


def _block_end_ignored() -> list[Change]:
    changes: list[Change] = [(module, "open_for_work", lambda *_: True) for module in (decide, rank)]
    return [*changes, (release, "CLOSING_S", -1e12)]


def _cooldown_never_grows() -> list[Change]:
    real = learn._cooldown_s
    return [(learn, "_cooldown_s", lambda offering, error, _: real(offering, error, 1))]


def _priority_reversed() -> list[Change]:
    real = place.place
    needs: Callable[..., Any] = lambda asked, *rest: real(tuple(reversed(asked)), *rest)  # noqa: E731
    return [(decide, "place", needs), (place, "gives_way", lambda *_: False)]


def _intent_not_durable() -> list[Change]:
    real = act.Act

    def made(**given: Any) -> Any:
        record = given["record"]

        def lax(event: Any, *, durable: bool = False) -> Any:
            return record(event, durable=durable and event.kind != "launch_tried")

        return real(**given | {"record": lax})

    from autoscaler import loop

    return [(loop, "Act", made)]


MUTATIONS: dict[str, Callable[[], list[Change]]] = {
    "ladder_skipped": _ladder_skipped,
    "starting_never_expires": _starting_never_expires,
    "nan_as_zero": _nan_as_zero,
    "hold_removed": _hold_removed,
    "floor_ignored": _floor_ignored,
    "drain_skipped": _drain_skipped,
    "quota_off_by_one": _quota_off_by_one,
    "budget_ignored": _budget_ignored,
    "block_end_ignored": _block_end_ignored,
    "cooldown_never_grows": _cooldown_never_grows,
    "priority_reversed": _priority_reversed,
    "intent_not_durable": _intent_not_durable,
}


def _with(*kinds: str) -> Callable[[dict[str, Any]], bool]:
    return lambda data: any(fault["kind"] in kinds for fault in data["faults"])


# Worlds in which a break can show at all. Others are counted, and not run.
RELEVANT: dict[str, Callable[[dict[str, Any]], bool]] = {
    "starting_never_expires": _with("no_join"),
    "nan_as_zero": _with("metrics_gone"),
    "quota_off_by_one": lambda data: any("quota_gpus" in unit for unit in data["policies"]),
    "budget_ignored": lambda data: any("budget_usd_per_h" in unit for unit in data["policies"]),
    "block_end_ignored": lambda data: any(row["market"] == "block" for row in data["supply"]),
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    """The core with the break `name`."""
    with replaced(MUTATIONS[name]()):
        yield


def seen_by(name: str, seeds: range) -> tuple[int, frozenset[str]] | None:
    """The first of the seeds that sees the break, and the checkers that do; None when none does."""
    with broken(name):
        for seed in seeds:
            data = drawn(seed)
            if name in RELEVANT and not RELEVANT[name](data):
                continue
            broke = what_broke(run(scenario_of(data), until_broken=True))
            if broke:
                return seed, broke
    return None


def main() -> int:
    """Every break, or those that are named."""
    seeds: dict[str, int | None] = {}
    for name in sys.argv[1:] or MUTATIONS:
        found = seen_by(name, range(SEEDS))
        seeds[name] = found[0] if found else None
        text = f"seed {found[0]}: {', '.join(sorted(found[1]))}" if found else f"not seen in {SEEDS} seeds"
        print(f"{name:24} {text}", flush=True)
    keep("mutations", seeds)
    return 1 if None in seeds.values() else 0


if __name__ == "__main__":
    raise SystemExit(main())
