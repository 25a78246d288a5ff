"""What the gateway costs on this machine: ``python -m chaos.live.gateway_bench [--only ttft,peak,open,overload]``.

The same simulated engine stands behind the gateway and, in its own process, behind nothing but Serve (`bare`). Both are
asked in turns, block by block, so that what else the machine does falls on both. Loopback only. Exits 1 when a bar is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from serve_apps.wire import GATEWAY_APP, GATEWAY_DEPLOYMENT, LLM_DEPLOYMENT, Routes, ServiceRoute, VariantRoute

from . import processes
from .cluster import Cluster, Setup
from .sse import Streamed, ask, post

FAST, SLOW, FEW = "bench.fast.sim", "bench.slow.sim", "bench.few.sim"  # applications: unit.service.variant
PATH = "/v1/completions"
STREAMS, BLOCKS, ROUNDS = 5, 12, 8  # TTFT: BLOCKS × ROUNDS × STREAMS requests on each side
PEAK_STREAMS, PEAK_TOKENS, PEAK_BLOCKS = 48, 400, 4
OPEN_STREAMS, OPEN_TOKENS = 500, 12  # one chunk in two seconds
OVERLOAD_S, OVERLOAD, TOP_SHARE = 120.0, 5.0, 0.1
FEW_SLOTS, FEW_TOKENS = 4, 20
TOP_TTFT_S = 1.0
BARS = {
    "added_ttft_p50_ms": (6.0, "<="),
    "added_ttft_p99_ms": (12.0, "<="),
    "peak_fraction": (0.70, ">="),
    "open_errors": (0, "<="),
    "top_ttft_p95_s": (TOP_TTFT_S, "<="),
    "untold": (0, "<="),
    "memory_growth_mib": (16.0, "<="),
}


def _engine(name: str, *, a_s: float, b_s: float, every_s: float, seqs: int) -> dict[str, Any]:
    """Arguments of a simulated engine: a step takes ``a_s + b_s × sequences``, pieces leave every `every_s`."""
    unit, service, variant = name.split(".")
    timing = {"a_s": a_s, "b_s_per_seq": b_s, "c_s_per_ktoken": 0.0, "prefill_tps": 1e6, "max_num_seqs": seqs}
    return {
        "service": f"{unit}/{service}",
        "variant": variant,
        "model": "bench",
        "timing": timing,
        "stream_every_s": every_s,
    }


ENGINES = {
    FAST: _engine(FAST, a_s=0.005, b_s=0.0, every_s=0.005, seqs=256),
    SLOW: _engine(SLOW, a_s=2.0, b_s=0.0, every_s=2.0, seqs=1024),
    FEW: _engine(FEW, a_s=0.02, b_s=0.0, every_s=0.05, seqs=FEW_SLOTS),
}
FEW_RPS = FEW_SLOTS / (FEW_TOKENS * 0.02)


def _route(app: str, slots: int, rps: float, timeout_s: float) -> ServiceRoute:
    unit, service, _ = app.split(".")
    variant = VariantRoute(
        app=app, target_replicas=1, ready_replicas=1, max_concurrency_per_replica=slots, capacity_rps_per_replica=rps
    )
    return ServiceRoute(
        service=f"{unit}/{service}",
        priority=100,
        variants=(variant,),
        max_queued=8 * slots,
        queue_timeout_s=timeout_s,
        retry_after_s=2.0,
    )


def serve_config(port: int) -> dict[str, Any]:
    """The gateway, its three engines and the bare ingress."""
    rows = ((FAST, 1000, 100.0, 60.0), (SLOW, 1000, 100.0, 60.0), (FEW, FEW_SLOTS, FEW_RPS, 20.0))
    routes = Routes(services=tuple(_route(*row) for row in rows))
    options = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 10_000}
    gateway = {
        "name": GATEWAY_APP,
        "route_prefix": "/",
        "import_path": "serve_apps.gateway:build",
        "deployments": [{"name": GATEWAY_DEPLOYMENT, "user_config": routes.model_dump(mode="json")}],
    }
    engines = [
        {
            "name": app,
            "route_prefix": None,
            "import_path": "serve_apps.engine_sim:build",
            "args": args,
            "deployments": [{"name": LLM_DEPLOYMENT, **options}],
        }
        for app, args in ENGINES.items()
    ]
    bare = {
        "name": "bare",
        "route_prefix": "/bare",
        "import_path": "chaos.live.bare:build",
        "args": ENGINES[FAST],
        "deployments": [{"name": "Bare", **options}],
    }
    http = {"host": processes.HOST, "port": port}
    return {"proxy_location": "HeadOnly", "http_options": http, "applications": [gateway, *engines, bare]}


class Bench:
    """The measurements, each a dict of figures."""

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id

    async def ttft(self) -> dict[str, float]:
        """Seconds to the first event with STREAMS at once, gateway against bare."""
        seen: dict[str, list[float]] = {"bare": [], "gateway": []}
        used_s = {"bare": 0.0, "gateway": 0.0}
        for block in range(BLOCKS):
            for side in ("bare", "gateway") if block % 2 else ("gateway", "bare"):
                cpu_s = self._cpu_s()
                for _ in range(ROUNDS):
                    answers = await self._together(self._request(side, FAST, 4), STREAMS)
                    if block:  # the first warms up
                        seen[side] += [answer.ttft_s or float("inf") for answer in answers]
                used_s[side] += (self._cpu_s() - cpu_s) if block else 0.0
        figures: dict[str, float] = {
            f"{name}cpu_ms_per_request": 1000.0 * used_s[side] / len(seen[side])
            for side, name in (("bare", "bare_"), ("gateway", ""))
        }
        for name, q in (("p50", 50), ("p99", 99)):
            bare, ours = (1000.0 * float(np.percentile(seen[side], q)) for side in ("bare", "gateway"))
            figures |= {f"bare_ttft_{name}_ms": bare, f"ttft_{name}_ms": ours, f"added_ttft_{name}_ms": ours - bare}
        return figures

    async def peak(self) -> dict[str, float]:
        """Streamed events per second at full speed, gateway against bare: each the median of its blocks."""
        rates: dict[str, list[float]] = {"bare": [], "gateway": []}
        costs: dict[str, list[float]] = {"bare": [], "gateway": []}
        for _ in range(PEAK_BLOCKS):
            for side in rates:
                began_s, cpu_s = time.monotonic(), self._cpu_s()
                answers = await self._together(self._request(side, FAST, PEAK_TOKENS), PEAK_STREAMS)
                events = sum(one.events for one in answers)
                rates[side].append(events / (time.monotonic() - began_s))
                costs[side].append(1e6 * (self._cpu_s() - cpu_s) / events)
        bare, ours = (float(np.median(rates[side])) for side in ("bare", "gateway"))
        figures = {"bare_chunks_per_s": bare, "chunks_per_s": ours, "peak_fraction": ours / bare}
        for side, name in (("bare", "bare_cpu_us_per_chunk"), ("gateway", "cpu_us_per_chunk")):
            figures[name] = float(np.median(costs[side]))
        return figures

    async def open(self) -> dict[str, float]:
        """OPEN_STREAMS answers at half a chunk a second each, all at once."""
        began_s = time.monotonic()
        answers = await self._together(self._request("gateway", SLOW, OPEN_TOKENS), OPEN_STREAMS)
        errors = sum(not (one.status == 200 and one.whole) for one in answers)
        rate = sum(one.events for one in answers) / (time.monotonic() - began_s)
        return {"open_streams": OPEN_STREAMS, "open_errors": errors, "open_chunks_per_s": rate}

    async def overload(self) -> dict[str, float]:
        """OVERLOAD times what the engine carries for OVERLOAD_S seconds, a tenth of it of top priority."""
        rate = OVERLOAD * FEW_RPS
        draw = np.random.default_rng([1, 5])
        due_s = np.cumsum(draw.exponential(1.0 / rate, int(OVERLOAD_S * rate)))
        top = draw.random(len(due_s)) < TOP_SHARE
        began_s, memory = time.monotonic(), _gateway_rss_mib()
        halfway = 0.0
        tasks: list[asyncio.Task[Streamed]] = []
        for at_s, urgent in zip(due_s, top, strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            request = self._request("gateway", FEW, FEW_TOKENS, priority=-100 if urgent else 0)
            tasks.append(asyncio.create_task(ask(self._port, request)))
            if not halfway and at_s > OVERLOAD_S / 3:
                halfway = _gateway_rss_mib()
        answers = await asyncio.gather(*tasks)
        refused = [one for one in answers if one.status == 429]
        first = [one.ttft_s or float("inf") for one, urgent in zip(answers, top, strict=True) if urgent]
        return {
            "offered": len(answers),
            "offered_rps": rate,
            "answered": sum(one.status == 200 for one in answers),
            "refused": len(refused),
            "failed": sum(one.status not in (200, 429) for one in answers),
            "untold": sum(int(one.headers.get("retry-after", "0")) < 1 for one in refused),
            "top_requests": len(first),
            "top_ttft_p95_s": float(np.percentile(first, 95)),
            "memory_before_mib": memory,
            "memory_growth_mib": _gateway_rss_mib() - (halfway or memory),
        }

    def _cpu_s(self) -> float:
        """Processor time of the cluster and of this client, in all."""
        used = 0.0
        for pid in (*processes.marked(self._run_id), os.getpid()):
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                used += times.user + times.system
        return used

    def _request(self, side: str, app: str, tokens: int, priority: int = 0) -> bytes:
        unit, service, _ = app.split(".")
        body = {"model": f"{unit}/{service}", "prompt": "a b c", "max_tokens": tokens, "stream": True}
        return post("/bare" if side == "bare" else PATH, body | ({"priority": priority} if priority else {}))

    async def _together(self, request: bytes, count: int) -> list[Streamed]:
        return await asyncio.gather(*(ask(self._port, request) for _ in range(count)))


def _gateway_rss_mib() -> float:
    """Resident memory of the gateway's replica, found by the title that Ray gives it."""
    sizes = [
        process.info["memory_info"].rss
        for process in psutil.process_iter(["cmdline", "memory_info"])
        if f"ServeReplica:{GATEWAY_APP}:{GATEWAY_DEPLOYMENT}" in " ".join(process.info["cmdline"] or ())
    ]
    return max(sizes, default=0) / 2**20


def _wait(true: Callable[[], bool], within_s: float, what: str) -> None:
    until_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > until_s:
            raise SystemExit(f"not within {within_s:g} s: {what}")
        time.sleep(0.2)


def _ready(cluster: Cluster) -> bool:
    with cluster.dashboard() as client:
        states = [one["status"] for one in client.get("/api/serve/applications/").json()["applications"].values()]
    return len(states) == len(ENGINES) + 2 and set(states) == {"RUNNING"} and cluster.gateway_is_up()


def missed(figures: dict[str, float]) -> list[str]:
    """The bars that these figures miss."""
    bars = [(name, *BARS[name]) for name in BARS if name in figures]
    return [
        f"{name} is {figures[name]:.3g}, not {sign} {bar:g}"
        for name, bar, sign in bars
        if (figures[name] > bar if sign == "<=" else figures[name] < bar)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a cluster, measure, end it. Returns the exit code."""
    names = ("ttft", "peak", "open", "overload")
    parser = argparse.ArgumentParser(prog="python -m chaos.live.gateway_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(names), help="comma-separated, of " + ", ".join(names))
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--only: {unknown[0]} is not one of {', '.join(names)}")
    folder = Path(tempfile.mkdtemp(prefix="qm-"))
    (port,) = processes.free_ports(1)
    run_id = folder.name.removeprefix("qm-")
    cluster = Cluster(Setup(run_id, folder, folder / "journal", folder, "sim", (), port, keep=False))
    figures: dict[str, float] = {}
    try:
        cluster.start_head()
        cluster.deploy(serve_config(port))
        _wait(lambda: _ready(cluster), 120.0, "the applications run")
        bench = Bench(port, run_id)
        for name in chosen:
            figures |= asyncio.run(getattr(bench, name)())
            print(name, json.dumps({key: round(value, 3) for key, value in figures.items()}), flush=True)
    finally:
        cluster.stop()
        processes.end(run_id)
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    problems = missed(figures)
    print("\n".join(problems) or "every bar is met")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
