"""The `local` cloud: a process of its own that hands out raylets as instances, from finite pools.

It stands for EC2 on one machine: the controller may die, this does not. It may not decide anything (the books are
`local_supply`), listens on 127.0.0.1 only, and wants ``Authorization: Bearer TOKEN`` on everything but /healthz.
No instance outlives it, nor it the process that started it (unless ``--outlive-parent``).

Run as ``python -m autoscaler.adapters.local_server --config FILE.json --port N --token-file F``; it prints its address
once it answers. GET /healthz, GET /describe; POST /launch {offering, count, token}, /terminate {instance_id}, and for
whoever plays the weather: /supply {offering, count}, /reclaim {instance_id, notice_s?}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import uvicorn
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from autoscaler.adapters import local_init
from autoscaler.adapters.local_supply import ICE, CloudConfig, Machine, OfferingConfig, Refusal, Supply
from autoscaler.core.model import CloudView
from serve_apps import wire

HOST = "127.0.0.1"
STEP_S = 0.1
KILL_AFTER_S = 10.0
OBJECT_STORE_BYTES = 80_000_000
# No worker waits idle on an instance that only holds engines.
NODE_ENV = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
STATUS = {ICE: 500, "RequestLimitExceeded": 503, "AuthFailure": 401}  # EC2's own statuses; every other code is 400
WRONG_TOKEN = "wrong or missing bearer token"  # noqa: S105 - words, not a secret
VIEW: TypeAdapter[CloudView] = TypeAdapter(CloudView)


def node_command(config: CloudConfig, spec: OfferingConfig, instance_id: str) -> list[str]:
    """What an instance runs: a raylet with its GPUs and labels, or the config's stand-in."""
    if config.boot_command is not None:
        return list(config.boot_command)
    labels = {
        wire.LABEL_INSTANCE_ID: instance_id,
        wire.LABEL_OFFERING: re.sub(r"[^A-Za-z0-9_.-]", "_", spec.offering),
        wire.LABEL_INSTANCE_TYPE: spec.instance_type,
        wire.LABEL_ZONE: spec.zone,
        wire.LABEL_MARKET: spec.market,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", config.ray_address]
    if config.ray_address.startswith(HOST):
        command += ["--node-ip-address", HOST]
    return [
        *command,
        *("--num-cpus", "1", "--num-gpus", str(spec.gpus)),
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
    """The instances' processes, made to follow the books. Call from one thread that lives as long as the server."""

    def __init__(self, config: CloudConfig, supply: Supply) -> None:
        self._config = config
        self._supply = supply
        self._processes: dict[str, _Process] = {}
        self._boots_alone = tempfile.NamedTemporaryFile(prefix="qm-boot-")  # noqa: SIM115 - lives as long as this

    def follow(self, now_s: float) -> None:
        """One step: boot what runs without a process, stop what is terminating, record what ended."""
        self._supply.advance(now_s)
        for machine in tuple(self._supply.machines.values()):
            process = self._processes.get(machine.instance_id)
            if process is not None and process.child.poll() is not None:
                self._record_end(machine, process, now_s)
            elif machine.state == "running" and process is None:
                self._boot(machine)
            elif machine.state == "terminating" and process is None:
                self._supply.ended(machine.instance_id, now_s, "")
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
        spec = self._supply.offerings[machine.offering]
        lock = self._boots_alone.name if self._config.boot_command is None else ""
        command = [sys.executable, "-I", "-S", local_init.__file__, str(os.getpid()), lock]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the instance
        child = subprocess.Popen(
            command + node_command(self._config, spec, machine.instance_id),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | NODE_ENV | self._config.node_env | {"RAY_CLOUD_INSTANCE_ID": machine.instance_id},
        )
        self._processes[machine.instance_id] = _Process(child, output)

    def _record_end(self, machine: Machine, process: _Process, now_s: float) -> None:
        del self._processes[machine.instance_id]
        tail = _wipe(process)
        code = process.child.returncode
        by_itself = "Client.InstanceInitiatedShutdown: the node ended by itself"
        self._supply.ended(
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


# ---- HTTP -----------------------------------------------------------------------------------------------------------
class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Launch(_Body):
    offering: str
    count: int
    token: str


class _Terminate(_Body):
    instance_id: str


class _SetSupply(_Body):
    offering: str
    count: int


class _Reclaim(_Body):
    instance_id: str
    notice_s: float | None = None


def _refuse(code: str, message: str) -> JSONResponse:
    return JSONResponse({"code": code, "message": message}, STATUS.get(code, 400))


class _Api:
    """The endpoints. Everything runs on the event loop's thread, so no call sees another half done."""

    def __init__(self, config: CloudConfig, supply: Supply, instances: Instances, secret: str) -> None:
        self._config = config
        self._supply = supply
        self._instances = instances
        self._expected = f"Bearer {secret}".encode()

    def routes(self) -> list[Route]:
        """All endpoints; all but /healthz behind the token."""
        posts: dict[str, Callable[[bytes], Awaitable[dict[str, object]]]] = {
            "/launch": self._launch,
            "/terminate": self._terminate,
            "/supply": self._set_supply,
            "/reclaim": self._reclaim,
        }
        gets = [Route("/healthz", self._healthz), Route("/describe", self._describe)]
        return gets + [Route(path, self._guarded(act), methods=["POST"]) for path, act in posts.items()]

    def _guarded(
        self, act: Callable[[bytes], Awaitable[dict[str, object]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not self._admits(request):
                return _refuse("AuthFailure", WRONG_TOKEN)
            try:
                self._instances.follow(time.time())
                return JSONResponse(await act(await request.body()))
            except Refusal as refusal:
                return _refuse(refusal.code, str(refusal))
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"])) or "body"
                return _refuse("InvalidParameterValue", f"{key}: {first['msg']}")

        return endpoint

    def _admits(self, request: Request) -> bool:
        return hmac.compare_digest(request.headers.get("authorization", "").encode(), self._expected)

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def _describe(self, request: Request) -> Response:
        if not self._admits(request):
            return _refuse("AuthFailure", WRONG_TOKEN)
        now_s = time.time()
        self._instances.follow(now_s)
        return Response(VIEW.dump_json(self._supply.view(now_s)), media_type="application/json")

    async def _launch(self, raw: bytes) -> dict[str, object]:
        body = _Launch.model_validate_json(raw)
        instance_ids = self._supply.launch(body.offering, body.count, body.token, time.time())
        await asyncio.sleep(self._config.launch_s)
        return {"instance_ids": list(instance_ids)}

    async def _terminate(self, raw: bytes) -> dict[str, object]:
        self._supply.terminate(_Terminate.model_validate_json(raw).instance_id)
        self._instances.follow(time.time())
        return {}

    async def _set_supply(self, raw: bytes) -> dict[str, object]:
        body = _SetSupply.model_validate_json(raw)
        self._supply.set_supply(body.offering, body.count)
        return {}

    async def _reclaim(self, raw: bytes) -> dict[str, object]:
        body = _Reclaim.model_validate_json(raw)
        return {"reclaim_at_s": self._supply.reclaim(body.instance_id, time.time(), body.notice_s)}


# ---- process --------------------------------------------------------------------------------------------------------
class _Server(uvicorn.Server):
    """uvicorn, with the instances' clockwork beside it, stopping when `parent` (a process id, or None) is gone."""

    def __init__(self, app: Starlette, instances: Instances, parent: int | None) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
        self._instances = instances
        self._parent = parent

    async def clockwork(self) -> None:
        """Until cancelled: let the instances follow the books."""
        while True:
            self._instances.follow(time.time())
            if self._parent is not None and os.getppid() != self._parent:
                self.should_exit = True
            await asyncio.sleep(STEP_S)


def run(config: CloudConfig, secret: str, listener: socket.socket, parent: int | None) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end; then every instance's processes are gone."""
    supply = Supply(config, f"i-{secrets.token_hex(4)}")
    instances = Instances(config, supply)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        clockwork = asyncio.create_task(server.clockwork())
        print(f"listening on http://{HOST}:{listener.getsockname()[1]}", flush=True)
        yield
        clockwork.cancel()

    api = _Api(config, supply, instances, secret)
    server = _Server(Starlette(routes=api.routes(), lifespan=lifespan), instances, parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when it is done with it
    try:
        server.run(sockets=[listener])
    finally:
        instances.stop_all()


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    return listener


def main(arguments: list[str]) -> int:
    """Parse, check everything, then serve. Returns 2 with one line for each thing that is wrong."""
    parser = argparse.ArgumentParser(prog="local_server", description="The local cloud.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True, help="0 = any free port, printed once it answers")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--outlive-parent", action="store_true", help="go on when the starting process ends")
    options = parser.parse_args(arguments)
    try:
        config = CloudConfig.model_validate_json(options.config.read_bytes())
        secret = options.token_file.read_text().strip()
        listener = _listener(options.port)
    except ValidationError as error:
        rows = error.errors()
        return _fail("\n".join(f"{options.config}: {'.'.join(map(str, row['loc']))}: {row['msg']}" for row in rows))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else f"--port {options.port}: "
        return _fail(f"{where}{error.strerror}; name a readable file, or a free port")
    if len(secret) < 16:
        return _fail(f"{options.token_file}: the token has {len(secret)} characters; write at least 16")
    run(config, secret, listener, None if options.outlive_parent else os.getppid())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
