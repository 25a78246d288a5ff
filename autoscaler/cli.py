"""`qm`: names the commands and their options. Imports what a command needs when it runs, so that starting stays quick.

May not hold logic: bad input of any command becomes its problems on standard error and exit code 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from autoscaler.ownership import check_ownership

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is the screen.")]
Journal = Annotated[Path, typer.Option("--journal", metavar="DIR", help="The folder of the journal.")]
Policies = Annotated[Path, typer.Option("--policies", metavar="DIR", help="The folder of policy files.")]
CloudUrl = Annotated[str, typer.Option(metavar="URL", help="Where the local cloud listens.")]
CloudTokenFile = Annotated[Path, typer.Option(metavar="FILE", help="Holds the token of the local cloud.")]
RayAddress = Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray's GCS.")]
DashboardUrl = Annotated[str, typer.Option(metavar="URL", help="Ray's dashboard.")]
CloudKind = Annotated[Literal["local"], typer.Option(help="Where instances come from.")]
EngineKind = Annotated[Literal["vllm", "sim"], typer.Option(help="What the replicas run: vLLM, or its timing alone.")]
TickS = Annotated[float, typer.Option(metavar="SECONDS", help="From one tick to the next.")]
MetricsPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Prometheus exporter on loopback; none by default.")
]
HttpPort = Annotated[int, typer.Option(metavar="PORT", help="Where the gateway listens, on loopback.")]
Once = Annotated[bool, typer.Option("--once", help="One tick, then stop.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of policy files.")]


class _Group(TyperGroup):
    """Errors that a user can mend become words and exit code 2; any other is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            from autoscaler.commands.outcome import BAD_INPUT, problems_of

            problems = problems_of(error)
            if problems is None:
                raise
            for problem in problems:
                typer.echo(problem, err=True)
            raise typer.Exit(BAD_INPUT) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Entry point of `qm`."""
    check_ownership()
    app()


@app.callback()
def _qm() -> None:
    """Keeps LLM services on Ray Serve and vLLM running when GPUs are hard to get."""


@app.command()
def run(
    policies: Policies,
    journal: Journal,
    cloud_url: CloudUrl,
    cloud_token_file: CloudTokenFile,
    ray_address: RayAddress = "127.0.0.1:6379",
    dashboard_url: DashboardUrl = "http://127.0.0.1:8265",
    cloud: CloudKind = "local",
    engine: EngineKind = "vllm",
    tick_s: TickS = 10.0,
    metrics_port: MetricsPort = None,
    once: Once = False,
    json_file: Json = None,
) -> None:
    """Run the controller beside a cluster until it is told to stop."""
    _run(locals(), advise=False)


@app.command()
def advise(
    policies: Policies,
    journal: Journal,
    cloud_url: CloudUrl,
    cloud_token_file: CloudTokenFile,
    ray_address: RayAddress = "127.0.0.1:6379",
    dashboard_url: DashboardUrl = "http://127.0.0.1:8265",
    cloud: CloudKind = "local",
    engine: EngineKind = "vllm",
    tick_s: TickS = 10.0,
    metrics_port: MetricsPort = None,
    once: Once = False,
    json_file: Json = None,
) -> None:
    """The same loop as `qm run`: it observes, decides and journals, and does nothing."""
    _run(locals(), advise=True)


def _run(given: dict[str, Any], *, advise: bool) -> None:
    from autoscaler.commands.run import RunOptions, run_command

    raise typer.Exit(run_command(RunOptions(**given, advise=advise)))


@app.command()
def status(journal: Journal, json_file: Json = None) -> None:
    """Where things stand, by the newest records of a journal."""
    from autoscaler.commands.status import status_command

    raise typer.Exit(status_command(journal, json_file))


@app.command()
def explain(
    journal: Journal,
    service: Annotated[str | None, typer.Option(metavar="UNIT/SERVICE", help="Only launches for this service.")] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="The newest before it; UTC seconds or ISO 8601.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Why the last launch went where it went."""
    from autoscaler.commands.journal import explain_command

    raise typer.Exit(explain_command(journal, service, at, json_file))


@app.command()
def replay(journal: Journal, json_file: Json = None) -> None:
    """Decide every plan of a journal again and compare the bytes."""
    from autoscaler.commands.journal import replay_command

    raise typer.Exit(replay_command(journal, json_file))


@app.command()
def check(
    folder: Folder,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Show every value in force and where it is written.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Read a folder of policies and say everything that is wrong."""
    from autoscaler.commands.policy import check_command

    raise typer.Exit(check_command(folder, resolved, json_file))


@app.command()
def render(
    folder: Folder,
    engine: EngineKind = "vllm",
    out: Annotated[str, typer.Option(metavar="FILE", help="Where to write it; - is the screen.")] = "-",
    http_port: HttpPort = 8000,
) -> None:
    """Turn policies into a Serve config."""
    from autoscaler.commands.policy import render_command

    raise typer.Exit(render_command(folder, engine, out, http_port))


@app.command()
def apply(
    folder: Folder,
    engine: EngineKind = "vllm",
    dashboard_url: DashboardUrl = "http://127.0.0.1:8265",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    http_port: HttpPort = 8000,
) -> None:
    """Show what policies change in the running Serve config, and put it in force."""
    from autoscaler.commands.policy import apply_command

    raise typer.Exit(apply_command(folder, engine, dashboard_url, dry_run, yes, http_port))


@app.command()
def schema(name: Annotated[str, typer.Argument(metavar="FORMAT", help="policy, plan, journal, …")]) -> None:
    """Print the JSON Schema of one format."""
    from autoscaler.commands.policy import schema_command

    raise typer.Exit(schema_command(name))


if __name__ == "__main__":
    main()
