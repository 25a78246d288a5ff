"""Request-level serving: arrivals in, tokens and times out, a million requests a second. Imports Numba."""

from __future__ import annotations

from .engine import Engine
from .spec import SINGLE, Arrivals, ReplicaWindow, RequestBatch, ServiceSpec, TaskTable, Totals, Window

__all__ = [
    "SINGLE",
    "Arrivals",
    "Engine",
    "ReplicaWindow",
    "RequestBatch",
    "ServiceSpec",
    "TaskTable",
    "Totals",
    "Window",
]
