"""A journal wherever it lies: a folder, or ``s3://bucket/prefix``. May not know more of either than its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autoscaler.adapters import journal as files
from autoscaler.core.events import Record

if TYPE_CHECKING:
    from autoscaler.adapters.s3_journal import S3Journal

Place = Path | str  # text is an address in S3


def open_journal(place: Place) -> files.FileJournal | S3Journal:
    """The journal at `place`, for its one writer. Raises Misconfigured that names the present one, Transient."""
    if isinstance(place, Path):
        return files.FileJournal(place)
    from autoscaler.adapters import s3_journal, s3_store

    return s3_journal.S3Journal(s3_store.connect(place))


def read_journal(place: Place) -> Iterator[Record]:
    """Every record that is still kept, oldest first; nothing is changed. Raises Misconfigured, Transient."""
    if isinstance(place, Path):
        return files.read_all(place)
    from autoscaler.adapters import s3_journal, s3_store

    return s3_journal.read_all(s3_store.connect(place))


def holder(place: Place) -> str:
    """Who writes the journal at `place`, in words. Raises Misconfigured, Transient."""
    if isinstance(place, Path):
        return files.holder(place)
    from autoscaler.adapters import s3_lease, s3_store

    return s3_lease.holder(s3_store.connect(place))
