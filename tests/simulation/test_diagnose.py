"""`qm diagnose` against the truth: the misses that vanish when the same seed runs without the cause."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from autoscaler.adapters.journals import read_journal
from autoscaler.causes import Cause
from autoscaler.cli import app
from autoscaler.core.events import Observed, Record
from autoscaler.core.model import Idle, Measured, Missing, Observation, ServiceLoad, Signal
from autoscaler.diagnose import Diagnosis, diagnose
from chaos.world import simulate
from tests.worlds import CHAT, demand, fault, row, scenario, service, unit

RIGHT = 0.9  # of the misses that vanish
Fields = dict[str, Any]


def crowd(factor: float = 6.0, rps: float = 8.0) -> Fields:
    return {"kind": "flash", "rps": rps, "at_s": 1500.0, "factor": factor, "ramp_s": 60.0, "hold_s": 600.0}


CROWD: Fields = {"demand": [demand(8.0, synthetic=crowd())]}
CALM: Fields = {"demand": [demand(8.0)]}
BUSY: Fields = {"demand": [demand(10.0)]}
SILENT = {"kind": "bursts", "rps": 2.0, "on_s": 200.0, "off_s": 700.0}


def rag(tokens: int) -> Fields:
    return {"demand": [demand(6.0), demand(0.1, synthetic=crowd(80.0, 0.05), input_tokens=tokens)]}


def hit(kind: str, at_s: float, for_s: float, target: str, value: float | None = None) -> Fields:
    over = {} if value is None else {"value": value}
    return CROWD | {"faults": [fault(kind, at_s, for_s, target=target, **over)]}


# Name → the cause, the run with it, and the same without.
SCENES: dict[str, tuple[Cause, Fields, Fields]] = {
    "a crowd": (Cause.CAPACITY_SHORT, CROWD, CALM),
    "instances are gone": (Cause.CAPACITY_SHORT, BUSY | {"faults": [fault("kill", 1500.0, target="od")]}, BUSY),
    "a dry pool": (Cause.CLOUD_REFUSAL, hit("dry", 1200.0, 900.0, "od"), CROWD),
    "too few replicas allowed": (
        Cause.POLICY_LIMIT,
        CROWD | {"policies": [unit(service(max_replicas=3))]},
        CROWD,
    ),
    "metrics are gone": (Cause.BLIND, hit("metrics_gone", 1400.0, 600.0, CHAT), CROWD),
    "loads take eight times as long": (Cause.COLD_START, hit("load_slow", 1200.0, 1200.0, CHAT, 8.0), CROWD),
    "replicas crash": (
        Cause.SLOW_REPLICA,
        BUSY | {"faults": [fault("replica_crash", 1500.0, target=CHAT, value=0.6)]},
        BUSY,
    ),
    "prompts of retrieval": (Cause.LONGER_INPUTS, rag(12_000), rag(500)),
    "asleep between bursts": (
        Cause.COLD_START,
        {
            "policies": [unit(service(scale_to_zero=True, min_replicas=0))],
            "demand": [demand(1.0, synthetic=SILENT)],
        },
        {"policies": [unit(service(min_replicas=2))], "demand": [demand(1.0, synthetic=SILENT)]},
    ),
}


@dataclass(frozen=True)
class Run:
    misses: float
    told: Diagnosis

    def by(self, cause: Cause) -> float:
        return sum(share.misses for row in self.told.services for share in row.causes if share.cause is cause)


def run(fields: Fields) -> Run:
    return _run(json.dumps(fields, sort_keys=True))


@cache
def _run(fields: str) -> Run:
    made = scenario(row("od", 20), **({"duration_s": 3000.0} | json.loads(fields)))
    with TemporaryDirectory() as folder:
        report = simulate(made, "ours", 1, journal=Path(folder) / "j")
        told = diagnose(read_journal(Path(folder) / "j"))
    return Run(sum((1.0 - (s.slo_attainment or 1.0)) * s.requests for s in report.services.values()), told)


@pytest.mark.parametrize("name", SCENES)
def test_misses_that_vanish_with_their_cause_are_put_down_to_it(name: str) -> None:
    cause, faulty, healthy = SCENES[name]
    with_it, without = run(faulty), run(healthy)
    vanish = with_it.misses - without.misses
    assert vanish > 50, "a scene in which nothing goes wrong shows nothing"
    assert (with_it.by(cause) - without.by(cause)) / vanish >= RIGHT, with_it.told
    assert with_it.told.misses == pytest.approx(with_it.misses, rel=0.02, abs=3.0), "every miss is counted once"


def seen(at_s: float, ended: Signal, met: Signal) -> Record:
    quiet = Idle(at_s=at_s)
    load = ServiceLoad(
        service=CHAT,
        arrival_rps=quiet,
        prefill_tps=quiet,
        decode_tps=quiet,
        queued=quiet,
        running=quiet,
        ended_rps=ended,
        met_rps=met,
    )
    gone = Missing(why="not asked")
    observation = Observation(at_s=at_s, loads=(load,), serving=gone, cloud=gone)
    return Record(seq=int(at_s), event=Observed(at_s=at_s, observation=observation))


def test_nothing_that_ended_is_no_gap_and_what_was_not_seen_is_one() -> None:
    def rate(value: float) -> Measured:
        return Measured(value=value, at_s=0.0)

    silent = [seen(at_s, Idle(at_s=at_s), Idle(at_s=at_s)) for at_s in range(12, 112, 2)]
    unseen = [seen(at_s, Missing(why="cut off"), Missing(why="cut off")) for at_s in range(114, 122, 2)]
    told = diagnose(
        [seen(10, rate(1), rate(1)), *silent, seen(112, rate(2), rate(1)), *unseen, seen(122, rate(3), rate(1))]
    )
    assert (told.ended, told.misses) == (2 * 2 + 3 * 10, 1 * 2 + 2 * 10)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    simulate(scenario(row("od", 20), duration_s=600.0, demand=[demand(8.0)]), "ours", 1, journal=tmp_path / "j")
    return tmp_path / "j"


def qm(*words: str) -> Result:
    return CliRunner().invoke(app, ["diagnose", *words])


def test_the_command_prints_and_writes_the_same(journal: Path) -> None:
    told = json.loads(qm("--journal", str(journal), "--json", "-").stdout)
    causes = told["services"][0]["causes"]
    assert told["top_cause"] == causes[0]["cause"] == "cold_start"
    assert sum(share["share"] for share in causes) == pytest.approx(1.0)
    printed = qm("--journal", str(journal))
    assert printed.exit_code == 0
    assert "nothing was ready" in " ".join(printed.stdout.split())


def test_a_service_that_the_journal_does_not_know_is_named(journal: Path) -> None:
    refused = qm("--journal", str(journal), "--service", "x/y")
    assert refused.exit_code == 2
    assert "holds no load of x/y" in refused.stderr
