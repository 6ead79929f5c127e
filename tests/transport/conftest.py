"""kombu Connections on this test's database, closed behind it: nothing of ours stays."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Consumer, Message, Queue

from kombu_pgnotify import broker as broker_module, keeper, listener
from kombu_pgnotify.session import Session

#: Seconds that any single delivery may take; only a failing test waits that long.
PATIENCE = 20.0

#: Content types that a test's consumer decodes.
ACCEPT = ["json", "pickle", "msgpack", "application/data", "text/plain"]

#: Seconds the listener stays after the last consumer; the usual ones would be waited for.
LINGER = 0.05

#: Our sessions on a test's database, as the server sees them.
SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = %s AND application_name LIKE 'kombu_pgnotify%%'"
)


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pgnotify-")]


def forget_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close this process's brokers and wait for their threads, which else would linger."""
    monkeypatch.setattr(keeper, "IDLE_ROUNDS", 0)
    brokers = list(broker_module._brokers.values())
    broker_module._brokers.clear()
    for broker in brokers:
        broker.close()

    def ended() -> bool:
        for broker in brokers:
            broker.keeper.hurry()
            broker.listener._nudge()
        return not our_threads()

    wait_until(ended, PATIENCE, lambda: f"threads are left: {our_threads()}")


class Inbox:
    """A consumer that keeps what it gets; `on_message` is called with each message."""

    def __init__(
        self,
        channel: Any,
        *queues: str,
        no_ack: bool = False,
        prefetch: int | None = None,
        accept: list[str] | None = None,
        on_message: Callable[[Message], object] | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self._on_message = on_message
        self.consumer = Consumer(
            channel,
            queues=[Queue(name) for name in queues],
            no_ack=no_ack,
            accept=accept or ACCEPT,
            prefetch_count=prefetch,
            on_message=self._receive,
        )
        self.consumer.consume()

    @property
    def channel(self) -> Any:
        return self.consumer.channel

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]

    def cancel(self) -> None:
        self.consumer.cancel()

    def _receive(self, message: Message) -> None:
        self.messages.append(message)
        if self._on_message is not None:
            self._on_message(message)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of ours, no connection to this test's database and no exception is left."""
    name = None
    if "database_name" in request.fixturenames:
        # Now, so that it still exists when we look.
        name = request.getfixturevalue("database_name")
    monkeypatch.setattr(listener, "LINGER", LINGER)
    yield
    forget_brokers(monkeypatch)
    if name is not None:
        server: Server = request.getfixturevalue("server")
        wait_until(
            lambda: server.run_sql(SESSIONS, params=(name,)) == [(0,)],
            PATIENCE,
            "connections are left open",
        )
    # What is only collected now must complain in this test, not in another one.
    gc.collect()


@pytest.fixture
def connect(nothing_left: None, broker_url: str) -> Iterator[Callable[..., Connection]]:
    """A function that makes a connected kombu Connection; arguments are transport options."""
    made: list[Connection] = []

    def run(url: str | None = None, *, lazy: bool = False, **options: Any) -> Connection:
        connection = Connection(url or broker_url, transport_options=options)
        made.append(connection)
        if not lazy:
            connection.connect()
        return connection

    yield run
    for connection in made:
        connection.close()


@pytest.fixture
def proxied(
    connect: Callable[..., Connection], proxy: Any, database_name: str
) -> Iterator[Callable[..., Connection]]:
    """A function that makes a connection by way of the proxy, where everything ends well."""
    made: list[Connection] = []

    def run(**options: Any) -> Connection:
        made.append(connect(proxy.url(database_name, scheme="pgnotify"), **options))
        return made[-1]

    yield run
    proxy.thaw()
    proxy.accept()
    for connection in made:
        keeper = connection.transport.broker.keeper
        connection.close()
        # While the proxy is still there.
        wait_until(lambda: not keeper.held and not keeper.pending)  # noqa: B023


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    """A connection with the usual options."""
    return connect()


@pytest.fixture
def queue() -> str:
    return f"queue-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def inbox() -> Callable[..., Inbox]:
    """The class :class:`Inbox`: call it with a connection or channel and queues."""
    return Inbox


@pytest.fixture
def send(connect: Callable[..., Connection], queue: str) -> Callable[..., None]:
    """A function that publishes bodies to this test's queue, over a connection of its own."""
    connections: list[Connection] = []

    def run(*bodies: Any, to: str = queue, **options: Any) -> None:
        if not connections:
            connections.append(connect())
        producer = connections[0].Producer(auto_declare=False)
        for body in bodies:
            producer.publish(body, routing_key=to, **{"serializer": "json", **options})

    return run


@pytest.fixture
def drain() -> Callable[..., None]:
    """A function that drains a connection until a condition holds."""

    def run(connection: Connection, until: Callable[[], Any]) -> None:
        while not until():
            # A single delivery that takes this long fails the test by TimeoutError.
            connection.drain_events(timeout=PATIENCE)

    return run


@pytest.fixture
def drain_all() -> Callable[[Connection], None]:
    """A function that drains a connection until nothing comes any more."""

    def run(connection: Connection) -> None:
        with pytest.raises(TimeoutError):
            while True:
                connection.drain_events(timeout=0.2)

    return run


@pytest.fixture
def sql(database: str) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """A function that runs a statement on a plain connection of its own, in autocommit."""
    with psycopg.connect(database, autocommit=True) as connection:

        def run(text: str, *params: Any) -> list[tuple[Any, ...]]:
            cursor = connection.execute(text.encode(), params or None)
            return cursor.fetchall() if cursor.description is not None else []

        yield run


@pytest.fixture
def rows(sql: Callable[..., list[tuple[Any, ...]]]) -> Callable[[], tuple[int, int, int]]:
    """A function that counts this database's messages, leases and dead letters."""

    def run() -> tuple[int, int, int]:
        counts = sql(
            "SELECT count(*), count(lease_worker_id),"
            " (SELECT count(*) FROM pgnotify.dead_letters) FROM pgnotify.tasks"
        )
        return counts[0]  # type: ignore[return-value]

    return run


@pytest.fixture
def wait_rows(rows: Callable[[], tuple[int, int, int]]) -> Callable[..., None]:
    """A function that waits until there are so many messages, leases and dead letters."""

    def run(messages: int, leased: int, dead: int = 0) -> None:
        wanted = (messages, leased, dead)
        wait_until(
            lambda: rows() == wanted,
            PATIENCE,
            lambda: f"{rows()} messages, leases and dead letters, not {wanted}",
        )

    return run


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The round trips of this process from now on, each the names of its statements."""
    seen: list[tuple[str, ...]] = []

    def recorded(do: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(session: Session, *calls: Any, **options: Any) -> Any:
            seen.append(tuple(statement.name for statement, _ in calls))
            return do(session, *calls, **options)

        return wrapped

    for name in ("run", "send"):
        monkeypatch.setattr(Session, name, recorded(getattr(Session, name)))
    return seen


@pytest.fixture
def run_script(broker_url: str) -> Callable[..., str]:
    """A function that runs a Python script in a process of its own and returns its output.

    The script finds the broker's URL and further arguments in ``sys.argv``.
    """

    def run(script: str, *arguments: str, timeout: float = 60) -> str:
        command = [sys.executable, "-c", textwrap.dedent(script), broker_url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
