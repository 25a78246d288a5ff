"""The gateway on Ray Serve: engines behind deployment handles, the board behind its actor, HTTP behind the ingress.

Imported only where Ray Serve runs (`serve_apps.gateway.build`): this is the only module of the gateway that knows Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from serve_apps.board import get_board
from serve_apps.pipe import Pipe
from serve_apps.wire import GATEWAY_DEPLOYMENT, Routes

from .app import make_app
from .core import Gateway
from .engine import Chunk, EngineFailed, EngineRefused
from .link import linked

_log = logging.getLogger("ray.serve")

# One event loop for Serve's router, its replica code and ours, and gRPC instead of the object store between gateway and
# engines: 5 000 chunks/s instead of 1 300 on two busy cores. Nothing in the gateway blocks, so one loop is enough.
_REPLICA_ENV = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}


class GatewayArgs(BaseModel):
    """Arguments of the application."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_replicas: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(default=10_000, ge=1)  # the gateway sheds by policy, long before Serve would
    on_head_node: bool = True  # a reclaimed instance must not take the door of every service with it


class ServeBackend:
    """Engines reached through Serve handles, one cached handle an application. See `engine.Backend`."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[Any]] = {}
        self._pipe: Pipe | None = None

    @asynccontextmanager
    async def piped(self) -> AsyncIterator[None]:
        """While the context lasts, chunks come over the pipe; through Serve where it cannot be opened."""
        pipe = Pipe()
        try:
            await pipe.listen(ray.util.get_node_ip_address())
            self._pipe = pipe
        except OSError as error:
            _log.warning("chunks come through Serve: %s", error)
        try:
            yield
        finally:
            self._pipe = None
            pipe.close()

    async def generate(self, app: str, request: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """See `engine.Backend`."""
        ended = False
        response = None
        inbox = self._pipe.open() if self._pipe is not None else None
        try:
            handle = self._handles.get(app) or await self._connect(app)
            if "session" in request:
                handle = handle.options(session_id=request["session"])
            response = handle.remote(request if inbox is None else request | {"reply_to": inbox.reply_to})
            async for chunk in response if inbox is None else inbox.merged(response):
                yield chunk
            ended = True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            ended = True  # not ours: a replica that is shut down cancels what it still runs
            raise EngineFailed("the replica gave the request up") from None
        except Exception as error:
            ended = True
            raise _translate(app, error) from error
        finally:
            if inbox is not None:
                inbox.close()
            if response is not None and not ended:
                response.cancel()

    async def _connect(self, app: str) -> DeploymentHandle[Any]:
        # Asks Serve's controller, which may be restarting: off the loop, so that only this request waits for it.
        handle = await asyncio.to_thread(serve.get_app_handle, app)
        return self._handles.setdefault(app, handle.options(stream=True, method_name="generate"))


def _translate(app: str, error: Exception) -> Exception:
    cause = error.cause if isinstance(error, RayTaskError) else error  # over gRPC the engine's exception comes bare
    text = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    if isinstance(cause, ValueError):
        return EngineRefused(text)
    _log.warning("%s failed: %s: %s", app, type(cause).__name__, text)
    return EngineFailed(type(cause).__name__)


class RayBoard:
    """The board's actor, looked up again whenever a call fails."""

    def __init__(self) -> None:
        self._board: Any = None

    async def aged_plan(self) -> tuple[float, bytes] | None:
        """See `link.Board`."""
        return await self._ask("aged_plan")  # type: ignore[no-any-return]

    async def report(self, gateway_id: str, raw: bytes) -> None:
        """See `link.Board`."""
        await self._ask("report", gateway_id, raw)

    async def report_ages_s(self) -> dict[str, float]:
        """See `link.Board`."""
        return {name: age_s for name, (age_s, _) in (await self._ask("reports")).items()}

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            if self._board is None:
                self._board = await asyncio.to_thread(get_board, False)
            return await getattr(self._board, method).remote(*args)
        except Exception:
            self._board = None
            raise


class Ingress:
    """The deployment: Serve asks it for the ASGI application once it is constructed, and hands it its `user_config`,
    the `wire.Routes` in force until a plan arrives, then and whenever that changes. Nothing in flight notices.
    """

    def __init__(self) -> None:
        self._backend = ServeBackend()
        self._gateway = Gateway(self._backend)

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_app(self._gateway, lifespan=lambda _: self._lifespan())

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with self._backend.piped(), linked(self._gateway, RayBoard()):
            yield

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the routes. Raises ValueError, which fails the deployment, when they cannot be read."""
        try:
            self._gateway.begin(Routes.model_validate(user_config))
        except ValidationError as error:
            raise ValueError(_problems(error, "user_config.")) from None


def build(args: dict[str, Any]) -> serve.Application:
    """The gateway as a Serve application. Raises ValueError that names every wrong argument."""
    try:
        wanted = GatewayArgs.model_validate(args)
    except ValidationError as error:
        raise ValueError(_problems(error)) from None
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": _REPLICA_ENV}}
    if wanted.on_head_node:
        options["resources"] = {"node:__internal_head__": 0.001}
    deployment = serve.deployment(
        serve.ingress()(Ingress),
        name=GATEWAY_DEPLOYMENT,
        num_replicas=wanted.num_replicas,
        max_ongoing_requests=wanted.max_ongoing_requests,
        ray_actor_options=options,
    )
    return deployment.bind()


def _problems(error: ValidationError, prefix: str = "") -> str:
    problems = "; ".join(f"{prefix}{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return f"{GATEWAY_DEPLOYMENT}: {problems}"
