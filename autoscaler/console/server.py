"""The console's web application: one page, its JSON, server-sent events, and orders from who has the token.

Every page is same-origin and without inline code; another site's name for this machine is refused (DNS rebinding), and
an order needs a header that no other site can set. May not read a journal itself: it is handed a `Feed`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from hmac import compare_digest
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from autoscaler.core.events import Ordered
from autoscaler.core.orders import LONGEST_S

if TYPE_CHECKING:
    from starlette.requests import Request

LOOK_S = 1.0
BEAT_EVERY_LOOKS = 15  # a comment that keeps idle connections open
MOST_BYTES = 4096
HOSTS = ["127.0.0.1", "localhost", "[::1]"]
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FILES = {
    "/": ("index.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
}


class _Given(BaseModel):
    """What a request says of an order. It begins now."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    verb: Literal["freeze", "unfreeze", "floor", "drain"]
    subject: Annotated[str, Field(min_length=1, max_length=200)]
    who: Annotated[str, Field(min_length=1, max_length=100)]
    why: Annotated[str, Field(min_length=1, max_length=500)]
    minutes: Annotated[float, Field(gt=0.0, le=LONGEST_S / 60.0)] = 60.0
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 0


class Feed(Protocol):
    """Where the page's state comes from; called from worker threads."""

    def page(self) -> dict[str, Any]:
        """The newest `View.page`."""
        ...

    def service(self, name: str) -> dict[str, Any] | None:
        """The newest `View.service`."""
        ...

    def order(self, given: Ordered) -> str:
        """Hand an order to the controller; what is wrong with it, in words, when it was not."""
        ...


def application(feed: Feed, look_s: float = LOOK_S, token: str = "") -> Starlette:
    """The console over `feed`, looked at every `look_s` seconds while anybody watches. No token, no orders."""

    async def state(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(feed.page), headers=HEADERS)

    async def service(request: Request) -> Response:
        name = request.query_params.get("name", "")
        if not name:
            return _wrong(400, "name is missing: give ?name=UNIT/SERVICE")
        found = await asyncio.to_thread(feed.service, name)
        if found is None:
            return _wrong(404, f"{name[:100]} is no service of the policy in force: names are UNIT/SERVICE")
        return JSONResponse(found, headers=HEADERS)

    async def orders(request: Request) -> Response:
        if not token:
            return _wrong(403, "this console only shows: start it with a token file to give orders")
        if not compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
            return _wrong(401, "an order needs the token that the console was started with")
        given = _order(await _body(request))
        if isinstance(given, str):
            return _wrong(400, given)
        problem = await asyncio.to_thread(feed.order, given)
        return _wrong(409, problem) if problem else JSONResponse({"given": True}, status_code=202, headers=HEADERS)

    async def events(_: Request) -> Response:
        return StreamingResponse(_pages(feed, look_s), media_type="text/event-stream", headers=HEADERS)

    return Starlette(
        routes=[
            *(Route(path, _file(*what)) for path, what in FILES.items()),
            Route("/api/state", state),
            Route("/api/service", service),
            Route("/api/events", events),
            Route("/api/orders", orders, methods=["POST"]),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
    )


async def _body(request: Request) -> bytes:
    """The body, as far as an order can be long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            break
    return body


def _order(body: bytes) -> Ordered | str:
    """The order of a request, or what is wrong with it."""
    if len(body) > MOST_BYTES:
        return f"an order has at most {MOST_BYTES} bytes"
    try:
        given = _Given.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
    now_s = time.time()
    named = given.model_dump(exclude={"minutes"})
    return Ordered(at_s=now_s, until_s=now_s + 60.0 * given.minutes, **named)


def _wrong(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status, headers=HEADERS)


def _file(name: str, media_type: str) -> Any:
    body = (files("autoscaler.console") / "static" / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return answer


async def _pages(feed: Feed, look_s: float) -> AsyncIterator[bytes]:
    """A `page` event now and whenever something new was journalled."""
    seen, looks = -1, 0
    while True:
        page = await asyncio.to_thread(feed.page)
        looks += 1
        if page["seq"] != seen:
            seen = page["seq"]
            yield b"event: page\ndata: " + json.dumps(page, separators=(",", ":")).encode() + b"\n\n"
        elif looks % BEAT_EVERY_LOOKS == 0:
            yield b": still here\n\n"
        await asyncio.sleep(look_s)
