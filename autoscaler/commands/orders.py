"""`qm order`: freeze, unfreeze, set a floor, drain an instance. The controller journals it at its next tick.

Whoever may write into the journal's folder may order; there is no other token here. May not write the journal itself.
"""

from __future__ import annotations

import getpass
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from autoscaler.adapters.journals import Place
    from autoscaler.core.beliefs import Beliefs
    from autoscaler.core.events import Ordered

WAIT_S, LOOK_S = 60.0, 0.2
MINUTES = 60.0

Journal = Annotated[Path, typer.Option("--journal", metavar="DIR", help="The journal of the controller that runs.")]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the journal.")]
Until = Annotated[
    str, typer.Option("--until", metavar="TIME", help="When it ends: +MINUTES, ISO 8601, or UTC seconds.")
]
Who = Annotated[str | None, typer.Option("--who", metavar="NAME", help="Who orders it; you by default.")]
Service = Annotated[str, typer.Argument(metavar="UNIT/SERVICE")]

order = typer.Typer(add_completion=False, no_args_is_help=True, help="Orders to a running controller, for a while.")


@order.command()
def freeze(service: Service, journal: Journal, why: Why, until: Until = "+60", who: Who = None) -> None:
    """Keep the number of replicas that a service has now."""
    _give(locals(), "freeze", service)


@order.command()
def unfreeze(service: Service, journal: Journal, why: Why, who: Who = None) -> None:
    """Let a frozen service grow and shrink again."""
    _give(locals() | {"until": "+1"}, "unfreeze", service)


@order.command()
def floor(
    service: Service,
    replicas: Annotated[int, typer.Argument(metavar="REPLICAS", help="0 lifts a floor.")],
    journal: Journal,
    why: Why,
    until: Until = "+60",
    who: Who = None,
) -> None:
    """Keep at least so many replicas of a service."""
    _give(locals(), "floor", service)


@order.command()
def drain(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE")],
    journal: Journal,
    why: Why,
    until: Until = "+60",
    who: Who = None,
) -> None:
    """Take an instance out of service and give it back: its successor serves first, and at TIME it ends anyhow."""
    _give(locals(), "drain", instance)


def _give(given: dict[str, Any], verb: str, subject: str) -> None:
    from autoscaler.core.events import Ordered

    now_s = time.time()
    raise typer.Exit(
        order_command(
            given["journal"],
            Ordered(
                at_s=now_s,
                who=given["who"] or getpass.getuser(),
                why=given["why"],
                verb=verb,  # type: ignore[arg-type]  # one of the four commands above
                subject=subject,
                until_s=end_s(given["until"], now_s),
                replicas=given.get("replicas", 0),
            ),
        )
    )


def end_s(text: str, now_s: float) -> float:
    """When an order ends, UTC seconds. Raises BadInput unless that is to come, and no further off than may be."""
    from autoscaler.commands.journal import parse_instant
    from autoscaler.commands.outcome import BadInput
    from autoscaler.core.orders import LONGEST_S

    try:
        at_s = now_s + MINUTES * float(text[1:]) if text.startswith("+") else parse_instant(text, "--until")
    except ValueError as error:
        raise BadInput(f"--until {text}: not a time; give +MINUTES, 2026-01-31T12:00:00Z or UTC seconds") from error
    if not now_s < at_s <= now_s + LONGEST_S:
        raise BadInput(f"--until {text}: is not within the next {LONGEST_S / 86_400.0:g} days; what lasts is policy")
    return at_s


def order_command(journal: Place, given: Ordered, wait_s: float = WAIT_S) -> int:
    """Hand the order in and wait until it is journalled. Returns 0; 1 when nobody took it, and it is taken back then.

    Raises BadInput before anything is written.
    """
    from autoscaler.adapters.journals import holder
    from autoscaler.adapters.order_box import OrderBox
    from autoscaler.commands.outcome import OK, VIOLATED, BadInput
    from autoscaler.core.orders import problem

    if not isinstance(journal, Path) or not journal.is_dir():
        raise BadInput(f"--journal {journal}: is no folder; give the one that qm run writes")
    if (writer := holder(journal)).startswith("nobody"):
        raise BadInput(f"--journal {journal}: no controller writes it ({writer}); there is nobody to order")
    if wrong := problem(given, newest(journal)):
        raise BadInput(wrong)
    path = OrderBox.of(journal).put(given)
    end = time.monotonic() + wait_s
    while path.exists() and time.monotonic() < end:
        time.sleep(LOOK_S)
    if not path.exists():
        print(f"{given.verb} {given.subject}: journalled")
        return OK
    path.unlink(missing_ok=True)
    print(f"{given.verb} {given.subject}: not taken within {wait_s:g} s, and taken back; does the controller tick?")
    return VIOLATED


def newest(journal: Path) -> Beliefs:
    """What the controller of a journal believes, from its newest segment."""
    from autoscaler.adapters.tail import Tail
    from autoscaler.core.beliefs import EMPTY
    from autoscaler.core.learn import learn

    beliefs = EMPTY
    for record in Tail(journal, newest=1).look():
        beliefs = learn(beliefs, record.event)
    return beliefs
