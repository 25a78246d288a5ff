"""What software and processor a plan was computed by: the same input gives the same bytes on the same of these only.

Reads installed metadata and source files; may not import an adapter.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("numpy", "pydantic", "quartermaster-serve")
DECIDING = (
    "autoscaler/core/*.py",
    "forecasting/*.py",
    "policies/model.py",
    "serve_apps/wire.py",
    "serve_apps/timing.py",
)


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Names and versions, the digest of the sources that decide (a version shows no edit), and the processor."""
    packages = [(name, metadata.version(name)) for name in PACKAGES]
    return (("python", platform.python_version()), *packages, ("sources", _sources()), ("cpu", _cpu()))


def _sources() -> str:
    root = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(path for pattern in DECIDING for path in root.glob(pattern)):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def _cpu() -> str:
    from numpy._core._multiarray_umath import __cpu_features__  # type: ignore[import-not-found]

    return platform.machine() + "".join(f" {name}" for name, has in sorted(__cpu_features__.items()) if has)
