"""The OpenAI-compatible gateway: admits, orders by priority, routes to variants, counts, and sheds with 429.

openai    the dialect: bodies in, frames out         service   one service's queue, slots and counters
core      calls, failover, measurement               overflow  somebody else's endpoint
access    API keys                                   silence   a limit on how long nothing comes
app       HTTP, without Ray                          link      the board
engine    what an engine is to the rest              ingress   Ray Serve (the only module here that imports it)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """The gateway as a Serve application: ``import_path: serve_apps.gateway:build``.

    `args`: `num_replicas` (1), `max_ongoing_requests` (10000), `on_head_node` (true). The deployment's `user_config` is
    a `wire.Routes` as a dict: services and keys until a plan arrives. Raises ValueError naming every wrong argument.
    """
    from .ingress import build as build_ingress

    return build_ingress(args)
