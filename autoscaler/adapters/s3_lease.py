"""Who may write a journal in S3: one object that says so, written only over what its writer last saw.

Each holder has an epoch, one more than the last. A lease that was not renewed for `TTL_S` by S3's own clock may be
taken over; its old holder finds that out before it acts, because it never acts on a renewal older than `ACT_S`. May not
touch the journal itself.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter, ValidationError

from autoscaler.adapters.s3_store import Changed, Found, Store
from autoscaler.ports import Misconfigured, PortError, Superseded, Transient

NAME = "lease.json"
TTL_S = 45.0
RENEW_S = 15.0  # between renewals
ACT_S = 30.0  # the oldest renewal that is acted on; the rest is for a call under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the object says. `heads` are the first chunks of the journal's segments that are kept, oldest first."""

    epoch: int
    holder: str
    nonce: str
    heads: tuple[int, ...] = (1,)
    released: bool = False


_TERMS: TypeAdapter[Terms] = TypeAdapter(Terms)


def running_s() -> float:
    """Seconds since the machine started, those included in which it was suspended: a lease runs out meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def me() -> str:
    """This process, for whoever reads that it holds the lease."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def read(store: Store) -> tuple[Terms, Found] | None:
    """What the lease says, None where there never was one. Raises Misconfigured, Transient."""
    found = store.get(NAME)
    if found is None:
        return None
    try:
        return _TERMS.validate_json(found.body), found
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise Misconfigured(
            f"{store.name}/{NAME}: not a lease ({why}); give another prefix", "lease_damaged"
        ) from error


def holder(store: Store) -> str:
    """Who writes, in words."""
    known = read(store)
    if known is None:
        return "nobody yet"
    terms, found = known
    if terms.released:
        return f"nobody; {terms.holder} left {found.age_s:.0f} s ago (epoch {terms.epoch})"
    late = ", late: it may be taken over" if found.age_s > TTL_S else ""
    return f"{terms.holder} (epoch {terms.epoch}, renewed {found.age_s:.0f} s ago{late})"


@dataclass
class Lease:
    """The right to write `store`. `elapsed_s` is a clock that never goes back."""

    store: Store
    elapsed_s: Callable[[], float] = running_s
    who: str = field(default_factory=me)
    terms: Terms | None = None
    _etag: str = ""
    _renewed_at_s: float = float("-inf")
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def epoch(self) -> int:
        """See ports.Tenure."""
        return self.terms.epoch if self.terms else 0

    def acquire(self) -> None:
        """Take it when nobody holds it. Raises Misconfigured that names the holder, Transient."""
        known = read(self.store)
        before = known[0] if known else Terms(epoch=0, holder="", nonce="")
        if known and not before.released and known[1].age_s <= TTL_S:
            raise self._taken()
        mine = Terms(epoch=before.epoch + 1, holder=self.who, nonce=secrets.token_hex(8), heads=before.heads)
        began_s = self.elapsed_s()
        try:
            self._etag = self._write(mine, known[1].etag if known else None)
        except Changed:
            raise self._taken() from None
        except Transient:
            now = read(self.store)  # the answer may have been lost after it was done
            if now is None or now[0].nonce != mine.nonce:
                raise
            self._etag = now[1].etag
        self.terms, self._renewed_at_s = mine, began_s

    def _taken(self) -> Misconfigured:
        remedy = "stop it, or give another --journal"
        words = f"{self.store.name}: another controller writes this journal: {holder(self.store)}; {remedy}"
        return Misconfigured(words, "journal_locked")

    def check(self) -> None:
        """See ports.Tenure: renews a lease that is not fresh enough to act on."""
        with self._lock:
            age_s = self.elapsed_s() - self._renewed_at_s
            if age_s < RENEW_S:
                return
            try:
                self.renew(self._held())
            except Transient:
                if age_s > ACT_S:
                    raise

    def renew(self, terms: Terms) -> None:
        """Write `terms` over what this holder last wrote. Raises Superseded, Transient."""
        with self._lock:
            began_s = self.elapsed_s()
            try:
                self._etag = self._write(terms, self._etag)
            except Changed:
                self._etag = self._mine(terms)
            self.terms, self._renewed_at_s = terms, began_s

    def _mine(self, terms: Terms) -> str:
        """The etag, when the lease is still this holder's: the answer to an earlier renewal was lost."""
        now = read(self.store)
        held = self._held()
        if now is None or now[0].nonce != held.nonce:
            by = holder(self.store)
            words = f"{self.store.name}: epoch {held.epoch} is over: the journal is now written by {by}"
            raise Superseded(words, "superseded")
        try:
            return self._write(terms, now[1].etag)
        except Changed as error:
            raise Transient(f"{self.store.name}: the lease changes while it is read", "lease_changed") from error

    def moved(self, heads: tuple[int, ...]) -> None:
        """The journal's segments begin there now."""
        self.renew(replace(self._held(), heads=heads))

    def release(self) -> None:
        """Give it back; another controller may take it at once. Never raises."""
        with self._lock:
            if self.terms is None:
                return
            try:
                self._write(replace(self.terms, released=True), self._etag)
            except (PortError, Changed):
                return  # it runs out by itself
            finally:
                self.terms = None

    def _held(self) -> Terms:
        if self.terms is None:
            raise Superseded(f"{self.store.name}: this controller has given the journal back", "superseded")
        return self.terms

    def _write(self, terms: Terms, etag: str | None) -> str:
        body = _TERMS.dump_json(terms)
        return self.store.create(NAME, body) if etag is None else self.store.replace(NAME, body, etag)
