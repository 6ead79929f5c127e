"""Many publishers at once where a flush takes time: a NOTIFY must not keep them from sharing it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from kombu.connection import Connection

from .bare import silent, written_row
from .context import (
    OPTIONS,
    PREFETCH,
    URL,
    Figures,
    connect,
    durable_queue,
    empty_queue,
    publish,
)
from .crowd import Crowd

#: A disk that takes 2 ms: whoever flushes waits so long for others to join.
SLOW_FLUSH = "-c commit_delay=2000 -c commit_siblings=1"

#: Seconds between two looks of a consumer that is not told of anything.
POLL = 0.02

#: Seconds that all publish before they are counted.
RUN_IN = 0.5

#: Seconds until a consumer has met an empty queue and come to rest.
REST = 1.0


def publish_by_kombu(publishers: int, seconds: float, told: bool, halted: bool) -> Figures:
    """To a consumer that is idle when they begin.

    Arguments:
        told: it listens and is notified; else it looks every 20 ms.
        halted: it stays as it was when it was idle (by SIGSTOP); else it takes what comes, and is
            busy as soon as they publish faster than it consumes.
    """
    options = {"notify": told}
    consuming = options if told else {**options, "polling_interval": POLL}

    def work(index: int, crowd: Crowd) -> None:
        if index == publishers:
            _take_all(index, crowd, consuming, halted)
            return
        url = f"{URL}{'&' if '?' in URL else '?'}options={quote(SLOW_FLUSH)}"
        with Connection(url, transport_options={**OPTIONS, **options}) as connection:
            producer = connection.Producer(serializer="json")
            _repeat(lambda: publish(producer), index, crowd)

    with Crowd(publishers + 1, work) as crowd:
        *published, consumed = _count(crowd, seconds)
    return {"rate": sum(published), "consumed": consumed}


def insert_silently(publishers: int, seconds: float) -> Figures:
    """The same rows by psycopg alone; nobody takes them."""

    def work(index: int, crowd: Crowd) -> None:
        with silent(SLOW_FLUSH) as link, link.cursor() as cursor:
            row = written_row(link)
            statement = row.insert().as_string(link)

            def insert() -> None:
                cursor.execute(statement, row.values, prepare=True)

            _repeat(insert, index, crowd)

    with Crowd(publishers, work) as crowd:
        counts = _count(crowd, seconds, prepare=lambda link: publish(link.Producer()))
    return {"rate": sum(counts)}


def _repeat(once: Callable[[], None], index: int, crowd: Crowd) -> None:
    """Do it again and again, once all are there."""
    crowd.meet()
    for count in itertools.count():
        if crowd.stopped.is_set():
            return
        crowd.counts[index] = count
        once()


def _take_all(index: int, crowd: Crowd, options: dict[str, Any], halted: bool) -> None:
    """Consume and acknowledge what comes until all end, or do nothing until then."""

    def received(body: Any, message: Any) -> None:
        crowd.counts[index] += 1
        message.ack()

    with connect(**options) as connection:
        queues = [durable_queue()]
        with connection.Consumer(queues, callbacks=[received]) as consumer:
            consumer.qos(prefetch_count=PREFETCH)
            _drain_until(connection, REST)
            crowd.meet()
            if halted:
                os.kill(os.getpid(), signal.SIGSTOP)
            while not crowd.stopped.is_set():
                _drain_until(connection, POLL)


def _drain_until(connection: Connection, seconds: float) -> None:
    """Drain for so long."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection.drain_events(timeout=left)
        except TimeoutError:
            return


def _count(
    crowd: Crowd, seconds: float, prepare: Callable[[Connection], None] | None = None
) -> list[float]:
    """Return how much each of the crowd does in a second."""
    with connect() as connection:
        empty_queue(connection)
        if prepare:
            prepare(connection)
    crowd.begin()
    crowd.meet()
    time.sleep(RUN_IN)
    before, began = list(crowd.counts), time.perf_counter()
    time.sleep(seconds)
    after, took = list(crowd.counts), time.perf_counter() - began
    crowd.join()
    with connect() as connection:
        empty_queue(connection)
    return [(end - start) / took for start, end in zip(before, after, strict=True)]
