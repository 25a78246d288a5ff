"""Who follows a journal sees each record once, across segments, and never half a line."""

from __future__ import annotations

from pathlib import Path

from autoscaler.adapters.journal import FileJournal, encode_line
from autoscaler.adapters.tail import Tail
from autoscaler.core.events import Opened, Record


def opened(at_s: float) -> Opened:
    return Opened(at_s=at_s, run_id="r", schema_version=1, versions=())


def seen(tail: Tail) -> list[int]:
    return [record.seq for record in tail.look()]


def test_each_record_is_seen_once_and_in_order_across_segments(tmp_path: Path) -> None:
    journal, tail = FileJournal(tmp_path, segment_bytes=1), Tail(tmp_path)
    assert seen(tail) == []
    journal.append(opened(1.0), durable=False)
    journal.append(opened(2.0), durable=False)
    assert seen(tail) == [1, 2]
    journal.append(opened(3.0), durable=False)
    journal.roll(lambda: (opened(4.0),))
    journal.append(opened(5.0), durable=False)
    assert seen(tail) == [3, 4, 5], "the end of the old segment, then the new one"
    assert seen(tail) == []
    journal.close()


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path, tail = tmp_path / "00000001.jsonl", Tail(tmp_path)
    first, second = (encode_line(Record(seq=n, event=opened(float(n)))) for n in (1, 2))
    path.write_bytes(first + second[:20])
    assert seen(tail) == [1]
    assert seen(tail) == []
    path.write_bytes(first + second)
    assert seen(tail) == [2]
