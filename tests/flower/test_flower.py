"""Flower, unchanged, watches and controls a real worker: everything is seen and done in a browser.

``tox -e flower`` installs Flower; the browser is the system's Chromium. ``FLOWER_SCREENSHOT`` names
the file that a picture of the task list goes to.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fix_cluster import Cluster
from fix_worker import CeleryWorker
from helpers import wait_until

pytest.importorskip("flower.command", reason="needs Flower: tox -e flower")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: tox -e flower")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOT_VARIABLE = "FLOWER_SCREENSHOT"
VIEWPORT = {"width": 1280, "height": 800}
WAIT = 30_000  # milliseconds, for what a page does by itself
CHILDREN = 2  # of the worker's pool
SUCCEEDED = 17  # tasks in the list and its picture
FAILED = 3


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
        """Return the ids and states on the first page of the task list."""
        self.open("/tasks")
        rows = self._rows("#tasks-table")
        return {row[1]: row[2] for row in rows if len(row) > 1}

    def open_worker(self, name: str) -> None:
        """Go to a worker's page."""
        assert self.open(f"/worker/{quote(name)}").ok

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
        return rows.evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))")


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


def test_workers_page(flower: Flower, worker: CeleryWorker) -> None:
    """The worker is listed; its own page shows what only inspect commands tell."""
    flower.open_worker(worker.name)
    assert flower.page.inner_text("#workername") == worker.name
    pool = flower.page.inner_text("#tab-pool")
    assert str(worker.pid) in pool
    flower.page.click("#worker-tab-queues")
    assert "celery" in flower.page.inner_text("#worker-queues")


def test_a_worker_s_page_keeps_the_password(flower: Flower, worker: CeleryWorker) -> None:
    """The broker's address is shown, and nobody gets in with it."""
    flower.open_worker(worker.name)
    flower.page.click("#worker-tab-broker")
    assert "pgnotify" in flower.page.inner_text("#tab-broker")


def test_task_list(cluster: Cluster, flower: Flower) -> None:
    """Tasks are listed with the states they end in."""
    tasks = cluster.tasks
    made = [tasks.record.delay(f"good {n}").id for n in range(SUCCEEDED)]
    made += [tasks.fail.delay(f"bad {n}").id for n in range(FAILED)]
    for task_id in made[SUCCEEDED:]:
        flower.wait_state(task_id, "FAILURE")
    wait_until(lambda: _shown(flower) == {"SUCCESS": SUCCEEDED, "FAILURE": FAILED})
    listed = flower.tasks()
    assert set(listed) <= set(made)
    assert len(listed) == 15  # the rest is on the second page
    if path := os.environ.get(SCREENSHOT_VARIABLE):
        flower.screenshot(path)


def _shown(flower: Flower) -> Counter[str]:
    """Count the states in the list, with all tasks on one page."""
    flower.open("/tasks")
    flower.page.select_option("#tasks-table_length select", "30")
    return Counter(row[2] for row in flower._rows("#tasks-table") if len(row) > 2)
