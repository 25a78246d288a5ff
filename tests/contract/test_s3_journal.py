"""One writer of a journal in S3: the suite of the port, the lease, and what keeps an old controller from writing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autoscaler.adapters import journal as files
from autoscaler.adapters import s3_journal, s3_lease
from autoscaler.adapters.journals import open_journal
from autoscaler.adapters.s3_journal import S3Journal, read_all
from autoscaler.adapters.s3_lease import TTL_S, Lease
from autoscaler.adapters.s3_store import Store, parse
from autoscaler.ports import Journal, Misconfigured, Reread, Superseded, Transient
from tests.contract.test_journal_contract import (
    head,
    note,
    test_records_come_back_in_order_and_numbered_from_one,
    test_text_of_any_kind_survives,
    test_threads_share_one_numbering,
)
from tests.s3_fake import FakeS3

__all__ = [
    "test_records_come_back_in_order_and_numbered_from_one",
    "test_text_of_any_kind_survives",
    "test_threads_share_one_numbering",
]


@dataclass
class Rig:
    """A bucket, a clock for it and for those who use it."""

    at_s: float = 1_000_000.0
    s3: FakeS3 = field(init=False)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.s3 = FakeS3(lambda: self.at_s)
        self.store = self.s3.store()

    def open(self, who: str = "a", **changes: int) -> S3Journal:
        made = S3Journal(self.store, Lease(self.store, lambda: self.at_s, who), **changes)
        made.read()
        return made


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def journal(rig: Rig) -> Journal:
    """The port's suite reads at once what was not durable: here every event is written by being read."""

    class Durable(S3Journal):
        def append(self, event, *, durable):  # type: ignore[no-untyped-def]
            return super().append(event, durable=True)

    return Durable(rig.store, Lease(rig.store, lambda: rig.at_s, "a"))


def seqs(store: Store) -> list[int]:
    return [record.seq for record in read_all(store)]


# ---- one writer -----------------------------------------------------------------------------------------------------
def test_a_second_controller_is_kept_out_and_told_who_writes(rig: Rig) -> None:
    rig.open("process 7 on head")
    rig.at_s += 20.0
    with pytest.raises(Misconfigured, match=r"another controller .*process 7 on head \(epoch 1, renewed 20 s ago\)"):
        rig.open("b")


def test_a_lease_given_back_is_had_at_once_and_one_left_behind_after_its_time(rig: Rig) -> None:
    rig.open("a").close()
    assert s3_lease.holder(rig.store).startswith("nobody; a left 0 s ago")
    assert rig.open("b").epoch == 2
    rig.at_s += TTL_S + 1.0
    assert "late: it may be taken over" in s3_lease.holder(rig.store)
    assert rig.open("c").epoch == 3


def test_two_that_take_over_at_once_are_not_both_right(rig: Rig) -> None:
    rig.open("a")
    rig.at_s += TTL_S + 1.0

    def other_is_faster(method: str, key: str, done: bool) -> None:
        if method == "PUT" and not done:
            rig.s3.trouble = lambda *_: None
            rig.open("b")

    rig.s3.trouble = other_is_faster
    with pytest.raises(Misconfigured, match="another controller writes this journal: b"):
        rig.open("c")


def test_who_was_superseded_writes_nothing_and_may_not_act(rig: Rig) -> None:
    old = rig.open("a")
    old.append(note(1), durable=True)
    rig.at_s += TTL_S + 1.0
    new = rig.open("b")
    new.append(note(2), durable=True)
    for act in (old.check, lambda: old.append(note(3), durable=True)):
        with pytest.raises(Superseded, match=r"epoch 1 is over: .* written by b \(epoch 2"):
            act()
    old.close()
    assert [record.event for record in read_all(rig.store)] == [note(1), note(2)]
    new.append(note(4), durable=True)


def test_a_write_under_way_during_the_takeover_is_read_by_the_new_controller(rig: Rig) -> None:
    old = rig.open("a")
    late: list[S3Journal] = []

    def pause(method: str, key: str, done: bool) -> None:
        if key.endswith(".jsonl") and method == "PUT" and not done:
            rig.s3.trouble = lambda *_: None
            rig.at_s += TTL_S + 1.0  # the old controller stands still inside its call
            late.append(rig.open("b"))

    rig.s3.trouble = pause
    old.append(note(1), durable=True)  # it lands after the new one has read the journal
    (new,) = late
    with pytest.raises(Reread):
        new.append(note(2), durable=True)
    assert [record.event for record in new.read()] == [note(1)]
    new.append(note(2), durable=True)
    with pytest.raises(Superseded):
        old.check()
    assert [record.event for record in read_all(rig.store)] == [note(1), note(2)]


def test_renewing_costs_two_small_writes_a_minute_at_most_four(rig: Rig) -> None:
    journal = rig.open("a")
    rig.s3.log.clear()
    for tick in range(60):
        rig.at_s += 10.0
        journal.append(note(tick), durable=True)
    assert sum(key.endswith(s3_lease.NAME) for _, key, _ in rig.s3.log) <= 40


# ---- answers that are lost ------------------------------------------------------------------------------------------
def test_a_write_whose_answer_was_lost_is_found_and_the_controller_reads_again(rig: Rig) -> None:
    journal = rig.open("a")
    journal.append(note(1), durable=False)
    rig.s3.lost = ["PUT"]
    with pytest.raises(Transient):
        journal.append(note(2), durable=True)
    with pytest.raises(Reread):
        journal.append(note(3), durable=True)
    assert [record.event for record in journal.read()] == [note(1), note(2)]
    journal.append(note(3), durable=True)
    assert seqs(rig.store) == [1, 2, 3]


def test_a_write_that_was_not_done_leaves_no_trace(rig: Rig) -> None:
    journal = rig.open("a")
    journal.append(note(1), durable=False)
    rig.s3.refuse = {"PUT": (503, "SlowDown")}
    with pytest.raises(Transient):
        journal.append(note(2), durable=True)
    rig.s3.refuse = {}
    assert journal.append(note(3), durable=True).seq == 2
    assert [record.event for record in read_all(rig.store)] == [note(1), note(3)]


def test_a_lease_whose_answers_were_lost_is_still_held(rig: Rig) -> None:
    rig.s3.lost = ["PUT"]
    journal = rig.open("a")
    assert journal.epoch == 1
    rig.at_s += 20.0
    rig.s3.lost = ["PUT"]
    journal.check()
    rig.at_s += 20.0
    journal.check()
    journal.append(note(1), durable=True)


def test_nobody_acts_on_a_lease_that_cannot_be_renewed(rig: Rig) -> None:
    journal = rig.open("a")
    rig.s3.refuse = {"PUT": (500, "InternalError")}
    rig.at_s += 20.0
    journal.check()
    rig.at_s += 20.0
    with pytest.raises(Transient):
        journal.check()


# ---- what lies there ------------------------------------------------------------------------------------------------
def test_what_was_not_durable_is_written_with_the_next_that_is(rig: Rig) -> None:
    journal = rig.open("a")
    journal.append(note(1), durable=False)
    assert list(read_all(rig.store)) == []
    journal.append(note(2), durable=True)
    journal.append(note(3), durable=False)
    journal.close()
    assert seqs(rig.store) == [1, 2, 3]


def test_a_full_segment_begins_a_new_one_and_old_ones_go(rig: Rig) -> None:
    journal = rig.open("a", segment_bytes=600, keep=2)
    for n in range(40):
        journal.append(note(n), durable=True)
        journal.roll(lambda n=n: head(float(n)))  # type: ignore[misc]
    kept = seqs(rig.store)
    assert kept == list(range(kept[0], kept[-1] + 1))
    assert kept[0] > 20
    journal.close()
    again = rig.open("b")
    newest = list(again.read())
    assert [record.event.kind for record in newest[:3]] == ["opened", "configured", "snapshot"]
    assert again.append(note(99), durable=True).seq == kept[-1] + 1


def test_pages_and_many_chunks_come_back_in_order(rig: Rig) -> None:
    rig.s3.page = 7
    journal = rig.open("a")
    for n in range(40):
        journal.append(note(n), durable=True)
    assert seqs(rig.store) == list(range(1, 41))


def test_fetched_into_a_folder_it_is_a_journal_on_disk(rig: Rig, tmp_path: Path) -> None:
    journal = rig.open("a")
    for n in range(5):
        journal.append(note(n), durable=n % 2 == 0)
    for key, (body, _, _) in rig.s3.objects.items():
        if key.endswith(".jsonl"):
            (tmp_path / Path(key).name).write_bytes(body)
    assert list(files.read_all(tmp_path)) == list(read_all(rig.store))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda body: body[:-5], r"journal/000000000002\.jsonl:1: journal damaged: a line is unreadable"),
        (lambda body: b"", r"journal/000000000003\.jsonl:1: journal damaged: number 3 follows 1"),
    ],
)
def test_damage_is_named_by_object_and_line(rig: Rig, spoil: Callable[[bytes], bytes], words: str) -> None:
    journal = rig.open("a")
    for n in range(3):
        journal.append(note(n), durable=True)
    key = f"prod/{s3_journal.FOLDER}/{s3_journal.chunk(2)}"
    rig.s3.objects[key] = (spoil(rig.s3.objects[key][0]), *rig.s3.objects[key][1:])
    with pytest.raises(Misconfigured, match=words):
        list(read_all(rig.store))


# ---- bad input ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "NoSuchBucket", "correct the bucket, its region or the permissions"),
        (403, "AccessDenied", "AccessDenied it is"),
        (400, "ExpiredToken", "ExpiredToken it is"),
        (301, "PermanentRedirect", "correct the bucket"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_said_before_anything_starts(
    rig: Rig, status: int, code: str, words: str
) -> None:
    rig.s3.refuse = {"GET": (status, code)}
    with pytest.raises(Misconfigured, match=words):
        rig.open("a")


def test_a_lease_that_is_none_is_named(rig: Rig) -> None:
    rig.s3.objects["prod/lease.json"] = (b"<html>", '"x"', 0.0)
    with pytest.raises(Misconfigured, match=r"prod/lease\.json: not a lease"):
        rig.open("a")


def test_an_address_needs_a_prefix_and_a_place_without_a_journal_is_said(rig: Rig) -> None:
    assert parse("s3://bucket/prod/east/") == ("bucket", "prod/east")
    for place in ("s3://", "s3://bucket", "s3://bucket/"):
        with pytest.raises(Misconfigured, match="give s3://BUCKET/PREFIX"):
            parse(place)
    with pytest.raises(Misconfigured, match="no journal here"):
        list(read_all(rig.store))


def test_a_folder_says_who_writes_it_and_counts_its_writers(tmp_path: Path) -> None:
    assert files.holder(tmp_path) == "nobody yet"
    for epoch in (1, 2):
        journal = open_journal(tmp_path)
        assert journal.epoch == epoch
        journal.check()
        assert files.holder(tmp_path).endswith(f"epoch {epoch}")
        journal.close()
    assert files.holder(tmp_path).startswith("nobody; the last was process ")
