"""ports.Journal on memory and on files; and what only files can suffer: kill -9, torn writes, damage, a full disk."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from autoscaler.adapters import journal as files
from autoscaler.adapters.journal import FileJournal, MemoryJournal, read_all
from autoscaler.core.beliefs import EMPTY
from autoscaler.core.events import Configured, LaunchTried, Opened, PolicyRefused, Snapshot
from autoscaler.core.snapshot import save
from autoscaler.ports import Journal, Misconfigured, Transient
from chaos.swarm.promises import keep
from policies.model import PolicySet


def note(number: int, text: str = "") -> PolicyRefused:
    return PolicyRefused(at_s=float(number), problems=(f"note {number}{text}",))


def head(at_s: float) -> tuple[Opened, Configured, Snapshot]:
    return (
        Opened(at_s=at_s, run_id="r", schema_version=1, versions=()),
        Configured(at_s=at_s, policy=PolicySet(units=()), shapes=(), digest="d"),
        Snapshot(at_s=at_s, beliefs_json=save(EMPTY)),
    )


@pytest.fixture(params=["memory", "files"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    if request.param == "memory":
        yield MemoryJournal()
    else:
        journal = FileJournal(tmp_path / "journal")
        yield journal
        journal.close()


def test_records_come_back_in_order_and_numbered_from_one(journal: Journal) -> None:
    numbers = [journal.append(note(n), durable=n % 2 == 0).seq for n in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    assert [(record.seq, record.event) for record in journal.read()] == [(n + 1, note(n)) for n in range(5)]


def test_text_of_any_kind_survives(journal: Journal) -> None:
    event = PolicyRefused(at_s=0.1 + 0.2, problems=("line\nbreak \r \x1e ü 容量",))
    written = journal.append(event, durable=True)
    assert list(journal.read()) == [written]
    assert written.event == event


def test_files_give_back_what_they_hold_and_write_nothing_that_could_not_be_read(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    whole = PolicyRefused(at_s=3, problems=())
    written = journal.append(whole, durable=True)
    assert isinstance(written.event.at_s, float)  # as a replay will see it
    with pytest.raises(ValidationError):
        journal.append(PolicyRefused(at_s=float("nan"), problems=()), durable=True)
    assert list(journal.read()) == [written]


def test_threads_share_one_numbering(journal: Journal) -> None:
    def write(thread: int) -> None:
        for n in range(50):
            journal.append(note(thread * 1000 + n), durable=False)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = list(journal.read())
    assert [record.seq for record in records] == list(range(1, 201))
    assert {record.event.at_s for record in records} == {t * 1000.0 + n for t in range(4) for n in range(50)}


def test_it_does_not_roll_before_it_is_full(journal: Journal) -> None:
    journal.append(note(1), durable=True)

    def never() -> tuple[Opened, ...]:
        raise AssertionError("head was asked for")

    assert journal.roll(never) == ()


# ---- files ----------------------------------------------------------------------------------------------------------
def fill(folder: Path, count: int) -> None:
    journal = FileJournal(folder)
    for n in range(count):
        journal.append(note(n), durable=True)
    journal.close()


def test_a_restart_goes_on_numbering(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    journal = FileJournal(tmp_path)
    assert journal.repaired == ""
    assert journal.append(note(9), durable=True).seq == 4


def test_a_full_segment_makes_room_for_a_new_one_that_stands_alone(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, segment_bytes=400, keep=2)
    rolled = 0
    for n in range(40):
        journal.append(note(n, "x" * 100), durable=True)
        rolled += bool(journal.roll(lambda: head(0.0)))
    assert rolled > 3
    kinds = [record.event.kind for record in journal.read()]
    assert kinds[:3] == ["opened", "configured", "snapshot"]
    assert len(files.segments(tmp_path)) == 2
    kept = [record.seq for record in read_all(tmp_path)]
    assert kept == list(range(kept[0], kept[0] + len(kept)))
    journal.close()
    assert FileJournal(tmp_path).append(note(99), durable=True).seq == kept[-1] + 1


def test_a_torn_tail_is_cut_off_at_every_length(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / "00000001.jsonl"
    whole = path.read_bytes()
    last = whole[: whole.rindex(b"\n", 0, -1) + 1]
    for cut in range(len(last) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert [record.seq for record in read_all(tmp_path)] == [1, 2]
        journal = FileJournal(tmp_path)
        assert f"cut {cut - len(last)} bytes" in journal.repaired
        assert journal.append(note(7), durable=True).seq == 3
        journal.close()
        assert [record.event.at_s for record in read_all(tmp_path)] == [0.0, 1.0, 7.0]


def test_zeros_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    path = tmp_path / "00000001.jsonl"
    path.write_bytes(path.read_bytes() + b"\0" * 512 + b"\n" + b"\0" * 10)
    journal = FileJournal(tmp_path)
    assert journal.repaired
    assert [record.seq for record in journal.read()] == [1, 2]


@pytest.mark.parametrize("first", [b"", b"0", b"0123abcd", b"0123abcd ", b'0123abcd {"seq":1,', b"\0" * 700], ids=repr)
def test_a_first_write_that_was_cut_is_no_journal_to_read_but_one_to_go_on_with(first: bytes, tmp_path: Path) -> None:
    (tmp_path / "00000001.jsonl").write_bytes(first)
    with pytest.raises(Misconfigured) as said:
        list(read_all(tmp_path))
    assert str(said.value) == f"{tmp_path}: no whole record in 00000001.jsonl; give the folder of a journal"
    journal = FileJournal(tmp_path)
    assert journal.append(note(1), durable=True).seq == 1
    journal.close()
    assert [record.seq for record in read_all(tmp_path)] == [1]


@pytest.mark.parametrize(
    "first", [random.Random(1).randbytes(10_000), b"a,b\n1,2\n", b"0123abcd;"], ids=["noise", "table", "9"]
)
def test_what_never_was_a_journal_is_neither_read_nor_written_over(first: bytes, tmp_path: Path) -> None:
    path = tmp_path / "00000001.jsonl"
    path.write_bytes(first)
    with pytest.raises(Misconfigured, match="no whole record in 00000001"):
        list(read_all(tmp_path))
    with pytest.raises(Misconfigured, match=r"00000001\.jsonl:1: journal damaged: it begins with something else"):
        FileJournal(tmp_path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_segment_that_is_no_regular_file_is_named(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "00000001.jsonl")
    for use in (lambda: list(read_all(tmp_path)), lambda: FileJournal(tmp_path)):
        with pytest.raises(
            Misconfigured, match=r"00000001\.jsonl: is not a regular file; give the folder of a journal"
        ):
            use()


def test_a_wrong_checksum_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / "00000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"note", b"nope") + lines[2])
    with pytest.raises(Misconfigured, match=r"00000001\.jsonl:2: journal damaged: a line is unreadable"):
        FileJournal(tmp_path)
    with pytest.raises(Misconfigured, match=r"00000001\.jsonl:2"):
        list(read_all(tmp_path))


def test_a_lost_line_is_noticed(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    path = tmp_path / "00000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(Misconfigured, match=r":2: journal damaged: number 3 is out of order"):
        FileJournal(tmp_path)


def test_a_lost_segment_is_noticed(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, segment_bytes=10)
    for n in range(3):
        journal.append(note(n), durable=True)
        journal.roll(lambda: head(0.0))
    (tmp_path / "00000002.jsonl").unlink()
    with pytest.raises(Misconfigured, match="a segment is missing"):
        list(read_all(tmp_path))


def test_a_second_controller_is_kept_out(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    with pytest.raises(
        Misconfigured, match=rf"another controller \(process {os.getpid()} on [^,]+, epoch 1\) writes this journal"
    ):
        FileJournal(tmp_path)
    journal.close()
    FileJournal(tmp_path).close()


def test_a_folder_without_a_journal_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no journal here"):
        list(read_all(tmp_path))


def test_a_folder_that_cannot_be_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match="cannot keep a journal here"):
        FileJournal(tmp_path / "file" / "journal")


def test_a_full_disk_is_transient_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = FileJournal(tmp_path)
    journal.append(note(1), durable=True)
    write = os.write
    room = [10]

    def nearly_full(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] = 0
        return written

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(Transient, match="the disk is full: free some space"):
        journal.append(note(2), durable=True)
    monkeypatch.undo()
    assert journal.append(note(3), durable=True).seq == 2
    assert [record.event.at_s for record in journal.read()] == [1.0, 3.0]


# ---- a process of its own -------------------------------------------------------------------------------------------
KILLS = int(os.environ.get("QM_JOURNAL_KILLS", "40"))
SMALL_SEGMENT, FEW = 4_000, 24


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A real process that does `work` and tells by a pipe, whose other end is returned with its number."""
    hears, tells = os.pipe()
    child = os.fork()
    if child:
        os.close(tells)
        return child, hears
    try:
        os.close(hears)
        work(tells)
    finally:
        os._exit(0)


def intents(folder: Path, run: int) -> Callable[[int], None]:
    """Write launch intents that are durable, each told when it is, among notes that are not, over many segments."""

    def work(tells: int) -> None:
        journal = FileJournal(folder, segment_bytes=SMALL_SEGMENT, keep=FEW)
        for number in range(100_000):
            token = f"{run}/{number}"
            journal.append(LaunchTried(at_s=1.0, intent=token, token=token, offering="a", count=1), durable=True)
            os.write(tells, f"{token}\n".encode())
            journal.append(note(number, "y" * (number % 4) * 700), durable=False)
            journal.roll(lambda: head(1.0))

    return work


def test_kill_9_while_it_writes_loses_no_intent_and_leaves_nothing_unreadable(tmp_path: Path) -> None:
    """Many times over one folder, in writes and in changes of the segment; `$QM_JOURNAL_KILLS` says how often."""
    luck, last, segments = random.Random(9), 0, set[str]()
    for run in range(KILLS):
        child, hears = forked(intents(tmp_path, run))
        told = os.read(hears, 100)  # it writes now
        threading.Event().wait(luck.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(hears, 100_000):
            told += more
        os.close(hears)
        records = list(read_all(tmp_path))
        kept = [record.event.token for record in records if isinstance(record.event, LaunchTried)]
        promised = [
            token for token in told.decode().split("\n")[:-1] if int(token.split("/")[1]) >= first_kept(kept, run)
        ]
        assert promised, "something was promised and is still kept"
        assert set(promised) <= set(kept)
        assert [record.seq for record in records] == list(range(records[0].seq, records[-1].seq + 1))
        assert records[-1].seq > last
        last = records[-1].seq
        segments |= {path.name for path in files.segments(tmp_path)}
        FileJournal(tmp_path).close()  # what is torn is cut off, and the lock is free
    assert len(segments) > KILLS // 4
    keep("journal", {"kills": KILLS, "lost": 0})


def first_kept(kept: list[str], run: int) -> int:
    """The first intent of a run that is in segments which are still kept."""
    return min((int(token.split("/")[1]) for token in kept if token.split("/")[0] == str(run)), default=0)


def test_a_disk_that_is_really_full_fails_the_write_and_nothing_else(tmp_path: Path) -> None:
    """The system's own limit on a file's length: it writes a part of the line, then nothing."""

    def work(tells: int) -> None:
        journal = FileJournal(tmp_path)
        journal.append(note(1), durable=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal._size + 30, resource.RLIM_INFINITY))
        said = ""
        for number in range(3):
            try:
                journal.append(note(number), durable=True)
            except Transient as error:
                said += f"{error.code} {error}\n"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(tells, f"{said}{journal.append(note(4), durable=True).seq}".encode())

    child, hears = forked(work)
    os.waitpid(child, 0)
    said = os.read(hears, 10_000).decode().split("\n")
    os.close(hears)
    assert said[-1] == "2"
    assert len(said) == 4
    assert all(f"journal_unwritable {tmp_path}" in line and "cannot write the journal: " in line for line in said[:3])
    assert [record.event.at_s for record in read_all(tmp_path)] == [1.0, 4.0]
