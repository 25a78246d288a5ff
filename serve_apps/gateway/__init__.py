"""The OpenAI-compatible gateway: admits, orders by priority, routes to variants, counts, and sheds with 429.

openai    the dialect: bodies in, frames out         service   one service's queue, slots and counters
core      calls, failover, measurement               app       HTTP, without Ray
link      the board                                  ingress   Ray Serve (the only module here that imports it)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """The gateway as a Serve application: ``import_path: serve_apps.gateway:build``.

    `args`: `services` (each a `wire.ServiceRoute` as a dict: the routes until a plan arrives), `num_replicas` (1),
    `max_ongoing_requests` (10000), `on_head_node` (true). Raises ValueError that names every wrong argument.
    """
    from .ingress import build as build_ingress

    return build_ingress(args)
