"""Flower, unchanged, watches and controls a real worker: everything is seen and done in a browser.

``tox -e flower`` installs Flower; the browser is the system's Chromium. ``FLOWER_SCREENSHOT`` names
the file that a picture of the task list goes to.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from fix_cluster import Cluster
from fix_worker import CeleryWorker
from helpers import wait_until

pytest.importorskip("flower.command", reason="needs Flower: tox -e flower")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: tox -e flower")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOT_VARIABLE = "FLOWER_SCREENSHOT"
VIEWPORT = {"width": 1280, "height": 800}
# Long names are cut for the eye; then the link's title has them whole.
CELLS = """rows => rows.map(row => [...row.cells].map(
    cell => cell.querySelector("a[title]")?.title || cell.innerText.trim()))"""
WAIT = 30_000  # milliseconds, for what a page does by itself
CHILDREN = 2  # of the worker's pool
LISTED = 20  # tasks, in the list and its picture
FAILS_EVERY = 6  # one in so many


class Flower:
    """Flower's pages in a browser."""

    def __init__(self, url: str, page: Any) -> None:
        self.url = url
        self.page = page

    def open(self, path: str) -> Any:
        """Go to a page and return the HTTP response."""
        return self.page.goto(self.url + path)

    def workers(self) -> dict[str, str]:
        """Return the workers listed, and whether they are online."""
        self.open("/workers")
        self.page.locator("#workers-refresh-status", has_text="Updated").wait_for(timeout=WAIT)
        rows = self._rows("#workers-table")
        return {row[0]: row[1] for row in rows if len(row) > 1}

    def tasks(self) -> dict[str, str]:
        """Return the ids and states of the tasks listed, up to thirty."""
        self.open("/tasks")
        self.page.select_option("#tasks-table_length select", "30")
        rows = self._rows("#tasks-table")
        return {row[1]: row[2] for row in rows if len(row) > 1}

    def open_worker(self, name: str) -> None:
        """Go to a worker's page, which is there once the worker has answered."""
        path = f"/worker/{quote(name)}"
        wait_until(lambda: self.open(path).ok, message=lambda: self.page.inner_text("body"))

    def wait_state(self, task_id: str, state: str) -> None:
        """Wait until the task's page, loaded again and again, shows the state."""
        seen = ""

        def has_state() -> bool:
            nonlocal seen
            found = self.open(f"/task/{task_id}").ok
            seen = self.page.inner_text(".detail-list .badge") if found else "unknown to Flower"
            return seen == state

        wait_until(has_state, message=lambda: f"the task is {seen}, not {state}")

    def click(self, selector: str, answer: str) -> None:
        """Push a button and wait for Flower's answer."""
        self.page.click(selector)
        toast = self.page.locator(".toast-body", has_text=answer)
        toast.wait_for(timeout=WAIT)

    def screenshot(self, path: str) -> None:
        """Save a picture of the browser's window."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, animations="disabled")

    def _rows(self, table: str) -> list[list[str]]:
        """Return the cells of a table that a script fills; it has one cell if there is nothing."""
        rows = self.page.locator(f"{table} tbody tr:has(td)")
        rows.first.wait_for(timeout=WAIT)
        return rows.evaluate_all(CELLS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=program)
        yield launched
        launched.close()


@pytest.fixture
def worker(cluster: Cluster) -> CeleryWorker:
    """A worker that sends events."""
    return cluster.worker(concurrency=CHILDREN, args=["-E"])


@pytest.fixture
def flower(
    cluster: Cluster, worker: CeleryWorker, browser: Any, tmp_path: Path
) -> Iterator[Flower]:
    """Flower in a browser, once it hears the worker: what happens from now on it knows."""
    process = _start_flower(cluster, tmp_path)
    try:
        process.wait_log("Visit me at")
        (url,) = re.findall(r"Visit me at (\S+)", process.log())
        page = browser.new_page(viewport=VIEWPORT)
        flower = Flower(url.rstrip("/"), page)
        wait_until(lambda: flower.workers().get(worker.name) == "Online", message=process.log)
        yield flower
        page.close()
    finally:
        process.kill()
        sys.stdout.write(f"--- log of Flower\n{process.log()}\n")


def _start_flower(cluster: Cluster, folder: Path) -> CeleryWorker:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.app", "flower"]
    command += ["--address=127.0.0.1", "--port=0"]
    env = {
        **os.environ,
        "CELERY_BROKER_URL": cluster.broker_url,
        "FLOWER_UNAUTHENTICATED_API": "true",  # the buttons need it where nobody logs in
        "PYTHONUNBUFFERED": "1",
    }
    return CeleryWorker("flower", command, env, folder / "flower.log")


def test_worker_page(flower: Flower, worker: CeleryWorker) -> None:
    """A worker's page shows what only the answers to inspect commands tell."""
    flower.open_worker(worker.name)
    assert flower.page.inner_text("#workername") == worker.name
    assert str(worker.pid) in flower.page.inner_text("#tab-pool")

    def queues() -> str:
        flower.open_worker(worker.name)
        return flower.page.text_content("#worker-queues")

    wait_until(lambda: "celery" in queues(), message=lambda: f"queues: {queues()}")


def test_task_list(cluster: Cluster, flower: Flower) -> None:
    """Tasks are listed with the states they end in."""
    expected = {}
    for n in range(LISTED):
        fails = n % FAILS_EVERY == FAILS_EVERY - 1
        task = cluster.tasks.fail if fails else cluster.tasks.record
        expected[task.delay(f"task {n}").id] = "FAILURE" if fails else "SUCCESS"
    wait_until(lambda: flower.tasks() == expected, message=lambda: f"listed: {flower.tasks()}")
    if path := os.environ.get(SCREENSHOT_VARIABLE):
        flower.screenshot(path)


def test_task_page(cluster: Cluster, flower: Flower, worker: CeleryWorker) -> None:
    """A task's page shows its arguments, its result and who ran it, or why it failed."""
    good, bad = cluster.tasks.with_result.delay("good"), cluster.tasks.fail.delay("bad")
    flower.wait_state(good.id, "SUCCESS")
    details = flower.page.inner_text(".detail-list")
    assert "tests.celery.app.with_result" in details
    assert "('good',)" in details
    assert "'good'" in details.replace("('good',)", "")
    assert worker.name in details
    flower.wait_state(bad.id, "FAILURE")
    assert "ValueError: bad" in flower.page.inner_text(".detail-list")


def test_revoke(cluster: Cluster, flower: Flower, worker: CeleryWorker) -> None:
    """A task that waits in the worker is revoked by a button, and never runs."""
    for n in range(CHILDREN):
        cluster.tasks.wait_for_gate.delay(f"busy {n}", "gate")
    unlucky = cluster.tasks.record.delay("unlucky")
    flower.wait_state(unlucky.id, "RECEIVED")
    flower.click("#task-revoke", f"Revoked '{unlucky.id}'")
    worker.wait_log(f"Tasks flagged as revoked: {unlucky.id}")
    cluster.open_gate("gate")
    flower.wait_state(unlucky.id, "REVOKED")
    cluster.wait_happened("done", {f"busy {n}" for n in range(CHILDREN)})
    assert "unlucky" not in cluster.happened()


def test_terminate(cluster: Cluster, flower: Flower) -> None:
    """A task that runs is ended by a button, and is not run again."""
    endless = cluster.tasks.wait_for_gate.delay("endless", "never opened")
    flower.wait_state(endless.id, "STARTED")
    flower.click("#task-terminate", f"Revoked '{endless.id}'")
    flower.wait_state(endless.id, "REVOKED")
    cluster.wait_queued(0, 0)
    assert cluster.happened() == {"endless": 1}


def test_grow_the_pool(flower: Flower, worker: CeleryWorker) -> None:
    """The worker gets one more child."""
    flower.open_worker(worker.name)
    flower.click("#worker-pool-grow", f"Growing '{worker.name}' worker's pool by 1")
    children = psutil.Process(worker.pid).children
    wait_until(lambda: len(children()) == CHILDREN + 1, message=lambda: f"children: {children()}")


def test_shut_down(flower: Flower, worker: CeleryWorker) -> None:
    """The worker ends in good order, and Flower hears that it has."""
    flower.open_worker(worker.name)
    flower.page.click("#worker-group")
    flower.click("#worker-shutdown", "Shutting down!")
    assert worker.wait() == 0
    wait_until(lambda: flower.workers()[worker.name] == "Offline")


def test_the_broker_page_is_not_for_us(flower: Flower) -> None:
    """Flower asks brokers for queue lengths by itself, and knows AMQP and Redis only."""
    response = flower.open("/broker")
    assert response.status == 404
    assert "'pgnotify' broker is not supported" in flower.page.inner_text("body")
