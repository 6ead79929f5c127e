"""Consumers and publishers that go on after a loss, as Celery's and kombu's own do."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Consumer, Message, Queue
from kombu.asynchronous import Hub
from kombu.exceptions import OperationalError

from kombu_pgnotify import broker as brokers, keeper, listener

PATIENCE = 30.0  # seconds that anything may take; only a failing test waits that long
TURN = 0.05  # seconds after which a loop looks whether it shall end
LINGER = 0.05  # seconds the listener stays after the last consumer
OURS = "datname = current_database() AND application_name LIKE 'kombu_pgnotify%'"
#: The connection that hears announcements: it passes some on, and then has another last query, but
#: also a lock that says for what it waits.
WAITS = "pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock')"
LISTENER = f"{OURS} AND (query ~ 'LISTEN|listening' OR {WAITS})"

#: kombu's retries: soon again, and longer than any outage of these tests.
RETRIES: dict[str, Any] = {"interval_start": 0.05, "interval_step": 0.05, "interval_max": 0.2}


class Loop:
    """Consumes a queue in a thread of its own.

    Attributes:
        messages: what came, in order.
        losses: the connection errors that it has got over.
        refusals: the errors of attempts to connect again.
    """

    def __init__(self, connection: Connection, queue: str, *, ack: bool, prefetch: int) -> None:
        self.connection = connection
        self.messages: list[Message] = []
        self.losses: list[Exception] = []
        self.refusals: list[Exception] = []
        self.failure: BaseException | None = None
        self._queue, self._ack, self._prefetch = queue, ack, prefetch
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in list(self.messages)]

    @property
    def broker(self) -> brokers.Broker:
        return self.connection.transport.broker  # type: ignore[no-any-return]

    def start(self) -> None:
        """Consume, and wait until announcements are heard, if they are to be."""
        self._thread.start()
        broker = self.broker

        def ready() -> bool:
            heard = not broker.options.notify or bool(broker.listener._heard)
            return self.failure is not None or (self._started.is_set() and heard)

        wait_until(ready, PATIENCE, "the loop does not start")
        self._complain()

    def wait(self, condition: Callable[[], Any], what: str = "it did not come about") -> None:
        """Wait until the condition holds; fail at once if the loop has ended."""
        wait_until(
            lambda: self.failure is not None or condition(),
            PATIENCE,
            lambda: f"{what}; got {self.bodies[-20:]}, losses {self.losses}, {self.refusals}",
        )
        self._complain()

    def wait_bodies(self, *bodies: Any) -> None:
        """Wait until each body has come, in whatever order, and nothing else has."""
        self.wait(lambda: set(self.bodies) >= set(bodies), f"not all of {bodies} came")
        assert sorted(self.bodies) == sorted(bodies)

    def stop(self) -> None:
        """End the loop and close its connection."""
        self._stopping.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the loop does not end"
        self._complain()

    def _complain(self) -> None:
        if self.failure is not None:
            raise AssertionError("the loop has ended") from self.failure

    def _run(self) -> None:
        try:
            turn = self._consume
            while not self._stopping.is_set():
                try:
                    turn()
                    turn = self._turn
                    self._started.set()
                except TimeoutError:
                    pass
                except self.connection.connection_errors as exc:
                    self.losses.append(exc)
                    turn = self._recover
            self.connection.close()
        except BaseException as exc:
            self.failure = exc
        finally:
            self._end()

    def _consume(self) -> None:
        channel = self.connection.channel()
        consumer = Consumer(
            channel,
            [Queue(self._queue)],
            accept=["json"],
            on_message=self._receive,
            prefetch_count=self._prefetch or None,
        )
        consumer.consume()

    def _receive(self, message: Message) -> None:
        if self._ack:
            self._settle(message)
        self.messages.append(message)

    def _reconnect(self) -> None:
        def refused(exc: Exception, _interval: float) -> None:
            self.refusals.append(exc)
            if self._stopping.is_set():
                raise exc

        self.connection = self.connection.clone()
        self.connection.ensure_connection(errback=refused, **RETRIES)

    def _turn(self) -> None:
        raise NotImplementedError

    def _settle(self, message: Message) -> None:
        message.ack()

    def _recover(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        pass


class SyncLoop(Loop):
    """As kombu's ConsumerMixin, and Celery's gevent and eventlet workers."""

    def _turn(self) -> None:
        self.connection.drain_events(timeout=TURN)

    def _recover(self) -> None:
        self.connection.collect(1)
        self.connection.release()
        self._reconnect()
        self._consume()


class HubLoop(Loop):
    """As Celery's other workers."""

    def _consume(self) -> None:
        if not hasattr(self, "_hub"):
            self._hub = Hub()
        self._hub.call_repeatedly(TURN, lambda: None)
        self.connection.register_with_event_loop(self._hub)
        super()._consume()

    def _turn(self) -> None:
        self._hub.run_once()

    def _settle(self, message: Message) -> None:
        self._hub.call_soon(message.ack)

    def _recover(self) -> None:
        self._hub.reset()
        self.connection.collect(5)
        self.connection.close()
        self._reconnect()
        self._consume()

    def _end(self) -> None:
        self._hub.close()


class Publisher:
    """Publishes to a queue and tries again for as long as it takes.

    Attributes:
        doubtful: bodies that were tried again: the first time may have gone well all the same.
        errors: why.
    """

    def __init__(self, connection: Connection, queue: str) -> None:
        self.connection = connection
        self.doubtful: set[Any] = set()
        self.errors: list[Exception] = []
        self._queue = queue
        self._producer = connection.Producer(auto_declare=False)

    def publish(self, *bodies: Any, retry: bool = True, **options: Any) -> None:
        for body in bodies:
            deadline = time.monotonic() + PATIENCE
            while not self._publish(body, retry, options):
                # kombu does not pause where it can connect, and is refused then.
                assert time.monotonic() < deadline, f"{body} is not accepted: {self.errors[-3:]}"
                time.sleep(TURN)

    def _publish(self, body: Any, retry: bool, options: dict[str, Any]) -> bool:
        policy = {**RETRIES, "max_retries": 3, "errback": self._doubt(body)}
        options = {"serializer": "json", **options}
        try:
            self._producer.publish(
                body, routing_key=self._queue, retry=retry, retry_policy=policy, **options
            )
        except (OperationalError, *self.connection.connection_errors) as exc:
            if not retry:
                raise
            self._doubt(body)(exc, 0.0)
            return False
        return True

    def _doubt(self, body: Any) -> Callable[[Exception, float], None]:
        def note(exc: Exception, _interval: float) -> None:
            self.doubtful.add(body)
            self.errors.append(exc)

        return note


Consume = Callable[..., Loop]
Publish = Callable[..., Publisher]
Sql = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture(params=[SyncLoop, HubLoop], ids=["sync", "hub"])
def loop_kind(request: pytest.FixtureRequest) -> type[Loop]:
    """The kind of loop: the test runs once with each."""
    kind: type[Loop] = request.param
    return kind


@pytest.fixture
def brokers_closed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No thread and no connection of ours is left; servers and proxies go after us."""
    names = ["servers", "own_server", "database_name", "make_proxy", "pgbouncer"]
    used = {name: request.getfixturevalue(name) for name in names if name in request.fixturenames}
    monkeypatch.setattr(listener, "LINGER", LINGER)
    yield
    _forget_brokers(monkeypatch)
    if "pgbouncer" in used:
        # It keeps its connections.
        used["pgbouncer"].stop()
    if "database_name" in used:
        _wait_nobody(request.getfixturevalue("server"), used["database_name"])
    for server in [*used.get("servers", ()), used.get("own_server")]:
        if server is not None and server.embedded.pid:
            _wait_nobody(server)
    # What is only collected now must complain in this test, not in another one.
    gc.collect()


def _wait_nobody(server: Server, name: str | None = None) -> None:
    sql = f"SELECT query FROM pg_stat_activity WHERE {OURS}"
    found = lambda: server.run_sql(sql, name)  # noqa: E731
    wait_until(lambda: not found(), PATIENCE, lambda: f"connections are left open: {found()}")


def _forget_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close this process's brokers and wait for their threads, which else would linger."""
    monkeypatch.setattr(keeper, "IDLE_ROUNDS", 0)
    made = list(brokers._brokers.values())
    brokers._brokers.clear()
    for broker in made:
        broker.close()

    def left() -> list[str]:
        for broker in made:
            broker.keeper.hurry()
            broker.listener._nudge()
        return [t.name for t in threading.enumerate() if t.name.startswith("pgnotify-")]

    wait_until(lambda: not left(), PATIENCE, lambda: f"threads are left: {left()}")


@pytest.fixture
def consume(loop_kind: type[Loop], brokers_closed: None) -> Iterator[Consume]:
    """A function that starts a loop; other arguments are transport options.

    Its poll is an hour away unless asked for: only announcements bring messages.
    """
    loops: list[Loop] = []

    def start(
        url: str, queue: str = "queue", *, ack: bool = True, prefetch: int = 0, **options: Any
    ) -> Loop:
        options = {"polling_interval": 3600, **options}
        loop = loop_kind(
            Connection(url, transport_options=options), queue, ack=ack, prefetch=prefetch
        )
        loops.append(loop)
        loop.connection.connect()
        loop.start()
        return loop

    yield start
    for loop in loops:
        loop.stop()


@pytest.fixture
def publisher(brokers_closed: None) -> Iterator[Publish]:
    """A function that makes a publisher with connections of its own."""
    made: list[Publisher] = []

    def make(url: str, queue: str = "queue", **options: Any) -> Publisher:
        options = {"application_name": "kombu_pgnotify publisher", **options}
        made.append(Publisher(Connection(url, transport_options=options), queue))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


@pytest.fixture
def sql(request: pytest.FixtureRequest) -> Iterator[Sql]:
    """A function that runs a statement past all faults, on a connection that may be lost."""
    own = "own_server" in request.fixturenames
    url = request.getfixturevalue("own_server").url() if own else None
    url = url or request.getfixturevalue("database")
    kept: list[psycopg.Connection[Any]] = []

    def run(text: str, *params: Any) -> list[tuple[Any, ...]]:
        if not kept or kept[-1].closed:
            kept.append(psycopg.connect(url, autocommit=True))
        try:
            cursor = kept[-1].execute(text.encode(), params or None)
        except psycopg.OperationalError:
            if not kept[-1].broken:
                raise
            kept[-1].close()
            return run(text, *params)
        return cursor.fetchall() if cursor.description else []

    yield run
    for connection in kept:
        connection.close()


def counts(sql: Sql) -> tuple[int, int]:
    """How many messages there are, and how many of them are leased."""
    return sql("SELECT count(*), count(lease_worker_id) FROM pgnotify.tasks")[0]  # type: ignore[return-value]


def wait_counts(sql: Sql, total: int, leased: int) -> None:
    """Wait until there are so many messages, so many of them leased."""
    wanted = (total, leased)
    wait_until(
        lambda: counts(sql) == wanted,
        PATIENCE,
        lambda: f"{counts(sql)} messages and leases, not {wanted}",
    )


def terminate(sql: Sql, whom: str = OURS) -> list[int]:
    """End backends, and wait until they have gone; return their process ids."""
    rows = sql(f"SELECT pid, pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {whom}")
    return [pid for pid, _ in rows]


def elapsed(run: Callable[[], Any]) -> float:
    """Run and return how many seconds that took."""
    started = time.monotonic()
    run()
    return time.monotonic() - started
