"""boto3's clients with retry rules of their own, one bucket of calls per account and region, and errors in our words.

boto3 hides a refusal by repeating it (EC2 answers a dry pool with status 500), so launches and purchases are sent once.
Every attempt, botocore's own repeats included, takes a token; a call without one is not sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoscaler.adapters.aws_codes import known, port_error
from autoscaler.ports import Misconfigured, PortError, Throttled, Transient

READ_ATTEMPTS = 3
CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 20.0
SLOW_BASE_S = 2.0
SLOW_CAP_S = 60.0
_NO_ACCESS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError"}
)


@dataclass(frozen=True, slots=True)
class Clients:
    """One region's: `read` repeats what failed, `write` (launch, terminate, purchase) never does."""

    read: Any
    write: Any


def connect(region: str, endpoint_url: str | None = None) -> Clients:
    """Clients with the default credentials. Raises Misconfigured."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    def client(mode: str, attempts: int) -> Any:
        rules = {"mode": mode, "total_max_attempts": attempts}
        config = Config(connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, retries=rules)
        return session.client("ec2", region_name=region, endpoint_url=endpoint_url, config=config)

    try:
        session = boto3.session.Session()
        return Clients(client("standard", READ_ATTEMPTS), client("standard", 1))
    except (BotoCoreError, ValueError) as error:
        raise Misconfigured(f"region {region!r}: {error}", type(error).__name__) from error


@dataclass
class Bucket:
    """Tokens for calls. After the account was throttled none is given for a while, longer each time in a row."""

    burst: float
    per_s: float
    now_s: Callable[[], float]
    sent: int = 0
    _left: float = field(init=False)
    _at_s: float = field(init=False)
    _shut_until_s: float = 0.0
    _slow: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._left, self._at_s = self.burst, self.now_s()

    def take(self) -> None:
        """Take one. Raises Throttled when there is none."""
        now_s = self.now_s()
        with self._lock:
            self._left = min(self.burst, self._left + max(0.0, now_s - self._at_s) * self.per_s)
            self._at_s = now_s
            if now_s < self._shut_until_s or self._left < 1.0:
                raise Throttled("our own limit of calls for this account and region is reached", "OwnCallLimit")
            self._left -= 1.0
            self.sent += 1

    def slow_down(self) -> None:
        """The account was throttled."""
        with self._lock:
            self._slow += 1
            self._shut_until_s = self.now_s() + min(SLOW_CAP_S, SLOW_BASE_S * 2.0 ** (self._slow - 1))

    def well(self) -> None:
        """A call was answered."""
        self._slow = 0


@dataclass
class Caller:
    """Calls of one region. `unknown` counts the codes that no class holds."""

    clients: Clients
    bucket: Bucket
    unknown: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for client in {id(each): each for each in (self.clients.read, self.clients.write)}.values():
            client.meta.events.register("request-created.ec2", self._before, unique_id=f"qm-bucket-{id(self)}")

    def close(self) -> None:
        """Let go of the clients."""
        for client in {id(each): each for each in (self.clients.read, self.clients.write)}.values():
            client.meta.events.unregister("request-created.ec2", unique_id=f"qm-bucket-{id(self)}")

    def read(self, operation: str, **params: Any) -> dict[str, Any]:
        """A call that changes nothing. Raises as ports."""
        return self._call(self.clients.read, operation, "", params)

    def write(self, operation: str, offering: str = "", **params: Any) -> dict[str, Any]:
        """A call that is sent once. Raises as ports."""
        return self._call(self.clients.write, operation, offering, params)

    def _before(self, **_: Any) -> None:
        self.bucket.take()

    def _call(self, client: Any, operation: str, offering: str, params: dict[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
        from botocore.parsers import ResponseParserError

        try:
            answer: dict[str, Any] = getattr(client, operation)(**params)
        except PortError:
            raise
        except ClientError as error:
            raise self._refused(error, offering) from error
        except ParamValidationError as error:
            raise Misconfigured(str(error), "ParamValidationError") from error
        except (BotoCoreError, ResponseParserError) as error:
            kind = type(error).__name__
            raise (Misconfigured if kind in _NO_ACCESS else Transient)(f"{operation}: {error}", kind) from error
        self.bucket.well()
        return answer

    def _refused(self, error: Any, offering: str) -> PortError:
        row, status = error.response.get("Error", {}), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(row.get("Code") or f"HTTP{status}")
        found = port_error(code, str(row.get("Message") or error), offering=offering, status=int(status or 500))
        if isinstance(found, Throttled):
            self.bucket.slow_down()
        elif known(code) is None and not code.isdigit():  # a bare status is a proxy's answer, not EC2's
            self.unknown[code] += 1
        return found
