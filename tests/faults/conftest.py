"""Connections and brokers on this test's database, closed behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults.nonsense import Receiver, Sender
from kombu import Connection

from kombu_pgnotify import broker as brokers


def close_brokers(dbname: str) -> None:
    """Close what this process has opened to a database, threads included."""
    for options, broker in list(brokers._brokers.items()):
        if options.target.params.get("dbname") == dbname:
            del brokers._brokers[options]
            broker.close()


@pytest.fixture
def connect(database_name: str, broker_url: str) -> Iterator[Callable[..., Connection]]:
    """A function that makes a connected kombu Connection; arguments are transport options."""
    made: list[Connection] = []

    def run(url: str | None = None, *, ssl: Any = False, **options: Any) -> Connection:
        connection = Connection(url or broker_url, ssl=ssl, transport_options=options)
        made.append(connection)
        connection.connect()
        return connection

    yield run
    for connection in made:
        connection.close()
    close_brokers(database_name)


@pytest.fixture
def sender(connect: Callable[..., Connection]) -> Sender:
    return Sender(connect())


@pytest.fixture
def receiver(connect: Callable[..., Connection], sender: Sender) -> Receiver:
    """Who consumes the queue ``box`` of a connection that does not publish."""
    return Receiver(connect(), "box")
