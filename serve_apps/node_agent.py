"""Optional: a node that speaks for itself. Reports its phase, any reclaim notice and its progress to the board.

    python -m serve_apps.node_agent --instance-id i-0abc --phase joined [--notice-file /run/notice.json]

Run it beside a raylet where the cloud's own listing carries no notices (EC2 tells a spot instance only through its
metadata service). The notice comes from a file ``{"reclaim_at_s": <UTC seconds>}``, or with ``--imds`` from EC2's
``spot/instance-action``. Progress is the bytes that the machine has received and read: they grow while the weights of a
model come in, and the controller waits longer for a load that gets on than for one that stands still. It costs a Ray
driver process of about 100 MB; the local cloud lists notices itself and needs none. It may not act on a notice: a
drain is the controller's decision.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from serve_apps.wire import NodeReport, encode

EVERY_S = 1.0
BOARD_TIMEOUT_S = 5.0
PROC = Path("/proc")
STEP_BYTES = 64e6  # of progress: what a node says stays the same while it does nothing
IMDS_URL = "http://169.254.169.254/latest"
IMDS_TIMEOUT_S = 1.0
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


def from_imds(url: str = IMDS_URL) -> float | None:
    """Instant at which EC2 takes this spot instance away, or None. Raises httpx.HTTPError, ValueError or KeyError."""
    import httpx

    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = httpx.put(f"{url}/api/token", headers=ttl, timeout=IMDS_TIMEOUT_S).raise_for_status().text
    headers = {"X-aws-ec2-metadata-token": token}
    answer = httpx.get(f"{url}/meta-data/spot/instance-action", headers=headers, timeout=IMDS_TIMEOUT_S)
    if answer.status_code == 404:  # no notice
        return None
    return datetime.fromisoformat(answer.raise_for_status().json()["time"]).timestamp()


def source(notice_file: Path | None, *, imds: bool) -> Callable[[], float | None]:
    """Where to look for a notice."""
    if imds:
        return from_imds
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
    instance_id: str, phase: Phase, notice: Callable[[], float | None], now_s: float, known_s: float | None
) -> NodeReport:
    """What to say now. A notice once seen stands, and a source that fails is said in `detail`, never hidden."""
    detail = ""
    try:
        known_s = notice() or known_s
    except Exception as error:
        detail = f"notice: {error}"
    return NodeReport(
        instance_id=instance_id,
        phase="draining" if known_s is not None else phase,
        sent_at_s=now_s,
        reclaim_at_s=known_s,
        detail=detail,
        progress_bytes=moved_bytes(),
    )


def run(instance_id: str, phase: Phase, notice: Callable[[], float | None], *, rounds: int | None = None) -> None:
    """Report every second, for ever or `rounds` times. The caller is connected to Ray."""
    import ray

    from serve_apps.board import get_board

    known_s: float | None = None
    board: Any = None
    while rounds is None or rounds > 0:
        said = report(instance_id, phase, notice, time.time(), known_s)
        known_s = said.reclaim_at_s
        try:
            board = board or get_board(create=True)
            ray.get(board.note.remote(encode(said)), timeout=BOARD_TIMEOUT_S)
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
    options = parser.parse_args(arguments)

    import ray

    try:
        ray.init(options.address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except ConnectionError as error:
        parser.error(f"--address {options.address}: no Ray cluster there ({error}); start the node first")
    run(options.instance_id, options.phase, source(options.notice_file, imds=options.imds))


if __name__ == "__main__":
    main()
