"""Who calls: API keys, known by their SHA-256 only, and which services each may use.

A unit that has keys asks for one of them; the services of a unit without are open to everybody who reaches the gateway.
Pure; may not do I/O, log, or put a key or its hash into a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from serve_apps.wire import KeyRoute

from .openai import ApiError

ANONYMOUS = "anonymous"


class Access:
    """The keys in force. Replaced as a whole when routes change."""

    def __init__(self, keys: Iterable[KeyRoute] = ()) -> None:
        self._keys = tuple(keys)
        self._closed = frozenset(key.unit for key in self._keys)

    def caller(self, authorization: str | None) -> KeyRoute | None:
        """The key in an Authorization header; None without one that is known. Takes as long whichever it is."""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not self._keys:
            return None
        digest = sha256(given.strip().encode()).hexdigest()
        found = None
        for key in self._keys:
            if compare_digest(key.sha256, digest):
                found = key
        return found

    def may_call(self, service: str, caller: KeyRoute | None) -> bool:
        """Whether the unit of ``unit/service`` is open, or the caller's own."""
        unit = service.partition("/")[0]
        return unit not in self._closed or (caller is not None and caller.unit == unit)

    def check(self, service: str, caller: KeyRoute | None) -> None:
        """Raises ApiError: 401 when the unit asks for a key and none that is known came, 403 for another unit's."""
        if self.may_call(service, caller):
            return
        if caller is None:
            text = f"The service '{service}' asks for an API key of its unit: send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, text, kind="authentication_error", code="invalid_api_key")
        raise ApiError(
            403, f"This API key may not call the service '{service}'.", kind="permission_error", code="wrong_unit"
        )


def tenant_of(caller: KeyRoute | None) -> str:
    """The label of the caller's token counts: ``unit/tenant``, as many as there are keys."""
    return ANONYMOUS if caller is None else f"{caller.unit}/{caller.tenant}"
