"""`qm doctor`: whether a cloud can be used as the policy folder says, and what to do where not. Changes nothing."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter
from rich.table import Table

from autoscaler.adapters.clock import SystemClock
from autoscaler.adapters.ec2.calls import connect
from autoscaler.adapters.ec2.doctor import Doctor, Finding
from autoscaler.adapters.ec2.load import load_ec2
from autoscaler.adapters.journals import Place, holder
from autoscaler.commands.journal import screen
from autoscaler.commands.outcome import OK, VIOLATED, check_json, write_json
from autoscaler.ports import PortError

MARKS = {"ok": "ok", "note": "note", "bad": "BAD"}
_FINDINGS: TypeAdapter[tuple[Finding, ...]] = TypeAdapter(tuple[Finding, ...])


def doctor_command(policies: Path, journal: Place | None, json_file: str | None) -> int:
    """Look, tell, and return 1 when something is broken. Raises Problems for a file that cannot be read."""
    check_json(json_file)
    doctor = Doctor(load_ec2(policies), SystemClock().now_s, connect)
    try:
        found = (*doctor.examine(), *([_journal(journal)] if journal is not None else []))
    finally:
        doctor.close()
    if json_file:
        write_json(json_file, b'{"findings": ' + _FINDINGS.dump_json(found) + b"}")
    if json_file != "-":
        _print(found)
    return VIOLATED if any(each.level == "bad" for each in found) else OK


def _journal(place: Place) -> Finding:
    try:
        return Finding("journal", str(place), "ok", f"written by {holder(place)}")
    except PortError as error:
        return Finding("journal", str(place), "bad", f"{error} ({error.code})", "correct --journal or the permissions")


def _print(found: tuple[Finding, ...]) -> None:
    console = screen()
    table = Table("", "check", "subject", "found", "what to do", box=None, pad_edge=False)
    for each in found:
        table.add_row(MARKS[each.level], each.check, each.subject, each.text, each.remedy)
    console.print(table, markup=False)
    bad = sum(each.level == "bad" for each in found)
    console.print(f"{len(found)} checks, {bad} broken")
