"""The first process of a `local` instance: starts its command, adopts what that leaves behind, takes all of it down.

Run as ``python -I -S local_init.py PARENT_PID LOCK COMMAND…`` in a session of its own, one per instance, so it imports
the standard library only and stays small (``ray start --block`` in its place costs 170 MB). It ends when the command
and the daemons that the command left have ended; on SIGTERM; or when its parent dies. Nothing it started outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from typing import NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE_S = 2.0
POLL_S = 0.02


class Proc(NamedTuple):
    """One line of the process table."""

    pid: int
    ppid: int
    session: int
    state: str


def processes() -> list[Proc]:
    """The process table; processes that vanish while it is read are left out."""
    table = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double this process's memory
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat") as stat:  # noqa: PTH123
                state, ppid, _, session = stat.read().rpartition(")")[2].split()[:4]
                table.append(Proc(int(name), int(ppid), int(session), state))
    return table


def descendants(root: int) -> list[int]:
    """Live processes below `root`. As `root` adopts orphans, nothing escapes by leaving its parent."""
    table = processes()
    found = [root]
    for pid in found:
        found.extend(proc.pid for proc in table if proc.ppid == pid)
    dead = {proc.pid for proc in table if proc.state == "Z"}
    return [pid for pid in found[1:] if pid not in dead]


def adopt_orphans() -> None:
    """Make orphans of this process's descendants its own children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _ignore_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop(_number: int, _frame: object) -> NoReturn:
    _ignore_signals()
    _sweep()
    os._exit(0)


def _watch(command: list[str], lock: str) -> int:
    """Exit status of the command, or of the last daemon that it left behind (`ray start` leaves the raylet).

    While the command itself runs it holds the file `lock` (empty: none): two raylets that start at once on one machine
    choose the same socket name, and one of them dies of it.
    """
    turn = os.open(lock, os.O_RDWR) if lock else None
    if turn is not None:
        fcntl.flock(turn, fcntl.LOCK_EX)
    main = os.posix_spawnp(command[0], command, os.environ)
    daemons: set[int] | None = None  # None while the command itself runs
    while True:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if pid == main:
            daemons = {proc.pid for proc in processes() if proc.ppid == os.getpid()} if code == 0 else set()
            if turn is not None:
                os.close(turn)
        elif daemons is not None:
            daemons.discard(pid)
        if daemons is not None and not daemons:
            return code


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _sweep() -> None:
    """Ask everything below to end, as a shutdown does, then end it."""
    send(descendants(os.getpid()), signal.SIGTERM)
    give_up_at_s = time.monotonic() + TERM_GRACE_S
    while left := descendants(os.getpid()):
        if time.monotonic() > give_up_at_s:
            send(left, signal.SIGKILL)
        time.sleep(POLL_S)
        _reap()


def main(arguments: list[str]) -> int:
    """Run the instance; returns the exit status of what ended it. Stopped from outside it exits 0, from `_stop`."""
    parent, lock, command = int(arguments[0]), arguments[1], arguments[2:]
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    adopt_orphans()
    die_with_parent()
    code = _watch(command, lock) if os.getppid() == parent else 0
    _ignore_signals()
    _sweep()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
