"""Nonsense for tests to publish and to write by hand, and good messages to send in between."""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from helpers import wait_until
from hypothesis import HealthCheck, settings, strategies as st
from kombu import Connection, Consumer, Message, Queue
from kombu.exceptions import KombuError

from kombu_pgnotify.errors import PgnotifyError

Sql = Callable[..., list[tuple[Any, ...]]]

MODEST = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FEW = settings(MODEST, max_examples=20)
PATIENCE = 20.0  # seconds for a single delivery

#: What a publisher may be told: our errors and kombu's, AMQP's among them.
CLEAR = (PgnotifyError, KombuError, *Connection("memory://").channel_errors)


def is_clear(error: Exception) -> bool:
    """Whether an error says whose it is: it is one of those, or kombu itself refused."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    places = re.findall("/(kombu|kombu_pgnotify)/", "\n".join(frames))
    return isinstance(error, CLEAR) or places[-1] == "kombu"


LONG = "".join(f"{n:x}" for n in range(3000))  # does not compress into an index row

text = st.text(max_size=30) | st.text("\0\ud800'\"%{}\\;.#*$é😀 ", max_size=12)
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 255, 256, 2**31, 2**63, 10**400, math.nan, math.inf, -math.inf])
)
scalars: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | numbers | text | st.binary(max_size=10) | st.datetimes()
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


class Receiver:
    """Consumes from queues with and without acks, and counts the good messages it gets."""

    def __init__(self, connection: Connection, *queues: str | Queue, no_ack: bool = False) -> None:
        self.connection = connection
        self.good: Counter[str] = Counter()
        self.others = 0
        self._no_ack = no_ack
        named = [Queue(queue) if isinstance(queue, str) else queue for queue in queues]
        Consumer(
            connection.channel(), named, no_ack=no_ack, on_message=self._receive, prefetch_count=10
        ).consume()

    def _receive(self, message: Message) -> None:
        label = message.headers.get("good")
        if isinstance(label, str):
            self.good[label] += 1
        else:
            self.others += 1
        if not self._no_ack:
            message.ack()

    def wait_for(self, labels: set[str]) -> None:
        while not labels <= set(self.good):
            self.connection.drain_events(timeout=PATIENCE)

    def finish(self, labels: set[str]) -> None:
        """Wait for these, then look that nothing was delivered twice and nothing else comes."""
        self.wait_for(labels)
        with pytest.raises(TimeoutError):
            while True:
                self.connection.drain_events(timeout=0.3)
        assert self.good == dict.fromkeys(labels, 1)


class Sender:
    """Publishes good messages, each with a label of its own."""

    def __init__(self, connection: Connection) -> None:
        self.producer = connection.Producer()
        self.labels: set[str] = set()

    def good(self, **where: Any) -> None:
        label = f"good-{len(self.labels)}"
        self.producer.publish(label, headers={"good": label}, **where)
        self.labels.add(label)


def nothing_leased(receiver: Receiver, sql: Sql) -> None:
    worker = receiver.connection.transport.broker.worker
    leased = "SELECT task_id, envelope FROM pgnotify.tasks WHERE lease_worker_id = %s"
    wait_until(lambda: sql(leased, worker) == [], message=lambda: f"leased: {sql(leased, worker)}")
