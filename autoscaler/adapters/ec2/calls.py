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
from autoscaler.adapters.ec2.remedies import remedy
from autoscaler.ports import Misconfigured, PortError, Throttled, Transient

READ_ATTEMPTS = 3
PAGE = 1000
CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 20.0
SLOW_BASE_S = 2.0
SLOW_CAP_S = 60.0
SHOWN = 300  # characters of an error's text: a parser shows all that it could not read
_NO_ACCESS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError"}
)


@dataclass(frozen=True, slots=True)
class Clients:
    """One region's: `read` repeats what failed, `write` (launch, terminate, purchase) never does. `quotas` is Service
    Quotas' client, where limits are read.
    """

    read: Any
    write: Any
    quotas: Any = None


def client(service: str, region: str, *, attempts: int, read_timeout_s: float = READ_TIMEOUT_S) -> Any:
    """A client with the default credentials, at the address that boto3's environment names. Raises Misconfigured."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    rules = {"mode": "standard", "total_max_attempts": attempts}
    config = Config(connect_timeout=CONNECT_TIMEOUT_S, read_timeout=read_timeout_s, retries=rules)
    try:
        return boto3.session.Session().client(service, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        kind = type(error).__name__
        raise Misconfigured(f"region {region!r}: {_line(error)}; {remedy(kind)}", kind) from error


def connect(region: str) -> Clients:
    """One region's clients. Raises Misconfigured."""
    return Clients(
        client("ec2", region, attempts=READ_ATTEMPTS),
        client("ec2", region, attempts=1),
        client("service-quotas", region, attempts=READ_ATTEMPTS),
    )


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

    def pages(self, operation: str, key: str, **params: Any) -> list[dict[str, Any]]:
        """All rows of a listing. Raises as ports."""
        rows: list[dict[str, Any]] = []
        after: dict[str, Any] = {}
        while True:
            answer = self.read(operation, **params, MaxResults=PAGE, **after)
            rows += answer.get(key, ())
            if not answer.get("NextToken"):
                return rows
            after = {"NextToken": answer["NextToken"]}

    def instances(self, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Instances that pass `filters`. Raises as ports."""
        groups = self.pages("describe_instances", "Reservations", Filters=filters)
        return [row for group in groups for row in group["Instances"]]

    def quotas(self) -> list[dict[str, Any]]:
        """EC2's limits by Service Quotas, none where there is no client for it. Raises as ports."""
        rows: list[dict[str, Any]] = []
        after: dict[str, Any] = {}
        while self.clients.quotas is not None:
            answer = self._call(self.clients.quotas, "list_service_quotas", "", {"ServiceCode": "ec2"} | after)
            rows += answer.get("Quotas", ())
            if not answer.get("NextToken"):
                break
            after = {"NextToken": answer["NextToken"]}
        return rows

    def count(self, code: str) -> None:
        """Count a code that no class holds. A bare status is a proxy's answer, not EC2's."""
        if known(code) is None and not code.removeprefix("HTTP").isdigit():
            self.unknown[code] += 1

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
            raise Misconfigured(_line(error), "ParamValidationError") from error
        except (BotoCoreError, ResponseParserError) as error:
            kind = type(error).__name__
            raise (Misconfigured if kind in _NO_ACCESS else Transient)(f"{operation}: {_line(error)}", kind) from error
        if answer.keys() <= {"ResponseMetadata"}:  # EC2 says at least that a list is empty; a proxy's page says nothing
            raise Transient(f"{operation}: the answer is well-formed, but none of EC2's", "ResponseParserError")
        self.bucket.well()
        return answer

    def _refused(self, error: Any, offering: str) -> PortError:
        row, status = error.response.get("Error", {}), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(row.get("Code") or f"HTTP{status}")
        found = port_error(code, _line(row.get("Message") or error), offering=offering, status=int(status or 500))
        if isinstance(found, Throttled):
            self.bucket.slow_down()
        self.count(code)
        return found


def _line(text: object) -> str:
    return " ".join(str(text).split())[:SHOWN]
