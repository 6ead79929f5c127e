"""Brokers on this test's database, closed behind it: no thread and no connection stays."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from helpers import wait_until

from kombu_pgnotify import keeper as keeper_module, options, urls
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor, Ranges
from kombu_pgnotify.messages import Claimed, Fence
from kombu_pgnotify.store import MessageStore

#: Seconds that a thread may take to end.
PATIENCE = 10.0

#: The ranges of a look from the start.
EVERYTHING: Ranges = ClaimCursor().next_ranges(0)


def our_threads() -> list[threading.Thread]:
    found = [thread for thread in threading.enumerate() if thread.name.startswith("pgnotify-")]
    return [thread for thread in found if thread.is_alive()]


def close_broker(broker: Broker) -> None:
    """Close a broker and wait for its threads, however long they would have lingered."""
    broker.close()
    keeper = broker.keeper
    # What could not be settled since a test has left its server away: nobody waits for it.
    keeper._leases.clear()
    keeper._outbox.clear()
    for thread in (keeper._thread, broker.listener._thread):
        deadline = monotonic() + PATIENCE
        while thread is not None and thread.is_alive() and monotonic() < deadline:
            keeper.hurry()
            thread.join(0.02)


@pytest.fixture
def make_broker(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Broker]]:
    """A function that makes a broker; `url` is this test's database unless it is given."""
    brokers: list[Broker] = []

    def make(url: str | None = None, *, acquire: bool = True, **given: Any) -> Broker:
        target = urls.parse(url or database, options.NAMES)
        source = given.pop("password_source", None)
        broker = Broker(options.build(target, given, password_source=source))
        brokers.append(broker)
        if acquire:
            broker.database.acquire()
        return broker

    yield make
    # Only here: a thread of the keeper ends by itself, but takes its time.
    monkeypatch.setattr(keeper_module, "IDLE_ROUNDS", 0)
    for broker in brokers:
        close_broker(broker)
    # Tests may have closed it before: twice must not matter.
    wait_until(lambda: not our_threads(), message="threads are left")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No connection of ours to this test's database stays open."""
    if "database_name" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    name: str = request.getfixturevalue("database_name")
    yield
    sql = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = %s AND application_name LIKE 'kombu_pgnotify%%'"
    )
    wait_until(
        lambda: server.run_sql(sql, params=(name,)) == [(0,)], 10, "connections are left open"
    )


@pytest.fixture
def broker(nothing_left: None, make_broker: Callable[..., Broker]) -> Broker:
    """A broker with the default options."""
    return make_broker()


@pytest.fixture
def store(broker: Broker) -> MessageStore:
    return broker.store


@pytest.fixture
def sql(database: str) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """A function that runs a statement on a plain connection of its own, in autocommit."""
    with psycopg.connect(database, autocommit=True) as connection:

        def run(text: str, *params: Any) -> list[tuple[Any, ...]]:
            cursor = connection.execute(text.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

        yield run


@pytest.fixture
def role(server: Server, database_name: str) -> Iterator[str]:
    """A role that may do nothing but log in."""
    name = f"role_{uuid.uuid4().hex[:8]}"
    server.run_sql(f"CREATE ROLE {name} LOGIN")
    yield name
    server.run_sql(f"DROP OWNED BY {name}", database_name)
    server.run_sql(f"DROP ROLE {name}")


@pytest.fixture
def role_url(server: Server, database_name: str, role: str) -> str:
    return server.url(database_name, user=role)


@pytest.fixture
def queue() -> str:
    return f"queue-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def everything() -> Ranges:
    return EVERYTHING


@pytest.fixture
def claim(store: MessageStore, queue: str) -> Callable[..., list[Claimed]]:
    """A function that claims from the start of this test's queue."""

    def run(limit: int = 1000, worker: str = "me") -> list[Claimed]:
        return store.claim(queue, EVERYTHING, limit, worker)

    return run


@pytest.fixture
def fence_of() -> Callable[[Claimed], Fence]:
    return lambda row: Fence(row.task_id, row.delivery)


@pytest.fixture
def refuse_deletion(sql: Callable[..., list[tuple[Any, ...]]]) -> Callable[[str], None]:
    """A function that has the server refuse to delete messages that fit an SQL condition."""

    def run(condition: str = "true") -> None:
        sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE 'no' USING ERRCODE = '23514'; END $$"
        )
        sql(
            "CREATE TRIGGER refuse BEFORE DELETE ON pgnotify.tasks FOR EACH ROW"
            f" WHEN ({condition}) EXECUTE FUNCTION refuse()"
        )

    return run
