"""Optional: a node that speaks for itself. Reports its phase, notices, its GPUs' faults and its progress to the board.

    python -m serve_apps.node_agent --instance-id i-0abc --phase joined [--notice-file /run/notice.json]
    python -m serve_apps.node_agent --instance-id i-0abc --imds --gpus --heartbeat /run/quartermaster/heartbeat

Run it beside a raylet where the cloud's own listing carries no notices (EC2 tells a spot instance only through its
metadata service). The notice comes from a file ``{"reclaim_at_s": <UTC seconds>}``, or with ``--imds`` from EC2's
metadata service: a spot interruption, or maintenance that is near; a rebalance recommendation is passed on as a detail.
``--gpus`` watches the GPUs (`gpu_health`). The heartbeat file is touched whenever the board took a report, so that the
machine itself can tell that it hears nothing of its cluster any more. Progress is the bytes that the machine has
received and read: they grow while the weights of a model come in, and the controller waits longer for a load that gets
on than for one that stands still. It costs a Ray driver process of about 100 MB; the local cloud lists notices itself
and needs none. It may not act on a notice: a drain is the controller's decision.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from serve_apps.gpu_health import Health, Watch
from serve_apps.wire import NodeReport, encode

EVERY_S = 1.0
BOARD_TIMEOUT_S = 5.0
PROC = Path("/proc")
STEP_BYTES = 64e6  # of progress: what a node says stays the same while it does nothing
IMDS_URL = "http://169.254.169.254/latest"
IMDS_TIMEOUT_S = 1.0
TOKEN_S = 600.0
PLANNED_EVERY_S = 30.0
MAINTENANCE_AHEAD_S = 3600.0  # announced days ahead; a node is given up an hour before
Phase = Literal["booting", "joined", "draining"]


def from_file(path: Path) -> float | None:
    """Instant of the notice in a file, or None when there is no file. Raises ValueError when it says anything else."""
    try:
        raw = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return float(json.loads(raw)["reclaim_at_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path}: not a notice ({error!r}); write {{"reclaim_at_s": <UTC seconds>}}') from None


class Imds:
    """EC2's metadata service. `details` is what it says that is no notice. Raises httpx.HTTPError, ValueError and
    KeyError.
    """

    def __init__(self, url: str = IMDS_URL, clock_s: Callable[[], float] = time.time) -> None:
        import httpx

        self._url, self._clock_s = url, clock_s
        self._http = httpx.Client(timeout=IMDS_TIMEOUT_S, trust_env=False)
        self._token, self._token_at_s = "", float("-inf")
        self._planned_at_s = float("-inf")
        self._maintenance_at_s: float | None = None
        self.details = ""

    def __call__(self) -> float | None:
        """Instant at which EC2 takes this instance away, or None."""
        now_s = self._clock_s()
        if now_s - self._planned_at_s > PLANNED_EVERY_S:
            self._look_ahead()
            self._planned_at_s = now_s
        action = self._get("spot/instance-action")
        notices = [datetime.fromisoformat(json.loads(action)["time"]).timestamp()] if action else []
        if self._maintenance_at_s is not None and self._maintenance_at_s - now_s < MAINTENANCE_AHEAD_S:
            notices.append(self._maintenance_at_s)
        return min(notices) if notices else None

    def _look_ahead(self) -> None:
        rebalance = self._get("events/recommendations/rebalance")
        self.details = f"rebalance recommended at {json.loads(rebalance)['noticeTime']}" if rebalance else ""
        events = json.loads(self._get("events/maintenance/scheduled") or "[]")
        begins = [_maintenance_s(event["NotBefore"]) for event in events if event.get("State") == "active"]
        self._maintenance_at_s = min(begins) if begins else None

    def _get(self, path: str) -> str:
        """What lies at `path` below meta-data; empty when nothing does. One connection serves for all."""
        now_s = self._clock_s()
        if now_s - self._token_at_s > TOKEN_S / 2.0:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": f"{TOKEN_S:.0f}"}
            reply = self._http.put(f"{self._url}/api/token", headers=ttl).raise_for_status()
            self._token, self._token_at_s = reply.text, now_s
        headers = {"X-aws-ec2-metadata-token": self._token}
        answer = self._http.get(f"{self._url}/meta-data/{path}", headers=headers)
        if answer.status_code == 404:
            return ""
        return answer.raise_for_status().text


def _maintenance_s(text: str) -> float:
    """An instant as maintenance events give it: ``21 Jan 2026 09:00:43 GMT``."""
    return parsedate_to_datetime(text).timestamp()


def source(notice_file: Path | None, *, imds: bool) -> Callable[[], float | None]:
    """Where to look for a notice."""
    if imds:
        return Imds()
    return (lambda: None) if notice_file is None else partial(from_file, notice_file)


def moved_bytes(proc: Path = PROC) -> float | None:
    """Bytes received from other machines and read from disks since this one began, in whole steps; None if not told."""
    try:
        rows = (line.split(":") for line in (proc / "net/dev").read_text().splitlines() if ":" in line)
        received = sum(int(said.split()[0]) for name, said in rows if name.strip() != "lo")
        counts = dict(line.split() for line in (proc / "vmstat").read_text().splitlines())
        paged = 1024.0 * int(counts["pgpgin"])
    except (OSError, ValueError, LookupError):
        return None
    return (received + paged) // STEP_BYTES * STEP_BYTES


def report(
    instance_id: str,
    phase: Phase,
    notice: Callable[[], float | None],
    now_s: float,
    known_s: float | None,
    health: Health | None = None,
) -> NodeReport:
    """What to say now. A notice once seen stands, and a source that fails is said in `detail`, never hidden."""
    details = [health.detail if health else ""]
    try:
        known_s = notice() or known_s
        details.append(str(getattr(notice, "details", "")))
    except Exception as error:
        details.append(f"notice: {error}")
    return NodeReport(
        instance_id=instance_id,
        phase="draining" if known_s is not None else phase,
        sent_at_s=now_s,
        reclaim_at_s=known_s,
        fault=health.fault if health else "",
        detail="; ".join(filter(None, details)),
        progress_bytes=moved_bytes(),
    )


def run(
    instance_id: str,
    phase: Phase,
    notice: Callable[[], float | None],
    *,
    rounds: int | None = None,
    watch: Watch | None = None,
    heartbeat: Path | None = None,
) -> None:
    """Report every second, for ever or `rounds` times. The caller is connected to Ray."""
    import ray

    from serve_apps.board import get_board

    known_s: float | None = None
    board: Any = None
    while rounds is None or rounds > 0:
        said = report(instance_id, phase, notice, time.time(), known_s, watch.health if watch else None)
        known_s = said.reclaim_at_s
        try:
            board = board or get_board(create=True)
            ray.get(board.note.remote(encode(said)), timeout=BOARD_TIMEOUT_S)
            if heartbeat is not None:
                heartbeat.touch()
        except Exception as error:
            board = None
            print(f"node_agent: the board did not take the report: {error}", file=sys.stderr)
        rounds = None if rounds is None else rounds - 1
        time.sleep(EVERY_S)


def main(arguments: list[str] | None = None) -> None:
    """The command. Exits 2 when there is no Ray here to join."""
    parser = argparse.ArgumentParser(prog="python -m serve_apps.node_agent", description=__doc__.splitlines()[0])
    parser.add_argument("--instance-id", required=True)
    parser.add_argument("--phase", choices=get_args(Phase), default="joined")
    parser.add_argument("--address", default="auto", help="the Ray cluster (default: the raylet on this machine)")
    notices = parser.add_mutually_exclusive_group()
    notices.add_argument("--notice-file", type=Path, help='a file {"reclaim_at_s": <UTC seconds>}, there or not yet')
    notices.add_argument("--imds", action="store_true", help="ask EC2's metadata service")
    parser.add_argument("--gpus", action="store_true", help="watch the GPUs for faults")
    parser.add_argument("--heartbeat", type=Path, help="touch this file whenever the cluster was heard of")
    options = parser.parse_args(arguments)

    import ray

    try:
        ray.init(options.address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except ConnectionError as error:
        parser.error(f"--address {options.address}: no Ray cluster there ({error}); start the node first")
    watch = Watch() if options.gpus else None
    if watch is not None:
        watch.start()
    notice = source(options.notice_file, imds=options.imds)
    run(options.instance_id, options.phase, notice, watch=watch, heartbeat=options.heartbeat)


if __name__ == "__main__":
    main()
