"""One folder of a bucket, with the conditional writes that keep two writers apart. May not know what it stores.

A write is sent once: boto3 would repeat one whose answer was lost, and take the refusal of the repeat for a rival's.
Ages are told by S3's own clock (the answer's date less the object's), so that no two machines' clocks need to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from autoscaler.adapters.aws_codes import port_error
from autoscaler.ports import Misconfigured, Transient

READ_ATTEMPTS = 3
CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
DELETE_AT_ONCE = 1000
_CHANGED = frozenset({"PreconditionFailed", "412"})
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})
_WRONG = frozenset(
    {
        "NoSuchBucket",
        "PermanentRedirect",
        "301",
        "400",
        "403",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "InvalidBucketName",
        "AllAccessDisabled",
        "NotImplemented",
        "MethodNotAllowed",
    }
)
_NO_ACCESS = frozenset({"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoRegionError"})


class Changed(Exception):
    """A conditional write was refused: somebody else wrote the object. Never leaves the adapters."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object; `age_s` is how long ago it was written."""

    body: bytes
    etag: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Store:
    """Objects of `bucket` under `prefix`. `read` repeats what failed, `write` never does (both boto3 clients of S3)."""

    bucket: str
    prefix: str
    read: Any
    write: Any

    @property
    def name(self) -> str:
        """As a user writes it."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def get(self, name: str) -> Found | None:
        """The object, or None when there is none. Raises Transient, Misconfigured."""
        try:
            answer = self._call(self.read, "get_object", Key=self._key(name))
            body = answer["Body"].read()
        except KeyError:
            return None
        except OSError as error:
            raise Transient(f"{self.name}/{name}: {error}", type(error).__name__) from error
        return Found(body, answer["ETag"], _age_s(answer))

    def create(self, name: str, body: bytes) -> str:
        """Write an object that must not exist yet; its etag. Raises Changed, Transient (nobody knows) and others."""
        answer = self._call(self.write, "put_object", Key=self._key(name), Body=body, IfNoneMatch="*")
        return str(answer["ETag"])

    def replace(self, name: str, body: bytes, etag: str) -> str:
        """Write over exactly the object with `etag`; the new etag. Raises as `create`."""
        answer = self._call(self.write, "put_object", Key=self._key(name), Body=body, IfMatch=etag)
        return str(answer["ETag"])

    def names(self, folder: str, after: str = "") -> tuple[str, ...]:
        """Names in `folder`, sorted, those after `after` only. Raises Transient, Misconfigured."""
        found: list[str] = []
        more: dict[str, Any] = {"StartAfter": self._key(f"{folder}/{after}")} if after else {}
        while True:
            answer = self._call(self.read, "list_objects_v2", Prefix=self._key(f"{folder}/"), **more)
            found += [row["Key"].rpartition("/")[2] for row in answer.get("Contents", ())]
            if not answer.get("IsTruncated"):
                return tuple(sorted(found))
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, folder: str, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no matter. Raises Transient, Misconfigured."""
        for start in range(0, len(names), DELETE_AT_ONCE):
            rows = [{"Key": self._key(f"{folder}/{name}")} for name in names[start : start + DELETE_AT_ONCE]]
            self._call(self.read, "delete_objects", Delete={"Objects": rows, "Quiet": True})

    def _call(self, client: Any, operation: str, **params: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **params)
        except ClientError as error:
            raise self._refused(error, operation) from error
        except BotoCoreError as error:
            kind = type(error).__name__
            raise (Misconfigured if kind in _NO_ACCESS else Transient)(f"{self.name}: {error}", kind) from error
        return answer

    def _refused(self, error: Any, operation: str) -> Exception:
        row, status = error.response.get("Error", {}), error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(row.get("Code") or f"HTTP{status}")
        if code in _CHANGED:
            return Changed(code)
        if code in _ABSENT:
            return KeyError(code)
        words = f"{self.name}: {operation}: {row.get('Message') or code}"
        if code == "ConditionalRequestConflict":  # a rival write is under way: who won is not known yet
            return Transient(words, code)
        if code in _WRONG:
            return Misconfigured(f"{words}; correct the bucket, its region or the permissions", code)
        found = port_error(code, words, status=int(status or 500))
        return found if isinstance(found, Misconfigured) else Transient(words, code)


def _age_s(answer: dict[str, Any]) -> float:
    """Without a date in the answer it counts as just written, which takes nothing from anybody."""
    sent = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return max(0.0, (parsedate_to_datetime(sent) - answer["LastModified"]).total_seconds()) if sent else 0.0


def parse(place: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://bucket/prefix``. Raises Misconfigured."""
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    if not bucket or not prefix.strip("/"):
        raise Misconfigured(f"{place}: give s3://BUCKET/PREFIX, a prefix for each cluster", "no_journal")
    return bucket, prefix.strip("/")


def connect(place: str) -> Store:
    """The store at ``s3://bucket/prefix`` with the default credentials. Raises Misconfigured."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    bucket, prefix = parse(place)

    def client(attempts: int) -> Any:
        rules = {"mode": "standard", "total_max_attempts": attempts}
        config = Config(connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, retries=rules)
        return session.client("s3", config=config)

    try:
        session = boto3.session.Session()
        return Store(bucket, prefix, client(READ_ATTEMPTS), client(1))
    except (BotoCoreError, ValueError) as error:
        raise Misconfigured(f"{place}: {error}", type(error).__name__) from error
