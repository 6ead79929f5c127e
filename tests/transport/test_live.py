"""Live queues: a consumer's own queue is told directly what its exchanges have for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Consumer, Exchange, Message, Queue
from kombu.asynchronous import Hub
from kombu.pidbox import Mailbox

from kombu_pgnotify.messages import exchange_channel_of

Connect = Callable[..., Connection]
Sql = Callable[..., list[tuple[Any, ...]]]
Rows = Callable[[], tuple[int, int, int]]
Pump = Callable[[Connection, Callable[[], Any]], None]

#: Seconds that anything may take to come about.
PATIENCE = 20.0

CALLS = Exchange("calls", type="fanout", durable=False)


def ears(name: str = "ears", exchange: Exchange = CALLS, key: str = "", **given: Any) -> Queue:
    """A queue of one consumer's own, as those of Celery's control commands and events."""
    return Queue(
        name, exchange, key, durable=False, exclusive=True, auto_delete=True, expires=10, **given
    )


@pytest.fixture(params=["drain", "hub"])
def pump(request: pytest.FixtureRequest) -> Iterator[Pump]:
    """A function that consumes until a condition holds, by drain_events or in kombu's hub."""
    hub = Hub()
    looped: set[Connection] = set()

    def run(connection: Connection, until: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, "it did not come about"
            if request.param == "hub":
                if connection not in looped:
                    looped.add(connection)
                    connection.register_with_event_loop(hub)
                hub.run_once()
                continue
            try:
                connection.drain_events(timeout=0.05)
            except TimeoutError:
                continue

    yield run
    for connection in looped:
        connection.close()
    hub.close()


@pytest.fixture
def is_live(sql: Sql) -> Callable[..., bool]:
    """A function that tells whether exchanges tell a queue directly."""

    def run(name: str = "ears") -> bool:
        found = sql("SELECT live FROM pgnotify.queues WHERE queue_name = %s", name)
        return found == [(True,)]

    return run


@pytest.fixture
def tell(connect: Connect) -> Callable[..., None]:
    """A function that publishes to the exchange, on a connection of its own."""
    connections: list[Connection] = []

    def run(*bodies: Any, to: str = CALLS.name, key: str = "", **options: Any) -> None:
        if not connections:
            connections.append(connect())
        producer = connections[0].Producer(serializer="json", auto_declare=False)
        for body in bodies:
            producer.publish(body, exchange=to, routing_key=key, delivery_mode=1, **options)

    return run


def listen(channel: Any, queue: Queue, receive: Callable[[Message], object]) -> Consumer:
    """Consume without acknowledging."""
    accept = ["json", "application/data"]
    consumer = Consumer(channel, [queue], no_ack=True, accept=accept, on_message=receive)
    consumer.consume()
    return consumer


#: Around what a NOTIFY takes (8000 bytes, envelope and heading included), and far beyond.
SIZES = [0, 1, 100, *range(7000, 8101, 100), 65_536, 1_000_000, 5_000_000]


@pytest.mark.parametrize("fill", [b"x", b"\xff", b"\0"], ids=["ASCII", "binary", "NUL"])
def test_payloads_of_any_size_come_once_and_in_order_and_leave_no_rows(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, rows: Rows, fill: bytes
) -> None:
    connection, got = connect(polling_interval=3600), []
    listen(connection, ears(), lambda m: got.append(bytes(m.payload or b"")))
    pump(connection, is_live)
    bodies = [fill * size for size in SIZES]
    tell(*bodies, content_type="application/data", content_encoding="binary")
    assert rows() == (0, 0, 0)
    pump(connection, lambda: len(got) >= len(bodies))
    assert [len(body) for body in got] == SIZES
    assert got == bodies


def pump_until_live(connection: Connection, is_live: Callable[[], bool]) -> None:
    while not is_live():
        try:
            connection.drain_events(timeout=0.05)
        except TimeoutError:
            continue


def talk_while(tell: Any, going_on: Callable[[], bool]) -> tuple[threading.Thread, list[int]]:
    """Publish numbers from a thread, at least a hundred, while something goes on."""
    told: list[int] = []

    def run() -> None:
        while going_on() or len(told) < 100:
            tell(len(told))
            told.append(len(told))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(told) > 20)
    return thread, told


def test_nothing_is_lost_or_doubled_while_a_queue_goes_live(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, rows: Rows
) -> None:
    connection, got, live = connect(polling_interval=3600), [], threading.Event()
    ears()(connection.default_channel).declare()
    thread, told = talk_while(tell, lambda: not live.is_set())
    listen(connection, ears(), lambda m: got.append(m.payload))
    pump(connection, is_live)
    live.set()
    thread.join()
    pump(connection, lambda: len(got) >= len(told))
    assert sorted(got) == told
    assert rows() == (0, 0, 0)


def test_the_order_is_kept_while_a_queue_goes_live(
    connect: Connect, is_live: Any, tell: Any, drain: Any, sql: Sql
) -> None:
    connection, got = connect(polling_interval=3600), []
    ears()(connection.default_channel).declare()
    tell(*range(20))
    listen(connection, ears(), lambda m: got.append(m.payload))
    connection.drain_events(timeout=PATIENCE)
    listening = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
        " AND query ~ 'LISTEN.*pgnotify_x_' AND state = 'idle'"
    )
    wait_until(lambda: sql(listening))
    drain(connection, is_live)
    tell(*range(20, 40))
    drain(connection, lambda: len(got) == 40)
    assert got == list(range(40))


def test_a_busy_queue_does_not_silence_a_live_one(
    connect: Connect, is_live: Any, tell: Any, drain: Any
) -> None:
    connection, got = connect(queue_order_strategy="sorted", polling_interval=0.01), []
    listen(connection, ears(), lambda m: got.append(m.payload))
    pump_until_live(connection, is_live)
    connection.default_channel.queue_declare("busy")
    tell(*range(200), to="", key="busy")
    listen(connection, Queue("busy"), lambda m: got.append(m.payload))
    tell("heard")
    drain(connection, lambda: len(got) == 100)
    assert "heard" in got


def test_a_second_queue_of_an_exchange_goes_live_too(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, rows: Rows
) -> None:
    connection, got = connect(polling_interval=3600), []
    for name in ("ears", "more ears"):
        listen(connection.channel(), ears(name), lambda m: got.append(m.payload))
        pump(connection, lambda name=name: is_live(name))  # type: ignore[misc]
    tell("x")
    assert rows() == (0, 0, 0)
    pump(connection, lambda: got == ["x", "x"])


def test_a_binding_made_while_it_is_live_loses_nothing(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, rows: Rows
) -> None:
    news = Exchange("news", type="topic", durable=False)
    connection, got, bound = connect(polling_interval=3600), [], threading.Event()
    listen(connection, ears(), lambda m: got.append(m.payload))
    news(connection.default_channel).declare()
    pump(connection, is_live)
    thread, told = talk_while(tell, lambda: not bound.is_set())
    ears()(connection.default_channel).bind_to(news, "a.*")
    pump(connection, is_live)
    bound.set()
    thread.join()
    tell("by topic", to="news", key="a.b")
    tell("not for us", to="news", key="b")
    pump(connection, lambda: len(got) > len(told))
    assert sorted(got[:-1]) == told
    assert got[-1] == "by topic"
    assert rows() == (0, 0, 0)


def test_a_topic_with_several_bindings_tells_once(
    connect: Connect, pump: Pump, is_live: Any, tell: Any
) -> None:
    news = Exchange("news", type="topic", durable=False)
    connection, got = connect(polling_interval=3600), []
    queue = ears(exchange=news, key="a.#")
    consumer = listen(connection, queue, lambda m: got.append(m.delivery_info["routing_key"]))
    consumer.queues[0].bind_to(news, "*.b")
    pump(connection, is_live)
    for key in ("a.b", "a", "c.b", "c", "a.b.c"):
        tell("x", to="news", key=key)
    pump(connection, lambda: len(got) >= 4)
    assert got == ["a.b", "a", "c.b", "a.b.c"]


def test_each_of_several_listeners_is_told_and_durable_queues_get_rows(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, rows: Rows
) -> None:
    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    connections = {name: connect(polling_interval=3600) for name in got}
    for name, box in got.items():
        listen(connections[name], ears(name), lambda m, box=box: box.append(m.payload))
        pump(connections[name], lambda name=name: is_live(name))  # type: ignore[misc]
    Queue("durable", CALLS)(connections["a"].default_channel).declare()
    tell(*range(50))
    assert rows() == (50, 0, 0)
    for name, box in got.items():
        pump(connections[name], lambda box=box: len(box) >= 50)  # type: ignore[misc]
    assert list(got.values()) == [list(range(50))] * 3


# -- inside callbacks


def test_a_callback_may_close_its_channel_and_listen_anew(
    connect: Connect, pump: Pump, is_live: Any, tell: Any
) -> None:
    # As a worker's mailbox is reset when a command fails.
    connection, got = connect(polling_interval=3600), []
    consumers: list[Consumer] = []

    def start() -> None:
        consumers.append(listen(connection.channel(), ears(), receive))

    def receive(message: Message) -> None:
        got.append(message.payload)
        consumers[-1].cancel()
        consumers[-1].channel.close()
        start()

    start()
    for n in range(10):
        pump(connection, is_live)
        tell(n)
        pump(connection, lambda n=n: got == list(range(n + 1)))  # type: ignore[misc]
    tell("as a row or not")
    pump(connection, lambda: got[-1] == "as a row or not")


def test_a_consumer_that_its_callback_cancels_gets_no_more(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, sql: Sql
) -> None:
    connection, got, others = connect(polling_interval=3600), [], []

    def receive(message: Message) -> None:
        got.append(message.payload)
        consumer.cancel()

    consumer = listen(connection.channel(), ears(), receive)
    other = ears("other", Exchange("others", type="fanout", durable=False))
    listen(connection.channel(), other, lambda m: others.append(m.payload))
    pump(connection, lambda: is_live() and is_live("other"))
    tell(*range(5))
    tell("x", to="others")
    pump(connection, lambda: others)
    assert got == [0]
    # The queue was its own, and has gone with it.
    wait_until(lambda: sql("SELECT queue_name FROM pgnotify.queues") == [("other",)])
    assert sql("SELECT queue_name FROM pgnotify.bindings") == [("other",)]


def test_what_a_callback_raises_passes_through_and_the_rest_comes(
    connect: Connect, is_live: Any, tell: Any, drain: Any
) -> None:
    connection, got = connect(polling_interval=3600), []

    def receive(message: Message) -> None:
        got.append(message.payload)
        if message.payload == 1:
            raise SystemExit

    listen(connection, ears(), receive)
    pump_until_live(connection, is_live)
    tell(*range(4))
    with pytest.raises(SystemExit):
        drain(connection, lambda: len(got) == 4)
    drain(connection, lambda: len(got) == 4)
    assert got == [0, 1, 2, 3]


def test_a_queue_that_listens_anew_is_not_live_before_it_hears(
    connect: Connect, is_live: Any, tell: Any, drain: Any, sql: Sql, server: Server
) -> None:
    assert server.embedded  # whose processes we may stop
    connection, got = connect(polling_interval=3600), []
    consumer = listen(connection.channel(), ears(), lambda m: got.append(m.payload))
    listen(connection.channel(), Queue("second"), print)
    pump_until_live(connection, is_live)
    consumer.cancel()
    listen(connection.channel(), Queue("third"), print)
    unlistened = "SELECT pid FROM pg_stat_activity WHERE query ~ '^(UN)?LISTEN.*UNLISTEN'"
    ((pid,),) = wait_until(lambda: sql(f"{unlistened} AND datname = current_database()"))
    os.kill(pid, signal.SIGSTOP)
    try:
        listen(connection.channel(), ears(), lambda m: got.append(m.payload))
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.5)
        assert not is_live()
        tell("as a row")
    finally:
        os.kill(pid, signal.SIGCONT)
    pump_until_live(connection, is_live)
    tell("directly")
    drain(connection, lambda: len(got) == 2)
    assert got == ["as a row", "directly"]


# -- time


def test_what_waits_longer_than_its_time_is_dropped(
    connect: Connect, is_live: Any, tell: Any, drain: Any, sql: Sql
) -> None:
    connection, got = connect(polling_interval=3600), []
    listen(connection, ears(message_ttl=0.5), lambda m: got.append(m.payload))
    pump_until_live(connection, is_live)
    tell("old")
    tell("older", expiration=0.1)
    consumption = connection.transport.consumption
    wait_until(lambda: len(consumption._live._queues["ears"]._heard) == 2)
    (until,) = sql("SELECT clock_timestamp() + interval '0.6 s'")[0]
    wait_until(lambda: sql("SELECT clock_timestamp() > %s", until) == [(True,)])
    tell("new")
    drain(connection, lambda: got)
    assert got == ["new"]


def test_a_listener_that_is_killed_is_forgotten_and_another_one_hears(
    connect: Connect, pump: Pump, is_live: Any, tell: Any, sql: Sql
) -> None:
    connection, got = connect(polling_interval=3600), []
    listen(connection, ears(), lambda m: got.append(m.payload))
    pump(connection, is_live)
    sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
    )
    broker = connection.transport.broker

    def hears() -> bool:
        tell("?")
        pump(connection, lambda: True)
        try:
            connection.drain_events(timeout=0.1)
        except TimeoutError:
            return False
        return bool(got)

    wait_until(hears)
    assert broker.listener._thread is not None


# -- nothing stays


def test_questions_and_answers_leave_nothing_behind(connect: Connect, sql: Sql, rows: Rows) -> None:
    worker, client, stop = connect(), connect(), threading.Event()
    mailbox = Mailbox("test", type="fanout", queue_expires=10)
    node = mailbox(worker).Node("node", channel=worker.default_channel)
    node.handlers["echo"] = lambda state, text: text
    consumer = node.listen(callback=node.handle_message)

    def work() -> None:
        while not stop.is_set():
            try:
                worker.drain_events(timeout=0.1)
            except TimeoutError:
                continue

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for n in range(60):
            # Each question has a mailbox of its own, as each call of Celery's inspect.
            asked = Mailbox("test", type="fanout")(client)
            text = f"{n}" if n % 10 else f"{n}" * 5000
            answer = asked.call(["node"], "echo", {"text": text}, timeout=PATIENCE)
            assert answer == [{"node": text}]
    finally:
        stop.set()
        thread.join()
    queues = sql("SELECT queue_name FROM pgnotify.queues")
    assert queues == [("node.test.pidbox",)]
    assert sql("SELECT queue_name FROM pgnotify.bindings") == queues
    assert rows() == (0, 0, 0)
    # Big messages stay for a minute.  (Before kombu 5.7 a mailbox is not its worker's alone, and
    # gets rows.)
    alone = mailbox.get_queue("node").exclusive
    assert sql("SELECT count(*) > 0 FROM pgnotify.broadcasts") == [(alone,)]
    sql("UPDATE pgnotify.broadcasts SET published_at = now() - interval '61 s'")
    wait_until(lambda: sql("SELECT count(*) FROM pgnotify.broadcasts") == [(0,)])
    consumer.cancel()
    if alone:
        # Else it goes when somebody sweeps after its time.
        wait_until(lambda: sql("SELECT count(*) FROM pgnotify.queues") == [(0,)])


def test_without_live_queues_all_comes_as_rows_and_no_notice_is_believed(
    connect: Connect, is_live: Any, tell: Any, drain: Any, sql: Sql
) -> None:
    connection, got = connect(live_queues=False), []
    listen(connection, ears(), lambda m: got.append(m.payload))
    tell(*range(3))
    forged = '{"keys": [""], "not": [], "ttl": null}\n{}\nt'
    sql("SELECT pg_notify(%s, %s)", exchange_channel_of("pgnotify", CALLS.name), forged)
    tell("last")
    drain(connection, lambda: len(got) == 4)
    assert got == [0, 1, 2, "last"]
    assert not is_live()
