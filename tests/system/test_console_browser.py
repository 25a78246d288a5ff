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
from autoscaler.adapters.order_box import OrderBox
from autoscaler.commands.console import Follower
from autoscaler.console.server import application
from policies.model import PolicySet
from tests.scene import CHAT, Scene, crowd, offering, service, unit
from tests.system.prometheus_server import free_port, wait_for

TOKEN = "the-token-of-this-console"
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
    app = application(Follower(tmp_path), look_s=0.1, token=TOKEN)
    config = uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1)
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
    assert [said for said in errors if "401" not in said] == []  # an order that is refused is told by the browser, too


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
    seq = copied(made, journal, 0)
    page.goto(served)
    page.wait_for_selector("#services tbody tr:nth-child(200)", state="attached")
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    wait_for("the first paint", lambda: page.evaluate(paint) is not None)
    updates = []
    for _ in range(3):  # of which one at least had the processor to itself
        made.run(10.0)
        seq = copied(made, journal, seq)
        page.wait_for_selector(f"#meta >> text=record {seq}")
        updates.append(page.evaluate("Number(document.documentElement.dataset.updateMs)"))
    journal.close()
    figures = [page.evaluate(paint), min(updates)]
    print(json.dumps(dict(zip(("first_paint_ms", "update_ms"), figures, strict=True))))
    page.fill("#filter", "u7/s3")
    page.focus("#services tbody tr:not([hidden]) button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#services tr[aria-current=true] >> text=u7/s3")
    assert page.inner_text("#shown") == "1 of 200"
    assert figures[0] <= PAINT_MS
    assert figures[1] <= UPDATE_MS


def order(page: Page, verb: str, token: str) -> str:
    """What the page says to an order for the chosen service."""
    page.evaluate("document.getElementById('act').open = true; document.getElementById('said').textContent = ''")
    page.select_option("#verb", verb)
    page.fill("#who", "ann")
    page.fill("#why", "load test")
    page.fill("#token", token)
    page.focus("#token")
    page.keyboard.press("Enter")
    wait_for("an answer", lambda: len(page.inner_text("#said")) > 3)
    return page.inner_text("#said")


def test_a_service_is_frozen_with_the_token_and_not_without(served: str, page: Page, tmp_path: Path) -> None:
    made = Scene(units=[unit(service())], offerings=[offering("pool")], journal=FileJournal(tmp_path))  # type: ignore[arg-type]
    made.controller.orders = OrderBox.of(tmp_path)
    made.load(CHAT, 4.0)
    made.run(300.0)
    before = made.wanted(CHAT)
    page.goto(served)
    page.wait_for_selector("#services tr[aria-current=true]")
    assert "Not given: an order needs the token" in order(page, "freeze", "another-token-of-this")
    made.run(10.0)
    assert made.beliefs.orders == {}
    assert "given; the controller journals it" in order(page, "freeze", TOKEN)
    made.load(CHAT, 12.0)
    made.run(200.0)
    page.wait_for_selector("#orders li >> text=freeze support/chat")
    assert "by ann: load test" in page.inner_text("#log")
    assert made.wanted(CHAT) == before
    assert "given" in order(page, "unfreeze", TOKEN)
    made.run(200.0)
    page.wait_for_selector("#orders", state="hidden")
    assert made.wanted(CHAT) > before
    assert isinstance(made.journal, FileJournal)
    made.journal.close()
