"""Cumulative counters of gateways become offered load: restarts, silence and idleness each read as what they are."""

from __future__ import annotations

import pytest

from autoscaler.adapters.prometheus import GatewayMetrics
from autoscaler.core.model import Idle, Measured, Missing, ServiceLoad
from autoscaler.ports import Transient
from serve_apps.wire import GatewayReport, ServiceCounters, encode

CHAT = "support/chat"


class Board:
    """What the board holds: a report and the instant it came, per gateway."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.rows: dict[str, tuple[float, bytes]] = {}
        self.metrics = GatewayMetrics(lambda: {k: (self.now_s - at_s, raw) for k, (at_s, raw) in self.rows.items()})

    def report(self, gateway: str, seq: int, **counters: int) -> None:
        row = ServiceCounters.model_validate({"service": CHAT, **counters})
        # Each gateway has a clock of its own, far from ours.
        report = GatewayReport(gateway_id=gateway, seq=seq, sent_at_s=self.now_s - 777.0, services=(row,))
        self.rows[gateway] = (self.now_s, encode(report))

    def chat(self) -> ServiceLoad:
        (load,) = self.metrics.loads(self.now_s)
        assert load.service == CHAT
        return load


@pytest.fixture
def board() -> Board:
    return Board()


def value(signal: object) -> float:
    assert isinstance(signal, Measured), signal
    return signal.value


def test_nobody_reports_is_transient(board: Board) -> None:
    with pytest.raises(Transient, match="no gateway"):
        board.metrics.loads(board.now_s)


def test_one_report_gives_no_rate_yet(board: Board) -> None:
    board.report("g1", 1, arrivals=500)
    assert isinstance(board.chat().arrival_rps, Missing)


def test_rates_are_of_the_interval_and_tokens_are_offered_not_served(board: Board) -> None:
    board.report("g1", 1, arrivals=100, completed=100, input_tokens=50_000, output_tokens=10_000)
    board.chat()
    board.now_s += 10
    # 40 came, 10 were answered, 20 were shed, 10 wait: the offered load is that of all 40.
    counters = {"completed": 110, "shed": 20, "queued": 10, "input_tokens": 56_000, "output_tokens": 12_000}
    board.report("g1", 11, arrivals=140, **counters)
    load = board.chat()
    assert value(load.arrival_rps) == pytest.approx(4.0)
    assert value(load.prefill_tps) == pytest.approx(4.0 * 600)
    assert value(load.decode_tps) == pytest.approx(4.0 * 200)
    assert (value(load.queued), value(load.running)) == (10, 0)
    assert load.queued == Measured(value=10.0, at_s=board.now_s)


def test_tokens_served_elsewhere_are_a_rate_of_their_own_and_no_part_of_the_mean_request(board: Board) -> None:
    board.report("g1", 1, arrivals=10, completed=10, input_tokens=5000, output_tokens=1000)
    board.chat()
    board.now_s += 10
    board.report(
        "g1", 11, arrivals=14, completed=12, overflowed=2, overflow_tokens=900, input_tokens=6000, output_tokens=1200
    )
    load = board.chat()
    assert value(load.overflow_tps) == 90.0
    assert value(load.prefill_tps) == pytest.approx(0.4 * 500)
    board.now_s += 10
    board.report(
        "g1", 21, arrivals=14, completed=12, overflowed=2, overflow_tokens=900, input_tokens=6000, output_tokens=1200
    )
    assert board.chat().overflow_tps == Idle(at_s=board.now_s)


def test_a_surge_of_requests_still_running_does_not_inflate_their_mean_size(board: Board) -> None:
    board.report("g1", 1)
    board.chat()
    board.now_s += 10
    # 16 began together, one has ended; all prompts are 600 tokens, the others are half through 200 of output.
    board.report("g1", 11, arrivals=16, completed=1, running=15, input_tokens=16 * 600, output_tokens=200 + 15 * 100)
    load = board.chat()
    assert value(load.prefill_tps) == pytest.approx(1.6 * 600)
    assert value(load.decode_tps) == pytest.approx(1.6 * 200)


def test_the_mean_size_follows_recent_requests(board: Board) -> None:
    board.report("g1", 1)
    board.chat()
    total, tokens = 0, 0
    for seq, size in [(2, 100), (3, 100), (4, 900), (5, 900), (6, 900), (7, 900), (8, 900)]:
        board.now_s += 10
        total, tokens = total + 100, tokens + 100 * size
        board.report("g1", seq, arrivals=total, completed=total, input_tokens=tokens, output_tokens=total)
        load = board.chat()
        if seq == 4:
            assert 500 < value(load.prefill_tps) / 10 < 800
    assert value(load.prefill_tps) / 10 == pytest.approx(900, rel=0.02)


def test_tokens_are_missing_until_a_request_has_got_an_answer(board: Board) -> None:
    board.report("g1", 1)
    board.chat()
    board.now_s += 10
    board.report("g1", 11, arrivals=20, queued=20)
    load = board.chat()
    assert value(load.arrival_rps) == 2.0
    assert isinstance(load.prefill_tps, Missing)
    assert isinstance(load.decode_tps, Missing)


def test_nothing_came_and_nothing_is_left_is_idle(board: Board) -> None:
    board.report("g1", 1, arrivals=7, completed=7)
    board.chat()
    board.now_s += 10
    board.report("g1", 11, arrivals=7, completed=7)
    load = board.chat()
    assert load == ServiceLoad(service=CHAT, **dict.fromkeys(SIGNALS, Idle(at_s=board.now_s)))


SIGNALS = (
    "arrival_rps",
    "prefill_tps",
    "decode_tps",
    "queued",
    "running",
    "overflow_tps",
    "tasks_rps",
    "ended_rps",
    "met_rps",
)


@pytest.mark.parametrize("left", ["queued", "running"])
def test_nothing_came_but_work_is_left_is_not_idle(board: Board, left: str) -> None:
    board.report("g1", 1, **{"arrivals": 1, left: 1})
    board.chat()
    board.now_s += 10
    board.report("g1", 11, **{"arrivals": 1, left: 1})
    load = board.chat()
    assert value(load.arrival_rps) == 0.0
    assert value(getattr(load, left)) == 1.0


def test_gateways_add_up(board: Board) -> None:
    for gateway in ("g1", "g2"):
        board.report(gateway, 1)
    board.chat()
    board.now_s += 10
    board.report("g1", 11, arrivals=10, completed=10, output_tokens=10, running=1)
    board.report("g2", 11, arrivals=30, completed=30, output_tokens=30, running=2)
    load = board.chat()
    assert (value(load.arrival_rps), value(load.running)) == (4.0, 3.0)


def test_a_restarted_gateway_counts_from_zero_and_never_backwards(board: Board) -> None:
    board.report("g1", 1, arrivals=1000)
    board.chat()
    board.now_s += 5
    board.report("g1", 6, arrivals=1050)
    board.chat()
    del board.rows["g1"]
    board.now_s += 5
    board.report("g2", 2, arrivals=10)
    assert isinstance(board.chat().arrival_rps, Missing)  # g1 may be cut off: its share is unknown
    for seq in range(3, 10):
        board.now_s += 5
        board.report("g2", seq, arrivals=(seq - 1) * 10)
        load = board.chat()
    assert value(load.arrival_rps) == 2.0


def test_a_gateway_that_falls_silent_makes_its_services_missing(board: Board) -> None:
    for gateway in ("g1", "g2"):
        board.report(gateway, 1)
    board.chat()
    board.now_s += 11
    board.report("g1", 12, arrivals=11)
    load = board.chat()
    assert load.arrival_rps == Missing(why="gateway g2 is silent for 11 s")
    board.report("g2", 12, arrivals=22)
    assert value(board.chat().arrival_rps) == 3.0


def test_a_gateway_that_was_cut_off_is_read_from_where_it_was(board: Board) -> None:
    """Its counters are of days; read as those of a new gateway they would be a crowd of millions."""
    board.report("g1", 500_000, arrivals=1_000_000)
    board.chat()
    board.now_s += 10
    board.report("g1", 500_010, arrivals=1_000_020)
    assert value(board.chat().arrival_rps) == 2.0
    del board.rows["g1"]
    for _ in range(6):
        board.now_s += 10
        with pytest.raises(Transient):
            board.chat()
    board.report("g1", 500_070, arrivals=1_000_200)
    assert value(board.chat().arrival_rps) == 3.0


def test_a_gateway_never_heard_that_has_long_run_says_nothing_with_its_first_report(board: Board) -> None:
    board.report("g1", 1)
    board.chat()
    board.now_s += 10
    board.report("g1", 11, arrivals=10)
    board.report("g2", 90_000, arrivals=1_000_000)
    assert board.chat().arrival_rps == Missing(why="only one report of gateway g2 so far")
    board.now_s += 10
    board.report("g1", 21, arrivals=20)
    board.report("g2", 90_010, arrivals=1_000_030)
    assert value(board.chat().arrival_rps) == 4.0


def test_an_old_report_is_no_report(board: Board) -> None:
    board.report("g1", 1, arrivals=5)
    board.chat()
    board.now_s += 10.5
    with pytest.raises(Transient):
        board.chat()


def test_a_report_of_another_version_is_silence(board: Board) -> None:
    board.report("g1", 1)
    board.chat()
    board.rows["g2"] = (board.now_s, b'{"version": 99}')
    board.now_s += 10
    board.report("g1", 11, arrivals=10)
    assert value(board.chat().arrival_rps) == 1.0


def test_no_new_report_since_the_last_call_keeps_the_last_rate(board: Board) -> None:
    board.report("g1", 1)
    board.chat()
    board.now_s += 2
    board.report("g1", 3, arrivals=8)
    first = value(board.chat().arrival_rps)
    board.now_s += 1
    assert first == value(board.chat().arrival_rps) == 4.0


def test_the_boards_failure_passes_through() -> None:
    def broken() -> dict[str, tuple[float, bytes]]:
        raise Transient("the board: GetTimeoutError")

    with pytest.raises(Transient, match="GetTimeoutError"):
        GatewayMetrics(broken).loads(0.0)
