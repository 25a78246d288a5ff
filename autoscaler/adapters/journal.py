"""The journal as files: a folder of segments ``NNNNNNNN.jsonl``, one event a line, each with its checksum.

A line is ``CRC32 of the JSON (8 hex digits), space, JSON of events.Record``. A segment after the first begins with
Opened, Configured and Snapshot, written to disk as one file, so that a restart folds the newest segment only. A lock
file keeps a second writer out and says who the first is. May not interpret events.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

from pydantic import ValidationError

from autoscaler.core.events import RECORD, Event, Record
from autoscaler.ports import Misconfigured, Transient

SEGMENT_BYTES = 16 * 2**20  # folded in 3 s on one core, by which a restart is blind
SEGMENTS_KEPT = 64
LOOK_S = 0.02


def encode_line(record: Record) -> bytes:
    """One journal line, with its newline."""
    body = RECORD.dump_json(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode_line(line: bytes) -> Record | None:
    """The record of a line with its newline, or None when the line is torn or its checksum is wrong."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        return None
    return RECORD.validate_json(body)


@dataclass(frozen=True, slots=True)
class Segment:
    """What a segment file holds: its records, and where its readable part ends (`bytes`)."""

    records: tuple[Record, ...]
    readable_bytes: int
    torn_bytes: int


def read_segment(path: Path, *, newest: bool) -> Segment:
    """Read one segment. Unreadable lines at the end of the newest one are a torn tail; anywhere else they are damage.

    Raises Misconfigured naming file and line for damage, a gap in the numbering, or a record of another schema.
    """
    records: list[Record] = []
    bad_line, readable, size = 0, 0, 0
    for number, line in enumerate(_content(path).splitlines(keepends=True), start=1):
        size += len(line)
        record = _decode(path, number, line)
        if record is None:
            bad_line = bad_line or number
            continue
        if bad_line or (records and record.seq != records[-1].seq + 1):
            _damaged(
                path, bad_line or number, "a line is unreadable" if bad_line else f"number {record.seq} is out of order"
            )
        records.append(record)
        readable = size
    if bad_line and not newest:
        _damaged(path, bad_line, "a line is unreadable")
    return Segment(tuple(records), readable, size - readable)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Misconfigured(f"{path}: {error.strerror}; make it readable", "journal_unreadable") from error


def _decode(path: Path, number: int, line: bytes) -> Record | None:
    try:
        return decode_line(line)
    except ValidationError as error:
        _damaged(path, number, f"not a record of this version ({error.errors()[0]['msg']})")


def _damaged(path: Path, number: int, what: str) -> Never:
    raise Misconfigured(
        f"{path}:{number}: journal damaged: {what}; keep the folder for inspection and start with another one",
        "journal_damaged",
    )


def segments(folder: Path) -> list[Path]:
    """The segment files of a journal folder, oldest first. Raises Misconfigured when it is no journal."""
    paths = _numbered(folder)
    if not paths:
        raise Misconfigured(
            f"{folder}: no journal here (no NNNNNNNN.jsonl); give the folder that `qm run --journal` wrote",
            "no_journal",
        )
    return paths


def _numbered(folder: Path) -> list[Path]:
    """What is named like a segment. Raises Misconfigured for anything but a regular file, which could block a read."""
    paths = sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())
    for path in paths:
        if not path.is_file():
            raise Misconfigured(f"{path}: is not a regular file; give the folder of a journal", "no_journal")
    return paths


def read_all(folder: Path) -> Iterator[Record]:
    """Every record that is still kept, oldest first; a torn tail is left out. Needs no lock, changes nothing.

    Raises Misconfigured as `segments` and `read_segment` do, and when there is not one whole record.
    """
    paths = segments(folder)
    seq = None
    for path in paths:
        for number, record in enumerate(read_segment(path, newest=path == paths[-1]).records, start=1):
            if seq is not None and record.seq != seq + 1:
                _damaged(path, number, f"number {record.seq} follows {seq}: a segment is missing")
            seq = record.seq
            yield record
    if seq is None:
        raise Misconfigured(
            f"{folder}: no whole record in {paths[-1].name}; give the folder of a journal", "no_journal"
        )


class FileJournal:
    """ports.Journal and ports.Tenure in a folder. Thread-safe. `repaired` says what was cut off a torn tail on opening,
    or is empty; `epoch` counts the writers that the folder has had.

    Without `sync` what is durable is only handed to the system: a simulated run loses nothing that a new one does not
    write again.

    Raises Misconfigured when the folder cannot be written, is damaged, or belongs to a running controller.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, keep: int = SEGMENTS_KEPT, sync: bool = True
    ) -> None:
        self.folder, self.segment_bytes, self.keep, self.sync = folder, segment_bytes, keep, sync
        self.repaired = ""
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_file, self.epoch = _lock_folder(folder)
            self._resume()
        except OSError as error:
            raise Misconfigured(
                f"{folder}: cannot keep a journal here: {error.strerror}", "journal_unwritable"
            ) from error

    def _resume(self) -> None:
        paths = _numbered(self.folder)
        self._path = paths[-1] if paths else self.folder / f"{1:08d}.jsonl"
        self._seq, self._size = 0, 0
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _sync_folder(self.folder)
        segment = read_segment(self._path, newest=True)
        if segment.torn_bytes:
            if not segment.records and not _unfinished(os.pread(self._fd, 10, 0)):
                _damaged(self._path, 1, "it begins with something else than a record")
            os.ftruncate(self._fd, segment.readable_bytes)
            os.fsync(self._fd)
            self.repaired = (
                f"{self._path}: cut {segment.torn_bytes} bytes of an unfinished write after line {len(segment.records)}"
            )
        self._size = segment.readable_bytes
        self._unread: tuple[Record, ...] | None = segment.records
        if segment.records:
            self._seq = segment.records[-1].seq

    def close(self) -> None:
        """Give the folder free. Nothing is lost without it: every append has already been handed to the system."""
        with self._lock:
            if self._fd >= 0:
                os.fsync(self._fd)
                os.close(self._fd)
                os.close(self._lock_file)
                self._fd = -1

    def check(self) -> None:
        """See ports.Tenure: the system keeps the lock for as long as this process lives."""

    def append(self, event: Event, *, durable: bool) -> Record:
        """See ports.Journal."""
        with self._lock:
            line = encode_line(Record(seq=self._seq + 1, event=event))
            record = decode_line(line)  # before anything is written: what cannot be read back may not be there
            assert record is not None
            try:
                _write(self._fd, line)
                if durable and self.sync:
                    os.fsync(self._fd)
            except OSError as error:
                self._undo()
                raise _cannot_write(self._path, error) from error
            self._size += len(line)
            self._seq += 1
            self._unread = None
            return record

    def _undo(self) -> None:
        """Take back a partial line, so that the next append does not make it damage in the middle."""
        os.ftruncate(self._fd, self._size)

    def read(self) -> Iterator[Record]:
        """See ports.Journal: the newest segment, which begins with all beliefs up to then."""
        with self._lock:
            known, self._unread = self._unread, None
            return iter(read_segment(self._path, newest=True).records if known is None else known)

    def roll(self, head: Callable[[], tuple[Event, ...]]) -> tuple[Record, ...]:
        """See ports.Journal. Keeps the newest `keep` segments."""
        with self._lock:
            if self._size < self.segment_bytes:
                return ()
            records = tuple(Record(seq=self._seq + n, event=event) for n, event in enumerate(head(), start=1))
            path = self.folder / f"{int(self._path.stem) + 1:08d}.jsonl"
            data = b"".join(encode_line(record) for record in records)
            try:
                os.fsync(self._fd)
                fd = _create_whole(path, data)
            except OSError as error:
                raise _cannot_write(path, error) from error
            os.close(self._fd)
            self._path, self._fd, self._size, self._seq = path, fd, len(data), records[-1].seq
            for old in segments(self.folder)[: -self.keep]:
                old.unlink()
            return records


def _unfinished(first: bytes) -> bool:
    """Whether the first ten bytes of a file can be those of a journal's first line, or zeros that a power cut left."""
    line = set(first[:8]) <= set(b"0123456789abcdef") and b" {".startswith(first[8:])
    return line or not first.strip(b"\0")


def _create_whole(path: Path, data: bytes) -> int:
    """A file that holds all of `data` or does not exist; returns it open for appending."""
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _write(fd, data)
        os.fsync(fd)
        partial.rename(path)
        _sync_folder(path.parent)
    except OSError:
        os.close(fd)
        raise
    return fd


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock_folder(folder: Path) -> tuple[int, int]:
    """The lock, held, and the number of its holders so far."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    before = os.pread(fd, 200, 0).decode(errors="replace").strip()
    if not _locked(fd):
        os.close(fd)
        raise Misconfigured(
            f"{folder}: another controller ({before or 'unknown'}) writes this journal; stop it, or give another "
            "--journal",
            "journal_locked",
        )
    found = re.search(r"epoch (\d+)", before)
    epoch = int(found[1]) + 1 if found else 1
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}, epoch {epoch}\n".encode(), 0)
    return fd, epoch


def _locked(fd: int) -> bool:
    """Whether the lock could be had; who only looks at it (`holder`) has it for a moment."""
    for last in (False, False, True):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if not last:
            time.sleep(LOOK_S)
    return False


def holder(folder: Path) -> str:
    """Who writes the journal of a folder, in words."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return "nobody yet"
    try:
        last = os.pread(fd, 200, 0).decode(errors="replace").strip() or "somebody"
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return f"nobody; the last was {last}"
    except BlockingIOError:
        return last
    finally:
        os.close(fd)


def _cannot_write(path: Path, error: OSError) -> Transient:
    remedy = "the disk is full: free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
    return Transient(
        f"{path}: cannot write the journal: {remedy}; nothing is acted on until it can", "journal_unwritable"
    )


@dataclass
class MemoryJournal:
    """ports.Journal in memory, for the simulated world: nothing survives the process.

    `records` is everything, or everything since the last roll when there are more than `segment_records`.
    """

    records: list[Record] = field(default_factory=list)
    segment_records: int | None = None
    _seq: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, event: Event, *, durable: bool) -> Record:  # noqa: ARG002
        """See ports.Journal; memory is as durable as it gets here, and gives back the very event."""
        with self._lock:
            self._seq += 1
            record = Record(seq=self._seq, event=event)
            self.records.append(record)
            return record

    def read(self) -> Iterator[Record]:
        """See ports.Journal."""
        return iter(tuple(self.records))

    def roll(self, head: Callable[[], tuple[Event, ...]]) -> tuple[Record, ...]:
        """See ports.Journal. What came before the new head is forgotten."""
        with self._lock:
            if self.segment_records is None or len(self.records) < self.segment_records:
                return ()
            records = tuple(Record(seq=self._seq + n, event=event) for n, event in enumerate(head(), start=1))
            self.records, self._seq = list(records), records[-1].seq
            return records
