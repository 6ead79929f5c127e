"""What a measuring process knows: its broker, its folder, and the message that all publish."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeAlias

from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Producer

#: What a measure found, by name.
Figures: TypeAlias = dict[str, float]

#: The broker's URL and its ``transport_options`` (JSON).
URL = os.environ.get("BENCH_URL", "memory://")
OPTIONS: dict[str, Any] = json.loads(os.environ.get("BENCH_OPTIONS", "{}"))

#: Where workers leave their counts and their log; empty when a measure begins.
FOLDER = Path(os.environ.get("BENCH_FOLDER", "."))

#: Nobody else's, should the broker be shared.
QUEUE = "kombu-pgnotify-bench"

#: About what Celery sends for a small task.
BODY = {
    "args": [1, 2, "a" * 40],
    "kwargs": {"customer": 12345, "remark": "b" * 120},
    "embed": {"callbacks": None, "errbacks": None, "chain": None, "chord": None},
}

#: Published before the clock starts, by everybody: connections, declarations, statements.
WARM_UP = 50

#: Messages that a consumer may hold unacknowledged.
PREFETCH = 100


def connect(**options: Any) -> Connection:
    """Return a connection to the broker, not open yet.

    Arguments:
        options: further ``transport_options``.
    """
    return Connection(URL, transport_options={**OPTIONS, **options})


def dsn() -> str:
    """Return the address of our PostgreSQL for psycopg."""
    return "postgresql" + URL.removeprefix("pgnotify")


def durable_queue() -> Queue:
    """Return the queue, to be bound to a channel."""
    return Queue(QUEUE, routing_key=QUEUE, durable=True)


def empty_queue(connection: Connection) -> None:
    """Declare the queue and remove what is in it."""
    queue = durable_queue()(connection.default_channel)
    queue.declare()
    queue.purge()


def publish(producer: Producer) -> None:
    """Publish the message, durable."""
    producer.publish(BODY, exchange="", routing_key=QUEUE, delivery_mode=2)
