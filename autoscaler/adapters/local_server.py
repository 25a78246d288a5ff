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
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvicorn
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from autoscaler.adapters.local_nodes import HOST, Instances, Place, raylet
from autoscaler.adapters.local_supply import ICE, CloudConfig, OfferingConfig, Refusal, Supply
from autoscaler.core.model import CloudView

STEP_S = 0.1
STATUS = {ICE: 500, "RequestLimitExceeded": 503, "AuthFailure": 401}  # EC2's own statuses; every other code is 400
WRONG_TOKEN = "wrong or missing bearer token"  # noqa: S105 - words, not a secret
VIEW: TypeAdapter[CloudView] = TypeAdapter(CloudView)


def node_command(config: CloudConfig, spec: OfferingConfig, instance_id: str) -> list[str]:
    """What an instance runs: a raylet with its GPUs and labels, or the config's stand-in."""
    if config.boot_command is not None:
        return list(config.boot_command)
    place = Place(spec.offering, spec.instance_type, spec.zone, spec.market, spec.gpus)
    return raylet(config.ray_address, place, instance_id)


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

    def command(instance_id: str) -> list[str]:
        return node_command(config, supply.offerings[supply.machines[instance_id].offering], instance_id)

    instances = Instances(supply, command, config.node_env, alone=config.boot_command is None)

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
