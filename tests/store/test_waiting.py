"""Announced only if somebody waits, and yet no wake-up is ever lost.

A publisher commits, then looks whether anybody waits, and tells.  A consumer says that it waits,
then looks into the table, and sleeps if there is nothing.  Every interleaving of these steps, on
real connections, and random ones of several publishers and consumers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ear import Ear
from hypothesis import HealthCheck, given, settings, strategies as st

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.messages import (
    PUBLISHED,
    RELEASED,
    SEATS,
    TOLD,
    Outgoing,
    any_channel_of,
    lock_of,
)
from kombu_pgnotify.session import Session

Sql = Callable[..., list[tuple[Any, ...]]]

QUEUE = "queue"

#: Publishers, and consumers, of an example.
MOST = 3

PUBLISHER = ("commit", "tell")
CONSUMER = ("wait", "look")
#: From the start: waiting, then busy, then waiting once more.
RELAPSING = ("wait", "busy", "wait", "look")


class Publisher:
    """Publishes one message in two steps."""

    def __init__(self, session: Session, broker: Broker) -> None:
        self._session, self._store = session, broker.store

    def commit(self) -> None:
        statement = self._store._statements["publish"]
        row = self._store._row(Outgoing("{}", b"x"))
        self._session.run((statement, (QUEUE, *row, True)))

    def tell(self) -> None:
        self._session.run(*self._store._announcements([QUEUE], PUBLISHED, TOLD))


class Consumer:
    """Says that it waits, and looks."""

    def __init__(self, url: str, broker: Broker, number: int, seat: int | None) -> None:
        self.ear = Ear(url, QUEUE, waits=False, seat=seat, told=lambda: broker.store.size(QUEUE))
        self._store, self._name = broker.store, f"consumer {number}"
        self.waits = False
        self.got = 0

    def wait(self) -> None:
        self.ear.wait()
        self.waits = True

    def busy(self) -> None:
        self.ear.wait_no_more()
        self.waits = False

    def look(self) -> None:
        everything = ClaimCursor().next_ranges(0)
        self.got += len(self._store.claim(QUEUE, everything, 10, self._name))

    def wake(self) -> bool:
        """Do what somebody does who is told."""
        if heard := self.ear.heard():
            self.look()
        return bool(heard)


Crowd = tuple[list[Publisher], list[Consumer]]


def interleavings(*scripts: tuple[str, ...]) -> Iterator[list[int]]:
    """Every order in which the steps of several can happen: of each step, whose it is."""
    steps = [number for number, script in enumerate(scripts) for _ in script]
    yield from map(list, sorted(set(itertools.permutations(steps))))


@pytest.fixture
def cast(broker: Broker, database: str) -> Iterator[Callable[..., Any]]:
    """A function that makes publishers or consumers, each on a connection of its own."""
    ends: list[Any] = []

    def make(kind: type, seat: int | None = None) -> Any:
        if kind is Publisher:
            session = broker.database.open()
            ends.append(session)
            return Publisher(session, broker)
        consumer = Consumer(database, broker, len(ends), seat)
        ends.append(consumer.ear)
        return consumer

    yield make
    for end in ends:
        end.close()


@pytest.fixture
def crowd(cast: Callable[..., Any]) -> Crowd:
    """As many publishers and consumers as an example may need; the last one has no seat."""
    seats = [3, SEATS - 1, None]
    return [cast(Publisher) for _ in range(MOST)], [cast(Consumer, seat) for seat in seats]


@pytest.mark.parametrize("seat", [None, 0])
@pytest.mark.parametrize("script", [CONSUMER, RELAPSING], ids=["idle", "relapsing"])
def test_a_message_is_found_or_told_whatever_comes_first(
    cast: Any, sql: Sql, script: tuple[str, ...], seat: int | None
) -> None:
    publisher, consumer = cast(Publisher), cast(Consumer, seat)
    told = 0
    for order in interleavings(PUBLISHER, script):
        sql("TRUNCATE pgnotify.tasks")
        consumer.got = 0
        turns = [iter(PUBLISHER), iter(script)]
        for whose in order:
            getattr((publisher, consumer)[whose], next(turns[whose]))()
        told += consumer.wake()
        assert consumer.got == 1, order
        consumer.busy()
    # Both ways have been taken.
    assert 0 < told < len(list(interleavings(PUBLISHER, script)))


def test_nobody_is_told_who_does_not_wait(cast: Any, broker: Broker, database: str) -> None:
    consumer = cast(Consumer)
    other = Ear(database, "another queue", told=lambda: broker.store.size(QUEUE))
    try:
        for _ in range(20):
            broker.store.publish(QUEUE, Outgoing("{}", b"x"))
        broker.store.publish_batch([("", QUEUE, Outgoing("{}", b"x"))])
        assert consumer.ear.heard() == other.heard() == []
        consumer.wait()
        broker.store.publish(QUEUE, Outgoing("{}", b"x"))
        assert consumer.ear.heard() == [(QUEUE, PUBLISHED)]
    finally:
        other.close()


def test_who_is_busy_is_told_of_what_came_back(cast: Any, broker: Broker) -> None:
    consumer = cast(Consumer)
    broker.store.announce([QUEUE], RELEASED)
    assert consumer.ear.heard() == [(QUEUE, RELEASED)]


def test_who_waits_for_anything_is_told(cast: Any, broker: Broker, sql: Sql) -> None:
    consumer = cast(Consumer)
    sql("SELECT pg_advisory_lock_shared(%s)", lock_of(any_channel_of(broker.options.schema)))
    broker.store.publish(QUEUE, Outgoing("{}", b"x"))
    assert consumer.ear.heard() == [(QUEUE, PUBLISHED)]


def test_a_publisher_never_waits_for_somebody_elses_lock(
    cast: Any, broker: Broker, sql: Sql
) -> None:
    consumer = cast(Consumer)
    sql("SELECT pg_advisory_lock(%s)", next(iter(consumer.ear.locks)))
    broker.store.publish(QUEUE, Outgoing("{}", b"x"))
    assert consumer.ear.heard() == [], "who holds it is none that waits"


def test_of_those_with_a_seat_two_are_told_and_of_several_messages_all(
    cast: Any, broker: Broker
) -> None:
    consumers = [cast(Consumer, seat) for seat in (0, 1, 7, SEATS - 1)]
    for consumer in consumers:
        consumer.wait()
    told = set()
    for _ in range(40):
        broker.store.publish(QUEUE, Outgoing("{}", b"x"))
        heard = [n for n, consumer in enumerate(consumers) if consumer.ear.heard()]
        assert len(heard) == TOLD
        told.update(heard)
    assert told == {0, 1, 2, 3}, "always the same"
    broker.store.publish_batch([("", QUEUE, Outgoing("{}", b"x"))] * 2)
    assert all(consumer.ear.heard() for consumer in consumers)


def test_who_has_no_seat_is_told_once_nobody_has_one(cast: Any, broker: Broker) -> None:
    seated, standing = cast(Consumer, 5), cast(Consumer)
    for consumer in (seated, standing):
        consumer.wait()
    broker.store.publish(QUEUE, Outgoing("{}", b"x"))
    assert seated.ear.heard()
    assert not standing.ear.heard()
    seated.busy()
    broker.store.publish(QUEUE, Outgoing("{}", b"x"))
    assert standing.ear.heard()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_publishers_and_consumers_at_random(crowd: Crowd, sql: Sql, data: st.DataObject) -> None:
    """Whoever has looked after saying that it waits, sleeps; nothing may lie there untold."""
    sql("TRUNCATE pgnotify.tasks")
    publishers = crowd[0][: data.draw(st.integers(1, MOST))]
    consumers = crowd[1][: data.draw(st.integers(1, MOST))]
    for consumer in crowd[1]:
        consumer.got = 0
        # What an earlier example has told must not help in this one.
        consumer.ear.heard()
    relapses = data.draw(st.lists(st.booleans(), min_size=len(consumers), max_size=len(consumers)))
    plays = [(publisher, PUBLISHER) for publisher in publishers]
    plays += [
        (consumer, RELAPSING if relapse else CONSUMER)
        for consumer, relapse in zip(consumers, relapses, strict=True)
    ]
    steps = [number for number, (_, script) in enumerate(plays) for _ in script]
    turns = [iter(script) for _, script in plays]
    for whose in data.draw(st.permutations(steps)):
        getattr(plays[whose][0], next(turns[whose]))()
    for consumer in consumers:
        consumer.wake()
    assert sum(consumer.got for consumer in consumers) == len(publishers)
    for consumer in consumers:
        consumer.busy()
