"""The journal in S3: chunks ``journal/NNNNNNNNNNNN.jsonl`` of the same lines as on disk, each created once.

A chunk is written for every durable event, with what came before it. Its number is the next one, and S3 creates it only
when nobody else did: so a controller that was superseded cannot write, and what it cannot write it does not do. Fetched
into a folder the chunks are a journal that every command reads. May not interpret events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from autoscaler.adapters import s3_lease
from autoscaler.adapters.journal import decode_line, encode_line
from autoscaler.adapters.s3_lease import Lease
from autoscaler.adapters.s3_store import Changed, Store
from autoscaler.core.events import Event, Record
from autoscaler.ports import Misconfigured, PortError, Reread, Transient

FOLDER = "journal"
SEGMENT_BYTES = 16 * 2**20
SEGMENTS_KEPT = 16
BUFFER_BYTES = 4 * 2**20  # of events that nobody waits for
READERS = 16


def chunk(number: int) -> str:
    """The object's name."""
    return f"{number:012d}.jsonl"


def names(store: Store, first: int) -> tuple[str, ...]:
    """The chunks from number `first` on. Raises Transient, Misconfigured."""
    return store.names(FOLDER, chunk(first - 1))


def records(store: Store, names: tuple[str, ...]) -> Iterator[Record]:
    """What the chunks `names` hold. Raises Misconfigured when they are damaged, Transient."""
    with ThreadPoolExecutor(READERS) as pool:
        bodies = pool.map(lambda name: store.get(f"{FOLDER}/{name}"), names)
        seq = None
        for name, found in zip(names, bodies, strict=True):
            if found is None:
                raise Transient(f"{store.name}/{FOLDER}/{name}: was there a moment ago", "NoSuchKey")
            for number, line in enumerate(found.body.splitlines(keepends=True), start=1):
                record = _decoded(f"{store.name}/{FOLDER}/{name}:{number}", line)
                if seq is not None and record.seq != seq + 1:
                    raise _damaged(f"{store.name}/{FOLDER}/{name}:{number}", f"number {record.seq} follows {seq}")
                seq = record.seq
                yield record


def _decoded(where: str, line: bytes) -> Record:
    try:
        record = decode_line(line)
    except ValidationError as error:
        raise _damaged(where, f"not a record of this version ({error.errors()[0]['msg']})") from error
    if record is None:
        raise _damaged(where, "a line is unreadable")
    return record


def _damaged(where: str, what: str) -> Misconfigured:
    remedy = "keep the objects for inspection and start with another prefix"
    return Misconfigured(f"{where}: journal damaged: {what}; {remedy}", "journal_damaged")


def read_all(store: Store) -> Iterator[Record]:
    """Every record that is still kept, oldest first. Needs no lease. Raises Misconfigured, Transient."""
    known = s3_lease.read(store)
    if known is None:
        remedy = "give what `qm run --journal` was given"
        raise Misconfigured(f"{store.name}: no journal here; {remedy}", "no_journal")
    return records(store, names(store, known[0].heads[0]))


class S3Journal:
    """ports.Journal and ports.Tenure in S3, written by whoever holds its `lease`. Thread-safe.

    Raises Misconfigured when another controller writes it, or it cannot be written, Transient when S3 does not answer.
    """

    def __init__(
        self, store: Store, lease: Lease | None = None, *, segment_bytes: int = SEGMENT_BYTES, keep: int = SEGMENTS_KEPT
    ) -> None:
        self.store, self.segment_bytes, self.keep = store, segment_bytes, keep
        self.repaired = ""
        self._lease = lease or Lease(store)
        self._lock = threading.RLock()
        self._next, self._seq, self._size = 1, 0, 0
        self._buffer: list[bytes] = []
        self._lease.acquire()

    @property
    def epoch(self) -> int:
        """See ports.Tenure."""
        return self._lease.epoch

    def check(self) -> None:
        """See ports.Tenure."""
        self._lease.check()

    def read(self) -> Iterator[Record]:
        """See ports.Journal: the newest segment."""
        with self._lock:
            first = self._lease.terms.heads[-1] if self._lease.terms else 1
            there = names(self.store, first)
            known = tuple(records(self.store, there))
            self._next = int(there[-1].partition(".")[0]) + 1 if there else first
            self._seq = known[-1].seq if known else 0
            self._size = sum(len(encode_line(record)) for record in known)
            self._buffer = []
            return iter(known)

    def append(self, event: Event, *, durable: bool) -> Record:
        """See ports.Journal. Raises Superseded, and Reread (`_write`)."""
        with self._lock:
            line = encode_line(Record(seq=self._seq + 1, event=event))
            record = decode_line(line)  # before anything is written: what cannot be read back may not be there
            assert record is not None
            if durable or sum(map(len, self._buffer)) > BUFFER_BYTES:
                self._write(b"".join([*self._buffer, line]))
                self._buffer = []
            else:
                self._buffer.append(line)
            self._seq += 1
            self._size += len(line)
            return record

    def roll(self, head: Callable[[], tuple[Event, ...]]) -> tuple[Record, ...]:
        """See ports.Journal. Keeps the newest `keep` segments."""
        with self._lock:
            if self._size < self.segment_bytes:
                return ()
            if self._buffer:
                self._write(b"".join(self._buffer))
                self._buffer = []
            written = tuple(Record(seq=self._seq + n, event=event) for n, event in enumerate(head(), start=1))
            data = b"".join(encode_line(record) for record in written)
            begins = self._next
            self._write(data)
            self._seq, self._size = written[-1].seq, len(data)
            self._begun(begins)
            return written

    def _begun(self, number: int) -> None:
        """A segment begins at chunk `number`; whoever reads before that is known only reads more."""
        assert self._lease.terms is not None
        heads = (*self._lease.terms.heads, number)[-self.keep :]
        try:
            self._lease.moved(heads)
            old = [name for name in self.store.names(FOLDER) if name < chunk(heads[0])]
            self.store.delete(FOLDER, old)
        except Transient:
            return  # the next roll does it

    def close(self) -> None:
        """Write what nobody waited for, and give the lease back."""
        with self._lock:
            try:
                if self._buffer:
                    self._write(b"".join(self._buffer))
            except PortError:
                pass  # it was not durable
            finally:
                self._lease.release()

    def _write(self, body: bytes) -> None:
        """One more chunk. Raises Reread when there is one that was thought lost, or that came at the last moment."""
        self._lease.check()
        name = f"{FOLDER}/{chunk(self._next)}"
        try:
            self.store.create(name, body)
        except Changed:
            found = self.store.get(name)
            if found is None or found.body != body:
                self._lost()
        self._next += 1

    def _lost(self) -> None:
        assert self._lease.terms is not None
        self._lease.renew(self._lease.terms)
        raise Reread(f"{self.store.name}: the journal holds more than was learnt; it is read again", "journal_reread")
