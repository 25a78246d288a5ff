"""`qm diagnose`: whose fault the misses of a journal were. Reads and prints; may not write a journal."""

from __future__ import annotations

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Column, Table

from autoscaler.adapters.journals import Place, read_journal
from autoscaler.commands.journal import clock_words, screen
from autoscaler.commands.outcome import OK, BadInput, check_json, write_json
from autoscaler.diagnose import Diagnosis, ServiceDiagnosis, diagnose

DIAGNOSIS: TypeAdapter[Diagnosis] = TypeAdapter(Diagnosis)


def diagnose_command(journal: Place, service: str | None, json_file: str | None) -> int:
    """Attribute every miss of `journal` (of `service` alone). Raises BadInput for a service it does not name."""
    check_json(json_file)
    found = diagnose(read_journal(journal), service)
    if not found.services:
        of = f" of {service}" if service else ""
        raise BadInput(
            f"{journal}: holds no load{of}; give the journal of a controller that has ticked, or another name"
        )
    if json_file:
        write_json(json_file, DIAGNOSIS.dump_json(found))
    if json_file != "-":
        _print(screen(), found)
    return OK


def _print(console: Console, found: Diagnosis) -> None:
    if not found.misses:
        console.print(f"{found.ended:.0f} requests ended, all of them within their limits")
        return
    console.print(
        f"{found.misses:.0f} of {found.ended:.0f} requests missed a limit; most of them: [bold]{found.top_cause}[/]"
    )
    for row in found.services:
        _print_service(console, row)


def _print_service(console: Console, row: ServiceDiagnosis) -> None:
    console.print(f"\n[bold]{row.service}[/]: {row.misses:.0f} of {row.ended:.0f}")
    columns = (Column("cause"), Column("misses", justify="right"), "share", "from", "to", Column("at its worst"))
    table = Table(*columns, box=None, pad_edge=False)
    for share in row.causes:
        times = (clock_words(share.from_s)[5:16], clock_words(share.to_s)[5:16])
        table.add_row(share.cause.value, f"{share.misses:.0f}", f"{share.share:.0%}", *times, share.evidence)
    console.print(table)
