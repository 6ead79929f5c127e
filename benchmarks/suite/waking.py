"""How often consumers are woken for nothing: while they are busy, and while many are idle."""

from __future__ import annotations

import functools
import random
import threading
import time
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from kombu_pgnotify.messages import channel_of
from kombu_pgnotify.store import MessageStore

from .context import QUEUE, Figures, connect, dsn, durable_queue, empty_queue, publish
from .crowd import Crowd
from .tasks import empty_task_queue, nap, send, tally
from .workers import Worker

#: Seconds of a task: what waits before the worker lasts for longer than others are published.
NAP = 0.05
WAITING = 250

#: Threads of the busy worker, each with Celery's default of four prefetched.
THREADS = 2

#: Seconds between two of the messages published to a busy worker.
EVERY = 0.02

#: Seconds until nothing of what has happened before can be heard any more.
REST = 1.0

#: Messages that an idle consumer takes at most, as a Celery worker of one process does.
TAKEN = 4

#: Seconds between two messages for idle consumers, at random.
PAUSES = (0.02, 0.06)

#: Seconds that idle consumers wait before they look whether all is over.
PATIENCE = 0.5


class Ear:
    """Counts the notifications on a channel while the `with` block lasts."""

    def __init__(self, channel: str) -> None:
        self._link = psycopg.connect(dsn(), autocommit=True)
        self._link.execute(SQL("LISTEN {}").format(Identifier(channel)))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._over = threading.Event()
        self.heard = 0

    def _listen(self) -> None:
        while not self._over.is_set():
            self.heard += sum(1 for _ in self._link.notifies(timeout=0.1))

    def __enter__(self) -> Ear:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._link.close()


def notify_while_busy(count: int) -> Figures:
    """NOTIFYs on the queue's channel while its only worker has more than it can take."""
    empty_task_queue()
    send(WAITING, nap.apply_async, NAP)
    with Worker("threads", THREADS) as worker:
        worker.wait_until(lambda: tally().tasks)
        time.sleep(REST)
        with Ear(channel_of("pgnotify", QUEUE)) as ear:
            for _ in range(count):
                nap.apply_async((NAP,))
                time.sleep(EVERY)
            still_waiting = WAITING + count - tally().tasks
            time.sleep(EVERY)
    empty_task_queue()
    # Else it was idle at the end, and rightly told.
    assert still_waiting > 4 * THREADS, "the worker was not busy all the time"
    return {"notifications": ear.heard, "published": count, "still_waiting": still_waiting}


def claim_in_vain(consumers: int, count: int) -> Figures:
    """Claims that found nothing, for each message published to many idle consumers."""

    def work(index: int, crowd: Crowd) -> None:
        # Two places for each: claims in vain, messages.
        _count_empty_claims(crowd, index)
        _consume(crowd, consumers + index)

    with Crowd(consumers, work, places=2 * consumers) as crowd, connect() as connection:
        crowd.begin()
        empty_queue(connection)
        producer = connection.Producer(serializer="json")
        publish(producer)
        crowd.meet()
        time.sleep(REST)
        before, received = sum(crowd.counts[:consumers]), sum(crowd.counts[consumers:])
        began, pauses = time.perf_counter(), random.Random(1)
        for _ in range(count):
            publish(producer)
            time.sleep(pauses.uniform(*PAUSES))
        time.sleep(REST)
        empty = sum(crowd.counts[:consumers]) - before
        received = sum(crowd.counts[consumers:]) - received
        took = time.perf_counter() - began
        crowd.join()
    assert received == count, f"{received} of {count} messages came"
    return {"empty_claims": empty / count, "claims_in_vain": empty, "seconds": took}


def _count_empty_claims(crowd: Crowd, place: int) -> None:
    """From now on this process counts them (it was forked for that)."""
    landed = MessageStore.landed

    @functools.wraps(landed)
    def counted(*args: Any) -> Any:
        acknowledged, rows = landed(*args)
        crowd.counts[place] += not rows
        return acknowledged, rows

    setattr(MessageStore, "landed", counted)  # noqa: B010


def _consume(crowd: Crowd, place: int) -> None:
    """Wait for messages and acknowledge them until all end."""

    def received(body: Any, message: Any) -> None:
        crowd.counts[place] += 1
        message.ack()

    with (
        connect() as connection,
        connection.Consumer([durable_queue()], callbacks=[received], prefetch_count=TAKEN),
    ):
        _drain(connection)
        crowd.meet()
        while not crowd.stopped.is_set():
            _drain(connection)


def _drain(connection: Any) -> None:
    """Drain until nothing comes for a while."""
    try:
        while True:
            connection.drain_events(timeout=PATIENCE)
    except TimeoutError:
        pass
