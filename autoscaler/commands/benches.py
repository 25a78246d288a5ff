"""`qm bench` and its parts: the scoreboard, and what a tick, a decision and the simulated world cost.

May not hold logic, as `qm` itself: each command imports what it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is the screen.")]
bench = typer.Typer(add_completion=False)


@bench.callback(invoke_without_command=True)
def bench_suite(
    context: typer.Context,
    suite: Annotated[Literal["public", "full"], typer.Option(help="Which shipped scenarios.")] = "public",
    scenarios: Annotated[str | None, typer.Option(metavar="A,B", help="These names or files instead.")] = None,
    controllers: Annotated[
        str, typer.Option(metavar="A,B", help="Names, or all, own (ours and the oracles), peers (with static).")
    ] = "all",
    seeds: Annotated[str, typer.Option(metavar="FROM:TO", help="Seeds, the last not included.")] = "0:10",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 2,
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Keeps each run's result, so that a killed bench goes on.")
    ] = Path("build/bench"),
    older: Annotated[
        bool, typer.Option("--older", help="Where this version of the code has no result, take another's.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Attainment against cost, as a page.")] = None,
    publish: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write docs/scoreboard.* and README's table there.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Every controller on every scenario: attainment, cost, regret to the lower bound, who dominates whom."""
    if context.invoked_subcommand is None:
        given = {name: value for name, value in locals().items() if name != "context"}
        from chaos.scoreboard.command import Given, bench_command

        raise typer.Exit(bench_command(Given(**given)))


@bench.command("tick")
def bench_tick(
    services: Annotated[int, typer.Option(min=1, help="Services, with two variants each.")] = 50,
    nodes: Annotated[int, typer.Option(min=1, help="Instances of four GPUs.")] = 100,
    ticks: Annotated[int, typer.Option(min=1, help="Ticks that are timed.")] = 100,
    json_file: Json = None,
) -> None:
    """What one tick costs: observe, learn, forecast, decide, check, journal and encode the plan."""
    from chaos.bench import tick_command

    raise typer.Exit(tick_command(services, nodes, ticks, json_file))


@bench.command("world")
def bench_world(
    requests: Annotated[int, typer.Option(min=1, help="About so many under each controller.")] = 1_000_000,
    json_file: Json = None,
) -> None:
    """How many requests per second of one core the simulated world handles, with a trivial controller and with ours."""
    from chaos.bench_world import world_command

    raise typer.Exit(world_command(requests, json_file))


@bench.command("decide")
def bench_decide(
    services: Annotated[int, typer.Option(min=1, max=5000, help="Services, with a few variants each.")] = 12,
    offerings: Annotated[int, typer.Option(min=1, max=1000, help="Offerings, of which three in ten are dry.")] = 20,
    problems: Annotated[int, typer.Option(min=1, help="Random problems.")] = 50,
    periods: Annotated[int, typer.Option(min=1, help="Ticks of each that are timed; no demand stands still.")] = 6,
    bound: Annotated[bool, typer.Option("--bound", help="And how far the fleets are from HiGHS's dual bound.")] = False,
    json_file: Json = None,
) -> None:
    """What one decision costs when demand moves every tick, pools are dry and quotas bind."""
    from chaos.bench_decide import Size, decide_command

    raise typer.Exit(decide_command(Size(services, offerings, periods), problems, json_file, bound=bound))


@bench.command("ablate")
def bench_ablate(
    scenarios: Annotated[str | None, typer.Option(metavar="A,B", help="These names or files instead of all.")] = None,
    without: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Of hold, lead, forecast, calendar, outage_age, canary."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="FROM:TO", help="Seeds, the last not included.")] = "1:4",
    json_file: Json = None,
) -> None:
    """What each idea of the decision is worth: our controller with and without it, on the same scenarios and seeds."""
    from chaos.ablation import ablate_command

    raise typer.Exit(ablate_command(scenarios, without, seeds, json_file))
