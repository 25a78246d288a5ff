"""The processes of one run: found by a mark in their environment, measured, and ended.

Linux only (/proc). May not know what the processes do. Every child of a run inherits `MARK`; Ray's workers overwrite
their environment with their title, so whoever descends from a marked process counts too.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from autoscaler.adapters import local_init

MARK = "QM_UP_RUN"
HOST = "127.0.0.1"
POLL_S = 0.1
PORTS = (20_000, 32_768)  # above those of Ray's workers, below those of outgoing connections


def marked(run_id: str | None = None) -> list[int]:
    """Live processes of a run (of any run without `run_id`), this one excluded."""
    wanted = f"{MARK}={run_id}\0".encode() if run_id else f"{MARK}=".encode()
    table = [proc for proc in local_init.processes() if proc.state != "Z"]
    found = [proc.pid for proc in table if _has(proc.pid, wanted)]
    for pid in found:  # grows while it is read: children of children too
        found.extend(proc.pid for proc in table if proc.ppid == pid and proc.pid not in found)
    return [pid for pid in found if pid != os.getpid()]


def _has(pid: int, wanted: bytes) -> bool:
    with contextlib.suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        return environ.startswith(wanted) or b"\0" + wanted in environ
    return False


def wait_gone(run_id: str | None, for_s: float) -> list[int]:
    """Processes of the run that are still there after `for_s` seconds; returns as soon as none is."""
    until_s = time.monotonic() + for_s
    while (left := marked(run_id)) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return left


def end(run_id: str | None, grace_s: float = 5.0) -> list[int]:
    """Ask every process of the run to end, then kill what is left. Returns what even that did not end."""
    local_init.send(marked(run_id), signal.SIGTERM)
    wait_gone(run_id, grace_s)
    for _ in range(20):  # a process may have been born while the last round was being killed
        left = marked(run_id)
        if not left:
            return []
        local_init.send(left, signal.SIGKILL)
        time.sleep(POLL_S)
    return marked(run_id)


def describe(pids: Iterable[int]) -> str:
    """Names of processes, for a message."""
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            names.append(f"{pid} ({line[:80]})")
    return ", ".join(names)


def pss_bytes(run_id: str) -> int:
    """Proportional set size of the run and of this process: memory shared by n processes counts once, not n times."""
    total = 0
    for pid in (os.getpid(), *marked(run_id)):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return total


def port_is_free(port: int) -> bool:
    """Whether a server may listen on the loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Different loopback ports that nobody listens on, drawn where the kernel takes none for outgoing connections.

    The kernel's own choice (port 0) can be somebody's outgoing port by the time it is used, minutes later.
    """
    draw = random.SystemRandom()
    found: list[int] = []
    while len(found) < count:
        port = draw.randrange(*PORTS)
        if port not in found and port_is_free(port):
            found.append(port)
    return found
