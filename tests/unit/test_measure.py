"""`qm recommend --measure`: an endpoint that keeps the law is found out by its clients, and what is none is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autoscaler.cli import app
from autoscaler.commands.measure import LEVELS, answered, check_url, law_of, measure, polished, served_model
from autoscaler.commands.outcome import BadInput
from autoscaler.sizing.closed_loop import Load, answer
from autoscaler.sizing.fit import Point, prior_law
from serve_apps.timing import Timing

STEP_S, STEP_S_PER_SEQ, PREFILL_S = 0.006, 0.001, 0.008
PRIOR = Timing(a_s=0.03, b_s_per_seq=0.001, c_s_per_ktoken=0.0001, prefill_tps=5000.0)


class Endpoint(ThreadingHTTPServer):
    """An OpenAI endpoint whose tokens take STEP_S and STEP_S_PER_SEQ for each request in flight, of `slots` at most."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, models: tuple[str, ...], answers: bool, slots: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.answers = models, answers
        self.slots = threading.Semaphore(slots)
        self.lock = threading.Lock()
        self.running = 0
        self.prompts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def log_message(self, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": name} for name in self.server.models]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.answers:
            self.send_error(503)
            return
        with self.server.slots:
            self._answer(asked)

    def _answer(self, asked: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.running += 1
            self.server.prompts.append(asked["prompt"])
        self.send_response(200)
        self.end_headers()
        time.sleep(PREFILL_S)
        for _ in range(asked["max_tokens"]):
            time.sleep(STEP_S + STEP_S_PER_SEQ * self.server.running)
            self._frame({"choices": [{"text": "a"}]})
        words = len(asked["prompt"].split())
        self._frame({"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": asked["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")
        with self.server.lock:
            self.server.running -= 1

    def _frame(self, frame: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(frame)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def endpoint(*models: str, answers: bool = True, slots: int = 64) -> Iterator[Endpoint]:
    server = Endpoint(models, answers, slots)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_clients_see_what_the_endpoint_does_and_share_no_prefix() -> None:
    with endpoint("m", slots=4) as server:
        found = measure(server.url, "m", 20.0, 5.0, prior_law(PRIOR), passes=2)
    assert [level.concurrency for level in found.levels] == [1, 2, 4, 8]
    assert [level.requests for level in found.levels] == [10, 8, 16, 32]
    assert all(level.failed == 0 and level.output_tokens == 5.0 for level in found.levels)
    assert all(level.tpot_s > STEP_S for level in found.levels), "no faster than the endpoint"
    assert len({prompt.split()[0] for prompt in server.prompts}) == len(server.prompts)


@pytest.mark.parametrize(
    ("frames", "tpot_s"),
    [
        pytest.param([(1.0, 2), (1.01, 2), (1.02, 2), (1.03, 2)], 0.01, id="a token a frame"),
        pytest.param([(1.0, 2), (1.02, 4), (1.03, 2)], 0.01, id="two tokens in one frame"),
        pytest.param([(1.01, 2), (1.0101, 2), (1.02, 2), (1.03, 2)], 0.01, id="the first held up on its way"),
        pytest.param([(1.0, 8)], None, id="all at once"),
        pytest.param([(1.0, 0), (1.03, 0)], 0.01, id="no text to tell by"),
    ],
)
def test_tokens_that_came_with_the_first_took_no_time_of_their_own(
    frames: list[tuple[float, int]], tpot_s: float | None
) -> None:
    seen = answered(0.5, frames, {"prompt_tokens": 3, "completion_tokens": 4})
    assert seen.tpot_s == (None if tpot_s is None else pytest.approx(tpot_s))
    assert (seen.ttft_s, seen.output_tokens) == (frames[0][0] - 0.5, 4)


@pytest.mark.parametrize("way_s", [0.0, 0.06])
@pytest.mark.parametrize("slots", [2, 4, 256])
def test_the_law_is_found_from_levels_and_how_many_requests_run_at_a_time(slots: int, way_s: float) -> None:
    """The way there, three times a token, is no work of the engine's: as prefill it would slow the others' tokens."""
    true = prior_law(Timing(a_s=0.02, b_s_per_seq=0.001, c_s_per_ktoken=0.001, prefill_tps=9000.0, max_num_seqs=slots,
                            kv_capacity_tokens=100_000))  # fmt: skip
    true = replace(true, way_s=way_s)
    points = [Point(load, *answer(true, load)) for load in (Load(200.0, 50.0, float(level)) for level in LEVELS)]
    found = law_of(points, prior_law(replace(PRIOR, kv_capacity_tokens=100_000)))
    assert found.timing.max_num_seqs == slots
    for point in points:
        assert answer(found, point.load) == pytest.approx((point.ttft_s, point.tpot_s), rel=0.1)


def test_a_neighbours_load_is_the_passes_and_no_levels() -> None:
    rng = np.random.default_rng(1)
    slow = np.where(rng.random(12) < 0.4, 2.2, 1.0)  # whole passes, and some odd levels of others besides
    table = {
        (level, turn): (0.005 + 0.001 * level)
        * slow[turn]
        * (2.0 if rng.random() < 0.1 else 1.0)
        * rng.normal(1.0, 0.02)
        for level in (1, 2, 4, 8)
        for turn in range(12)
        if (level, turn) != (8, 11)  # time ran out
    }
    found = polished(table)
    assert {level: found[level] / found[1] for level in found} == pytest.approx(
        {1: 1.0, 2: 7 / 6, 4: 9 / 6, 8: 13 / 6}, rel=0.04
    )
    assert found[1] == pytest.approx(0.006, rel=0.04), "as in the typical pass"
    assert polished({}) == {}


def test_the_command_recommends_from_what_it_measured() -> None:
    with endpoint("own-name") as server:
        words = ["--model", "quartermaster/sim-llama", "--goal", "cost", "--rps", "3", "--input-tokens", "20"]
        more = ["--output-tokens", "2", "--measure", server.url, "--instance-types", "g6.2xlarge", "--fraction", ".9"]
        done = CliRunner().invoke(app, ["recommend", *words, *more])
    assert done.exit_code == 0, done.output
    assert "8 at a time: 192 requests" in done.stdout
    assert "measured at the endpoint" in done.stdout


def test_several_engines_cannot_be_measured_as_one() -> None:
    with endpoint("m") as server:
        words = ["--model", "Qwen/Qwen3-8B", "--goal", "cost", "--rps", "3", "--input-tokens", "20"]
        done = CliRunner().invoke(app, ["recommend", *words, "--output-tokens", "4", "--measure", server.url])
    assert done.exit_code == 2
    assert "different ones are considered; name the type it is on with --instance-types" in done.stderr
    assert not server.prompts


def test_an_endpoint_that_does_not_answer_is_said() -> None:
    with (
        endpoint("m", answers=False) as server,
        pytest.raises(BadInput, match=r"gives no answer to measure .*HTTP 503"),
    ):
        measure(server.url, "m", 20.0, 5.0, prior_law(PRIOR))


def test_the_model_is_the_one_asked_for_or_the_only_one() -> None:
    with endpoint("a", "b") as server:
        assert served_model(server.url + "/v1", "b") == "b"
        with pytest.raises(BadInput, match="serves a, b, not c; say --served-model"):
            served_model(server.url, "c")
    with pytest.raises(BadInput, match="does not list its models"):
        served_model(server.url, "c")  # gone


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:8000/v1", "https://localhost"])
def test_this_machine_may_be_measured(url: str) -> None:
    check_url(url, allow_remote=False)


@pytest.mark.parametrize("url", ["http://10.0.0.1", "http://localhost.example.com", "http://0.0.0.0:8000"])
def test_another_machine_only_when_said(url: str) -> None:
    with pytest.raises(BadInput, match="is not on this machine"):
        check_url(url, allow_remote=False)
    check_url(url, allow_remote=True)


@pytest.mark.parametrize("url", ["", "localhost:8000", "file:///etc/passwd", "http://", "http://[x", "http://a:b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="is no web address"):
        check_url(url, allow_remote=True)
