"""The token that a Ray cluster with authentication asks for, where Ray itself looks for it.

May not log or keep a token. Order (Ray 2.60's documentation of token authentication): ``RAY_AUTH_TOKEN``, the file that
``RAY_AUTH_TOKEN_PATH`` names, ``~/.ray/auth_token``; the files only with ``RAY_AUTH_MODE=token``.
"""

from __future__ import annotations

import os
from pathlib import Path

from autoscaler.ports import Misconfigured

WANTS_TOKEN = "Ray wants a token; set RAY_AUTH_MODE=token (and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"  # noqa: S105


def auth_headers() -> dict[str, str]:
    """Headers for Ray's REST interfaces; none where authentication is off. Raises Misconfigured without a token."""
    mode, token = os.environ.get("RAY_AUTH_MODE", ""), os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if mode == "disabled":
        return {}
    if mode == "token" and not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        try:
            token = path.read_text().strip()
        except OSError as error:
            remedy = "put the cluster's token there or into RAY_AUTH_TOKEN"
            raise Misconfigured(f"RAY_AUTH_MODE=token: {path}: {error.strerror}; {remedy}") from error
    return {"Authorization": f"Bearer {token}"} if token else {}
