"""Raylets as instances: processes that follow the books of a cloud on this machine.

The books (`local_supply`, or those of a test EC2) say which instances there are, when each runs and when it ends; here
its processes are started and ended. No instance outlives the process that started it. May not decide anything.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from autoscaler.adapters import local_init
from autoscaler.core.model import CloudState
from serve_apps import wire

HOST = "127.0.0.1"
KILL_AFTER_S = 10.0
OBJECT_STORE_BYTES = 80_000_000
# No worker waits idle on an instance that only holds engines.
NODE_ENV = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}


class Machine(Protocol):
    """One instance in the books."""

    @property
    def instance_id(self) -> str:
        """Its name."""
        ...

    @property
    def state(self) -> CloudState:
        """As the books have it."""
        ...


class Books(Protocol):
    """What says which instances there are."""

    @property
    def machines(self) -> Mapping[str, Machine]:
        """By id, ended ones possibly included."""
        ...

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        ...

    def ended(self, instance_id: str, now_s: float, reason: str) -> None:
        """Nothing runs on the instance any more."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """What a node says of where it is."""

    offering: str
    instance_type: str
    zone: str
    market: str
    gpus: int


def raylet(ray_address: str, place: Place, instance_id: str) -> list[str]:
    """The command of an instance: a raylet with its GPUs and labels."""
    labels = {
        wire.LABEL_INSTANCE_ID: instance_id,
        wire.LABEL_OFFERING: re.sub(r"[^A-Za-z0-9_.-]", "_", place.offering),
        wire.LABEL_INSTANCE_TYPE: place.instance_type,
        wire.LABEL_ZONE: place.zone,
        wire.LABEL_MARKET: place.market,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", ray_address]
    if ray_address.startswith(HOST):
        command += ["--node-ip-address", HOST]
    return [
        *command,
        *("--num-cpus", "1", "--num-gpus", str(place.gpus)),
        *("--labels", ",".join(f"{key}={value}" for key, value in labels.items())),
        *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        *("--include-log-monitor=false", "--disable-usage-stats"),
    ]


@dataclass(slots=True)
class _Process:
    child: subprocess.Popen[bytes]
    output: IO[bytes]
    kill_at_s: float | None = None


class Instances:
    """The instances' processes, made to follow the books. Call from one thread that lives as long as the server.

    `command(instance_id)` is what an instance runs, with `env` in its environment; with `alone` one boots at a time.
    """

    def __init__(
        self, books: Books, command: Callable[[str], Sequence[str]], env: Mapping[str, str], *, alone: bool = True
    ) -> None:
        self._books = books
        self._command = command
        self._env = env
        self._alone = alone
        self._processes: dict[str, _Process] = {}
        self._boots_alone = tempfile.NamedTemporaryFile(prefix="qm-boot-")  # noqa: SIM115 - lives as long as this

    def follow(self, now_s: float) -> None:
        """One step: boot what runs without a process, stop what is terminating, record what ended."""
        self._books.advance(now_s)
        for machine in tuple(self._books.machines.values()):
            process = self._processes.get(machine.instance_id)
            if process is not None and process.child.poll() is not None:
                self._record_end(machine, process, now_s)
            elif machine.state == "running" and process is None:
                self._boot(machine)
            elif machine.state == "terminating" and process is None:
                self._books.ended(machine.instance_id, now_s, "")
            elif machine.state == "terminating" and process is not None:
                _stop(process, now_s)

    def stop_all(self) -> None:
        """End every instance; returns when no process of theirs is left."""
        while self._processes:
            for instance_id, process in tuple(self._processes.items()):
                _stop(process, time.time())
                if process.child.poll() is not None:
                    _wipe(process)
                    del self._processes[instance_id]
            time.sleep(0.02)
        self._boots_alone.close()

    def _boot(self, machine: Machine) -> None:
        lock = self._boots_alone.name if self._alone else ""
        command = [sys.executable, "-I", "-S", local_init.__file__, str(os.getpid()), lock]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the instance
        child = subprocess.Popen(
            [*command, *self._command(machine.instance_id)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | NODE_ENV | dict(self._env) | {"RAY_CLOUD_INSTANCE_ID": machine.instance_id},
        )
        self._processes[machine.instance_id] = _Process(child, output)

    def _record_end(self, machine: Machine, process: _Process, now_s: float) -> None:
        del self._processes[machine.instance_id]
        tail = _wipe(process)
        code = process.child.returncode
        by_itself = "Client.InstanceInitiatedShutdown: the node ended by itself"
        self._books.ended(
            machine.instance_id,
            now_s,
            by_itself if code == 0 else f"Server.InternalError: the node ended with {code}{tail}",
        )


def _stop(process: _Process, now_s: float) -> None:
    if process.kill_at_s is None:
        process.kill_at_s = now_s + KILL_AFTER_S
        process.child.terminate()
    elif now_s > process.kill_at_s:
        process.child.kill()


def _wipe(process: _Process) -> str:
    """Kill what the instance's first process left (only when it was itself killed) and return its last words."""
    left = [proc.pid for proc in local_init.processes() if proc.session == process.child.pid]
    local_init.send(left, signal.SIGKILL)
    with process.output as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
        lines = output.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:300]}" if lines else ""
