"""``python -m chaos.ec2_server --config FILE.json --port N --token-file F``: a test EC2 in a process of its own.

Prints its address once it answers, and ends on SIGTERM, SIGINT, or when the process that started it does (unless
``--outlive-parent``); no node outlives it. The config holds the keys of those who may call (`setup`); the token opens
the weather's door. May not listen anywhere but on loopback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from autoscaler.adapters.clock import SystemClock
from autoscaler.adapters.local_nodes import Instances
from chaos.ec2_server import nodes
from chaos.ec2_server.http import HttpServer
from chaos.ec2_server.inproc import VirtualClock
from chaos.ec2_server.server import Ec2Server
from chaos.ec2_server.setup import ServerConfig, account
from chaos.ec2_server.weather import Weather

STEP_S = 0.1
BAD_INPUT = 2
MIN_TOKEN = 16


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.ec2_server", description="A test EC2 on loopback.")
    parser.add_argument("--config", type=Path, required=True, help="the account, as JSON")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--token-file", type=Path, required=True, help="holds the token for /weather")
    parser.add_argument("--outlive-parent", action="store_true", help="go on when the starting process ends")
    options = parser.parse_args(arguments)
    try:
        config = ServerConfig.model_validate_json(options.config.read_bytes())
        secret = options.token_file.read_text().strip()
        if len(secret) < MIN_TOKEN:
            return _fail(f"{options.token_file}: the token has {len(secret)} characters; write at least {MIN_TOKEN}")
        serve(config, options.port, secret, None if options.outlive_parent else os.getppid())
    except ValidationError as error:
        rows = error.errors()
        return _fail("\n".join(f"{options.config}: {'.'.join(map(str, row['loc']))}: {row['msg']}" for row in rows))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else f"--port {options.port}: "
        return _fail(f"{where}{error.strerror}; name a readable file, or a free port")
    except OverflowError:
        return _fail(f"--port {options.port}: give a port from 1 to 65535, or 0 for any free one")
    return 0


def serve(config: ServerConfig, port: int, secret: str, parent: int | None) -> None:
    """Answer until SIGTERM, SIGINT or the parent's end; then every node is gone. Raises OSError."""
    clock = VirtualClock() if config.clock == "virtual" else None
    core = Ec2Server(account(config), (clock or SystemClock()).now_s)
    weather = Weather(core, clock.advance if clock is not None else None)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as leaving:
        follow = _followers(config, core, leaving)
        http = leaving.enter_context(HttpServer(core, port, weather.acts(), secret))
        print(f"listening on {http.url}", flush=True)
        while not stop.wait(STEP_S) and (parent is None or os.getppid() == parent):
            follow()


def _followers(config: ServerConfig, core: Ec2Server, leaving: ExitStack) -> Callable[[], None]:
    """One step of all nodes; they end when `leaving` does."""
    settings = config.nodes
    if settings is None:
        return lambda: None
    fleets = [
        Instances(
            nodes.RegionBooks(region),
            lambda key, region=region: nodes.command(settings, region, key),  # type: ignore[misc]
            settings.env,
            alone=settings.boot_command is None,
        )
        for region in core.account.regions.values()
    ]
    for fleet in fleets:
        leaving.callback(fleet.stop_all)

    def follow() -> None:
        with core.lock:
            for fleet in fleets:
                fleet.follow(core.now_s())

    return follow


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
