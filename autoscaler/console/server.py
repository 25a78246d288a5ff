"""The console's web application: one page, its JSON, and server-sent events. It answers reads only.

Every page is same-origin and without inline code; another site's name for this machine is refused (DNS rebinding). May
not read a journal itself: it is handed a `Feed`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

LOOK_S = 1.0
BEAT_EVERY_LOOKS = 15  # a comment that keeps idle connections open
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


class Feed(Protocol):
    """Where the page's state comes from; called from worker threads."""

    def page(self) -> dict[str, Any]:
        """The newest `View.page`."""
        ...

    def service(self, name: str) -> dict[str, Any] | None:
        """The newest `View.service`."""
        ...


def application(feed: Feed, look_s: float = LOOK_S) -> Starlette:
    """The console over `feed`, which is looked at every `look_s` seconds while anybody watches."""

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

    async def events(_: Request) -> Response:
        return StreamingResponse(_pages(feed, look_s), media_type="text/event-stream", headers=HEADERS)

    return Starlette(
        routes=[
            *(Route(path, _file(*what)) for path, what in FILES.items()),
            Route("/api/state", state),
            Route("/api/service", service),
            Route("/api/events", events),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
    )


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
