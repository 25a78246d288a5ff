"""The Cloud port over the `local` cloud's HTTP interface. May not hold state: what there is, the cloud says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from autoscaler.adapters.aws_codes import port_error
from autoscaler.core.model import CloudView
from autoscaler.ports import Misconfigured, Transient

_VIEW: TypeAdapter[CloudView] = TypeAdapter(CloudView)


class LocalCloud:
    """`url` of the local server, its `token`, and how long one call may take before nobody knows."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 5.0) -> None:
        self._client = httpx.Client(
            base_url=url, timeout=timeout_s, headers={"Authorization": f"Bearer {token}"}, trust_env=False
        )

    def describe(self, now_s: float) -> CloudView:
        """Offerings and instances. Raises Transient, Throttled, and Misconfigured for a wrong token."""
        reply = self._call("GET", "/describe")
        try:
            return replace(_VIEW.validate_json(reply.content), at_s=now_s)
        except ValidationError as error:
            raise Transient(f"the local cloud's listing cannot be read: {error.errors()[0]['msg']}") from error

    def launch(self, offering: str, count: int, token: str) -> tuple[str, ...]:
        """Ids granted, 1..`count`; the same for the same token. Raises as ports.Cloud.launch."""
        body = {"offering": offering, "count": count, "token": token}
        return tuple(self._call("POST", "/launch", body, offering=offering).json()["instance_ids"])

    def terminate(self, instance_id: str) -> None:
        """Give back. Raises NotFound, Refused, Throttled, Transient."""
        self._call("POST", "/terminate", {"instance_id": instance_id})

    def set_supply(self, offering: str, count: int) -> None:
        """Weather, not part of the port: what the offering's pool holds from now on."""
        self._call("POST", "/supply", {"offering": offering, "count": count})

    def reclaim(self, instance_id: str, notice_s: float | None = None) -> float:
        """Weather, not part of the port: give a reclaim notice; returns the deadline (UTC seconds)."""
        reply = self._call("POST", "/reclaim", {"instance_id": instance_id, "notice_s": notice_s})
        return float(reply.json()["reclaim_at_s"])

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _call(self, method: str, path: str, body: Any = None, *, offering: str = "") -> httpx.Response:
        try:
            reply = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Transient(f"local cloud: {type(error).__name__} on {path}: {error}", type(error).__name__) from error
        if reply.is_success:
            return reply
        try:
            answer = reply.json()
            code, message = str(answer["code"]), str(answer["message"])
        except (ValueError, LookupError, TypeError):
            code, message = f"HTTP{reply.status_code}", reply.text[:200]
        if reply.status_code in (401, 403):
            raise Misconfigured(message, code)
        raise port_error(code, message, offering=offering, status=reply.status_code)
