"""How the engine's functions are compiled: Numba, cached on disk, without fastmath and without threads.

May not hold logic of the simulation. Numba's cache looks at the file of the function it compiled, not at the files of
those that function calls; so the cache of the engine lies in a folder named after the content of every file whose code
is compiled into it, and a change to any of them compiles all anew.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_HERE = Path(__file__).resolve().parent
_PURE = _HERE.parents[1] / "serve_apps"


def _content() -> str:
    files = [*sorted(_HERE.glob("*.py")), _PURE / "timing.py", _PURE / "admission.py"]
    return sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


_CACHE = _HERE / "__pycache__" / f"engine-{_content()}"


def jit(function: Function) -> Function:
    """`function` compiled at its first call. The result can be called from other compiled functions."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_CACHE)
    try:
        return cast(Function, numba.njit(cache=True, error_model="numpy")(function))
    finally:
        numba.config.CACHE_DIR = before
