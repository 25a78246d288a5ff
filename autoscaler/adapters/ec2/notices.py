"""EventBridge's events about our instances, out of an SQS queue: what each means, and how they are fetched.

A message is deleted only when the tick that saw it has ended, so that a crash repeats it. May not act on an event; a
rebalance recommendation is advice and changes nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

SPOT = "EC2 Spot Instance Interruption Warning"
RESERVED = (
    "EC2 Capacity Reservation Instance Interruption Warning",
    "EC2 Interruptible Capacity Reservation Instance Interruption Warning",
)
STATE = "EC2 Instance State-change Notification"
CALENDAR = ("Capacity Block Reservation Delivered", "Capacity Block Reservation Expiration Warning")
WAIT_S = 20
BATCH = 10
RETRY_S = 5.0

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """What a batch of events says: when instances must be empty, and what is out of date."""

    reclaim_at_s: dict[str, float]
    instances_changed: bool
    reservations_changed: bool


def told(events: Iterable[Event], notice_s: float) -> Told:
    """The sum of `events`. `notice_s` is how long a notice is that does not say when it ends."""
    reclaim: dict[str, float] = {}
    instances = reservations = False
    for event in events:
        kind, detail = event.get("detail-type"), event.get("detail", {})
        name = detail.get("instance-id")
        if kind == SPOT or kind in RESERVED:
            if name:
                reclaim.setdefault(name, _ends_at_s(event, detail, notice_s))
        elif kind in CALENDAR:
            reservations = True
        elif kind == STATE and detail.get("state") not in ("pending", "running"):
            instances = True
    return Told(reclaim, instances, reservations)


def _ends_at_s(event: Event, detail: Mapping[str, Any], notice_s: float) -> float:
    stated = detail.get("instance-termination-time")
    with suppress(TypeError, ValueError):
        if stated:
            return datetime.fromisoformat(str(stated)).timestamp()
    return datetime.fromisoformat(event["time"]).timestamp() + notice_s


@dataclass
class Queue:
    """A queue, read by one thread with long polls. `take` gives each event once; `say` is told when it cannot be read,
    and with an empty word when it can again.
    """

    client: Any
    url: str
    say: Callable[[str], None] = lambda _: None
    retry_s: float = RETRY_S
    _trouble: str = ""
    _done: list[dict[str, str]] = field(default_factory=list)
    _taken: list[dict[str, str]] = field(default_factory=list)
    _ready: list[tuple[dict[str, str], Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._loop, name="qm-notices", daemon=True).start()

    def close(self) -> None:
        """Read no more. What was taken and not yet deleted comes again, and is known then."""
        self._stop.set()

    def take(self) -> tuple[Event, ...]:
        """The events since the last call. Those of the last call are now known for good, and their messages go."""
        with self._lock:
            self._done += self._taken
            self._taken = [receipt for receipt, _ in self._ready]
            events, self._ready = tuple(event for _, event in self._ready), []
            return events

    def poll(self) -> None:
        """Delete what is done with and fetch once. Raises what the client raises; nothing is lost then."""
        with self._lock:
            done = tuple(self._done)
        for start in range(0, len(done), BATCH):
            self.client.delete_message_batch(QueueUrl=self.url, Entries=done[start : start + BATCH])
        answer = self.client.receive_message(QueueUrl=self.url, MaxNumberOfMessages=BATCH, WaitTimeSeconds=WAIT_S)
        with self._lock:
            self._done = self._done[len(done) :]
            for row in answer.get("Messages", ()):
                receipt = {"Id": row["MessageId"], "ReceiptHandle": row["ReceiptHandle"]}
                self._ready.append((receipt, _event(row["Body"])))
        self._note("")

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                self.poll()
            except Exception as error:
                self._note(f"{type(error).__name__}: {error}")
                self._stop.wait(self.retry_s)

    def _note(self, trouble: str) -> None:
        """Say it once, not at every attempt."""
        if trouble != self._trouble:
            self._trouble = trouble
            self.say(trouble)


def _event(body: str) -> Event:
    """The event in a message; one that is none says nothing."""
    with suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, dict):
            return found
    return {}


def connect(region: str, url: str) -> Queue:
    """The queue with the default credentials, not yet read. Raises Misconfigured."""
    from autoscaler.adapters.ec2.calls import client

    return Queue(client("sqs", region, attempts=1, read_timeout_s=WAIT_S + 10.0), url)
