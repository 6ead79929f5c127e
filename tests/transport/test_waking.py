"""Who is told of a message: one of those who wait, and soon all if it does not take it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import wait_until
from kombu import Connection, Producer
from kombu.asynchronous import Hub

from kombu_pgnotify import consumers as consumers_module
from kombu_pgnotify.messages import channel_of, lock_of

Connect = Callable[..., Connection]
Send = Callable[..., None]

#: Seconds between polls; each consumer has others, and so connections of its own to the server.
FAR = 3600

WAITING = """
SELECT count(DISTINCT pid) FROM pg_locks
WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted
  AND (classid::bigint << 32) | objid::bigint = %s
"""


@pytest.fixture(autouse=True)
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks only because it was told in reserve."""
    monkeypatch.setattr(consumers_module, "RESERVE_AFTER", FAR)


class Worker:
    """A consumer in a loop of its own, in a thread of its own."""

    def __init__(self, connection: Connection, inbox: Any, queue: str, **options: Any) -> None:
        self.hub = Hub()
        self.connection = connection
        connection.register_with_event_loop(self.hub)
        self.got = inbox(connection, queue, **options)
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def consumption(self) -> Any:
        return self.connection.transport.consumption

    def end(self) -> None:
        self._ends = True
        self.consumption._wake()
        self._thread.join()
        self.connection.close()
        self.hub.close()

    def _run(self) -> None:
        while not self._ends:
            self.hub.run_once()


@pytest.fixture
def work(connect: Connect, inbox: Any, queue: str) -> Iterator[Callable[..., Worker]]:
    """A function that starts one more consumer of this test's queue."""
    workers: list[Worker] = []

    def start(**options: Any) -> Worker:
        connection = connect(polling_interval=FAR + len(workers))
        workers.append(Worker(connection, inbox, queue, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture
def all_wait(sql: Any, queue: str) -> Callable[[int], None]:
    """A function that waits until so many have said that they wait, and have looked."""

    def run(count: int) -> None:
        lock = lock_of(channel_of("pgnotify", queue))
        wait_until(lambda: sql(WAITING, lock) == [(count,)])

    return run


def idle(*workers: Worker) -> bool:
    looks = [watch.look_at for w in workers for watch in w.consumption._watches.all()]
    # Leases that others hold are looked after when they end.
    return all(look > consumers_module.monotonic() + 5 for look in looks)


def delivered(*workers: Worker) -> list[Any]:
    return sorted(body for worker in workers for body in worker.got.bodies)


def test_of_many_who_wait_one_looks(
    work: Any, send: Send, all_wait: Any, statements: list[tuple[str, ...]]
) -> None:
    workers = [work(on_message=lambda message: message.ack()) for _ in range(6)]
    all_wait(6)
    wait_until(lambda: idle(*workers))
    statements.clear()
    for n in range(20):
        send(n)
        wait_until(lambda: len(delivered(*workers)) == n + 1)  # noqa: B023
    assert sum("claim" in calls for calls in statements) < 20 * 2
    assert len({n for n, worker in enumerate(workers) if worker.got.messages}) > 1, (
        "always the same"
    )


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="this kombu has no batches")
def test_of_a_batch_all_are_told(work: Any, connect: Connect, queue: str, all_wait: Any) -> None:
    workers = [work(prefetch=2) for _ in range(4)]
    all_wait(4)
    wait_until(lambda: idle(*workers))
    producer = connect().Producer(auto_declare=False)
    with producer.batch():
        for n in range(8):
            producer.publish(n, routing_key=queue, serializer="json")
    wait_until(lambda: delivered(*workers) == list(range(8)))


def test_all_are_told_if_it_has_its_fill(work: Any, send: Send, all_wait: Any) -> None:
    workers = [work(prefetch=1) for _ in range(4)]
    all_wait(4)
    wait_until(lambda: idle(*workers))
    for n in range(4):
        # At once: some that are told have just taken another one.
        send(n)
    wait_until(lambda: delivered(*workers) == list(range(4)))


def test_all_are_told_if_it_stands_still(work: Any, send: Send, all_wait: Any) -> None:
    """A solo worker is told while it runs a task of an hour."""
    hour = threading.Event()

    def run(_message: Any) -> None:
        assert hour.wait(60)

    still = [work(on_message=run) for _ in range(3)]
    try:
        for n in range(3):
            send(n)
            wait_until(lambda: delivered(*still) == list(range(n + 1)))  # noqa: B023
        quick = work()
        all_wait(4)
        wait_until(lambda: idle(quick))
        for n in range(10):
            send(f"quick {n}")
            wait_until(lambda: len(quick.got.messages) == n + 1)  # noqa: B023
    finally:
        hour.set()


def test_what_is_told_to_somebody_who_has_gone_is_told_to_all(
    work: Any, send: Send, all_wait: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, other = work(), work()
    all_wait(2)
    wait_until(lambda: idle(gone, other))
    # It does not come to look any more, and has not given up its place yet.
    monkeypatch.setattr(gone.consumption, "named", lambda *_, **__: None)
    monkeypatch.setattr(gone.consumption, "notified", lambda *_: None)
    monkeypatch.setattr(gone.consumption, "unseen", lambda _: True)
    for n in range(10):
        send(n)
        wait_until(lambda: len(other.got.messages) == n + 1)  # noqa: B023


def test_who_works_between_two_drains_holds_up_nobody(
    connect: Connect, inbox: Any, work: Any, queue: str, send: Send, all_wait: Any
) -> None:
    """It still says that it waits."""
    connection = connect(polling_interval=FAR + 100)
    busy = inbox(connection, queue)
    while True:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.01)
        looks = [w.look_at for w in connection.transport.consumption._watches.all()]
        if all(look > consumers_module.monotonic() + 5 for look in looks):
            break
    other = work()
    all_wait(2)
    wait_until(lambda: idle(other))
    for n in range(10):
        send(n)
        wait_until(lambda: len(other.got.messages) == n + 1)  # noqa: B023
    assert busy.messages == []
