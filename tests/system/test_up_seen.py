"""`qm up` as an operator sees it: a real Prometheus scrapes it, and a real Chromium watches its shortage and freezes a
service.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Page

from tests.system.prometheus_server import Prometheus, running
from tests.system.test_console_browser import browser, order, page

__all__ = ["browser", "page"]
WALL_S = 840.0
WATCHED = re.compile(r"watch it on a page: (http\S+) \(orders need the token in (\S+)\)")
SCRAPED = re.compile(r"controller started, metrics http://127\.0\.0\.1:(\d+)")


class Up:
    """A run of `qm up` that goes on by itself."""

    def __init__(self, folder: Path) -> None:
        self.printed = folder / "printed.txt"
        self._file = self.printed.open("w")
        command = [sys.executable, "-m", "autoscaler.cli", "up", "--engine=sim", "--minutes=2", "--http-port=0"]
        self._child = subprocess.Popen(
            [*command, f"--journal={folder / 'journal'}"], stdout=self._file, stderr=subprocess.STDOUT
        )
        self._end_s = time.monotonic() + WALL_S

    def until(self, what: str, ready: Callable[[], Any]) -> Any:
        """What `ready` gives, once that is something; the test fails when the run ends before."""
        while not (found := ready()):
            text = self.text()
            assert self._child.poll() is None, f"{what}: the run has ended\n{text[-3000:]}"
            assert time.monotonic() < self._end_s, f"{what}: not in time\n{text[-3000:]}"
            time.sleep(0.3)
        return found

    def text(self) -> str:
        # Rich wraps long lines where there is no terminal.
        return " ".join(self.printed.read_text(errors="replace").split())

    def code(self) -> int:
        """How it ends."""
        return self._child.wait(timeout=max(1.0, self._end_s - time.monotonic()))

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.terminate()
            self._child.wait(timeout=60.0)
        self._file.close()


@pytest.mark.timeout(WALL_S + 60.0)
def test_a_shortage_is_seen_and_a_service_frozen_during_qm_up(page: Page, tmp_path: Path) -> None:
    up = Up(tmp_path)
    try:
        port = up.until("the controller", lambda: SCRAPED.search(up.text()))[1]
        url, token_file = up.until("the console", lambda: WATCHED.search(up.text())).groups()
        up.until("the page", lambda: _open(page, url))
        (tmp_path / "prometheus").mkdir()
        with running(int(port), tmp_path / "prometheus") as prometheus:
            _watch(up, page, prometheus, Path(token_file).read_text().strip())
            assert up.code() == 0, up.text()[-3000:]
    finally:
        up.close()


def _open(page: Page, url: str) -> bool:
    try:
        page.goto(url)
    except PlaywrightError:  # nothing listens yet
        return False
    return True


def _watch(up: Up, page: Page, prometheus: Prometheus, token: str) -> None:
    def said(kind: str) -> bool:
        return page.locator(f"#log li.{kind}").count() > 0

    up.until("the shortage", lambda: page.get_attribute("#headline", "data-state") == "short")
    up.until("a refusal", lambda: said("refused"))
    up.until("another rung's grant", lambda: said("granted"))
    page.screenshot(path=str(up.printed.parent / "shortage.png"), full_page=True)
    page.click("#services tbody button >> text=research/nightly")  # whom it does not hurt
    assert "needs the token" in order(page, "freeze", "another-token-of-this")
    page.fill("#minutes", "1")
    assert "given" in order(page, "freeze", token)
    page.wait_for_selector("#orders li >> text=freeze research/nightly")
    up.until("the order's end", lambda: page.locator("#orders li").count() == 0)
    assert prometheus.query("up") == {(): 1.0}
    assert prometheus.query("sum(qm_launches_total) > 0") != {}
    assert prometheus.query("sum(qm_slo_ended_total) > 0") != {}
    assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
    assert prometheus.query('ALERTS{alertstate="firing",severity="page"}') == {}
    up.until("the load's end", lambda: "load over" in up.text())
    up.until("the recovery", lambda: page.get_attribute("#headline", "data-state") in ("coming", "served"))
    page.goto("about:blank")
