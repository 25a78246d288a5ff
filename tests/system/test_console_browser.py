"""A real Chromium on the console: what it shows in a shortage and after it, by keyboard too, and how fast it is."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from autoscaler.adapters.journal import FileJournal
from autoscaler.commands.console import Follower
from autoscaler.console.server import application
from policies.model import PolicySet
from tests.scene import CHAT, Scene, crowd, offering, service, unit
from tests.system.prometheus_server import free_port, wait_for

PAINT_MS, UPDATE_MS = 1000.0, 100.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is not on the path: run these tests by `make test-system`, which fetches it")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    config = uvicorn.Config(
        application(Follower(tmp_path), look_s=0.1), port=port, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for("the console", lambda: server.started)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10.0)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield opened
    context.close()
    assert errors == []


def copied(made: Scene, journal: FileJournal, after: int) -> int:
    """Everything that the scene journalled since record `after` is in the folder too."""
    for record in made.journal.read():
        if record.seq > after:
            after = journal.append(record.event, durable=False).seq
    return after


def test_the_page_follows_a_shortage_to_its_end(served: str, page: Page, tmp_path: Path) -> None:
    made = Scene(units=[unit(service("chat", min_replicas=3))], offerings=[offering("small", count=1)])
    made.load(CHAT, 0.1)
    made.run(200.0)
    journal = FileJournal(tmp_path)
    seq = copied(made, journal, 0)
    page.goto(served)
    page.wait_for_selector("#headline[data-state=short]")
    assert CHAT in page.inner_text("#headline")
    page.wait_for_selector("#chart svg[aria-label*='support/chat']")
    assert "refused" in page.inner_text("#log").lower()
    made.source.set(PolicySet(units=(unit(service("chat", min_replicas=1)),)))
    made.run(60.0)
    copied(made, journal, seq)
    journal.close()
    page.wait_for_selector("#headline[data-state=served]")
    assert "no longer short" in page.inner_text("#log")


def test_at_200_services_and_60_pools_it_is_quick_and_the_keyboard_chooses(
    served: str, page: Page, tmp_path: Path
) -> None:
    made = crowd()
    journal = FileJournal(tmp_path)
    copied(made, journal, 0)
    journal.close()
    page.goto(served)
    page.wait_for_selector("#services tbody tr:nth-child(200)", state="attached")
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    wait_for("the first paint", lambda: page.evaluate(paint) is not None)
    figures = page.evaluate(f"[{paint}, Number(document.documentElement.dataset.updateMs)]")
    print(json.dumps(dict(zip(("first_paint_ms", "update_ms"), figures, strict=True))))
    page.fill("#filter", "u7/s3")
    page.focus("#services tbody tr:not([hidden]) button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#services tr[aria-current=true] >> text=u7/s3")
    assert page.inner_text("#shown") == "1 of 200"
    assert figures[0] <= PAINT_MS
    assert figures[1] <= UPDATE_MS
