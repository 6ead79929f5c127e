"""What a queue's arguments and a message's own time mean for its messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from helpers import wait_until
from kombu import Connection, Exchange, Queue

from kombu_pgnotify import housekeeper
from kombu_pgnotify.errors import ConfigurationError

Connect = Callable[..., Connection]
Send = Callable[..., None]
Sql = Callable[..., list[tuple[Any, ...]]]
Rows = Callable[[], tuple[int, int, int]]
Drain = Callable[[Connection, Callable[[], Any]], None]

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def hurried_housekeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear away several times a second."""
    monkeypatch.setattr(housekeeper, "ROUND", 0.2)
    monkeypatch.setattr(housekeeper, "SWEEP_EVERY", 0.2)


@pytest.fixture
def declare(connection: Connection) -> Callable[..., Queue]:
    """A function that declares a queue."""

    def run(name: str, *args: Any, **given: Any) -> Queue:
        bound = Queue(name, *args, **given)(connection.default_channel)
        bound.declare()
        return bound

    return run


@pytest.fixture
def take(connection: Connection) -> Callable[..., list[Any]]:
    """A function that takes all that a queue has."""

    def run(name: str) -> list[Any]:
        found = []
        while (message := connection.default_channel.basic_get(name, no_ack=True)) is not None:
            found.append(message.payload)
        return found

    return run


@pytest.fixture
def sweeper(connect: Connect, inbox: Any) -> None:
    """Somebody who consumes: whoever does takes turns in clearing away what has expired."""
    inbox(connect(), "sweeper's own")


def gone(sql: Sql, seconds: float) -> None:
    """Let the server's clock go on."""
    (until,) = sql("SELECT clock_timestamp() + make_interval(secs => %s)", seconds)[0]
    wait_until(lambda: sql("SELECT clock_timestamp() > %s", until) == [(True,)])


# -- a message's time


@pytest.mark.parametrize("no_ack", [False, True])
def test_an_expired_message_is_delivered_to_nobody(
    connection: Connection, inbox: Any, send: Send, sql: Sql, queue: str, no_ack: bool, drain: Drain
) -> None:
    send("expired", expiration=0.2)
    send("at once", expiration=0)
    gone(sql, 0.2)
    send("lasting", expiration=3600)
    assert connection.default_channel.queue_declare(queue, passive=True).message_count == 1
    got = inbox(connection, queue, no_ack=no_ack)
    drain(connection, lambda: got.messages)
    assert got.bodies == ["lasting"]


def test_getting_passes_over_what_has_expired(
    connection: Connection, send: Send, sql: Sql, queue: str
) -> None:
    send("expired", expiration=0.1)
    send("lasting")
    gone(sql, 0.1)
    assert connection.default_channel.basic_get(queue).payload == "lasting"


def test_expired_messages_are_cleared_away_although_nobody_gets_them(
    send: Send, rows: Rows, sweeper: None
) -> None:
    for _ in range(5):
        send("expired", expiration=0.1)
    send("lasting")
    wait_until(lambda: rows() == (1, 0, 0), PATIENCE)


def test_a_messages_time_ends_only_while_it_waits(
    connection: Connection, inbox: Any, send: Send, sql: Sql, queue: str, rows: Rows
) -> None:
    send("in hand", expiration=0.3)
    got = inbox(connection, queue)
    connection.drain_events(timeout=PATIENCE)
    gone(sql, 0.3)
    got.messages[0].ack()
    assert rows() == (0, 0, 0)


def test_an_expiration_that_is_no_number_is_refused(connection: Connection, queue: str) -> None:
    message = connection.default_channel.prepare_message("x", properties={"expiration": "soon"})
    with pytest.raises(ConfigurationError, match="soon"):
        connection.default_channel.basic_publish(message, "", queue)


@pytest.mark.parametrize(
    ("option", "headers", "delivered"),
    [
        ("deliver", {"task": "t", "expires": "2020-01-01T00:00:00+00:00"}, True),
        ("drop", {"task": "t", "expires": "2020-01-01T00:00:00+00:00"}, False),
        ("deliver", {"task": "t"}, False),
        ("deliver", {}, False),
    ],
)
def test_expired_tasks_are_delivered_or_dropped(
    connect: Connect, sql: Sql, queue: str, option: str, headers: dict[str, Any], delivered: bool
) -> None:
    connection = connect(expired_tasks=option)
    connection.Producer().publish("x", routing_key=queue, expiration=0.01, headers=headers)
    gone(sql, 0.02)
    found = connection.default_channel.basic_get(queue)
    assert (found is not None) is delivered


# -- x-message-ttl


def test_a_queues_messages_last_as_long_as_it_says_or_less(
    declare: Any, take: Any, send: Send, sql: Sql
) -> None:
    declare("box", message_ttl=0.3)
    declare("other")
    send("by the queue", to="box")
    send("less", to="box", expiration=0.01)
    send("not more", to="box", expiration=3600)
    send("elsewhere", to="other")
    gone(sql, 0.05)
    assert sql("SELECT count(*) FROM pgnotify.tasks WHERE expires_at < now()") == [(1,)]
    gone(sql, 0.3)
    assert (take("box"), take("other")) == ([], ["elsewhere"])


def test_the_time_of_a_held_message_begins_when_it_is_due(
    declare: Any, take: Any, send: Send, sql: Sql
) -> None:
    declare("box", message_ttl=0.5)
    eta = (datetime.now(timezone.utc) + timedelta(seconds=1)).isoformat()
    send("later", to="box", headers={"task": "t", "eta": eta})
    lasting = "SELECT expires_at - available_at FROM pgnotify.tasks"
    assert sql(lasting) == [(timedelta(seconds=0.5),)]
    gone(sql, 1.05)
    assert take("box") == ["later"]


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_it_counts_for_routed_messages_too(
    connection: Connection, declare: Any, send: Send, sql: Sql, kind: str
) -> None:
    declare("box", Exchange("news", type=kind), "key", message_ttl=60)
    connection.Producer().publish("x", exchange="news", routing_key="key")
    assert sql("SELECT expires_at - published_at FROM pgnotify.tasks") == [(timedelta(seconds=60),)]


# -- x-expires and auto_delete


def test_an_unused_queue_goes_with_its_bindings_and_messages(
    declare: Any, send: Send, sql: Sql, sweeper: None
) -> None:
    declare("box", Exchange("news", type="fanout"), expires=0.2)
    declare("lasting")
    send("x", to="box")
    wait_until(lambda: sql("SELECT 1 FROM pgnotify.queues WHERE queue_name = 'box'") == [])
    assert sql("SELECT count(*) FROM pgnotify.bindings") == [(0,)]
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]
    assert ("lasting",) in sql("SELECT queue_name FROM pgnotify.queues")


@pytest.mark.parametrize("given", [{"expires": 1}, {"auto_delete": True}], ids=str)
def test_a_queue_in_use_stays(
    connect: Connect, connection: Connection, sql: Sql, given: dict[str, Any]
) -> None:
    consumer = connection.Consumer(Queue("box", **given), callbacks=[print])
    consumer.consume()
    expires_at = "SELECT expires_at FROM pgnotify.queues WHERE queue_name = 'box'"
    # It is put off again and again, although nobody drains the connection.
    for _ in range(3):
        before = sql(expires_at)
        wait_until(lambda: sql(expires_at) != before)  # noqa: B023
    assert sql(f"{expires_at} AND expires_at > now()")


def test_looking_into_a_queue_puts_its_end_off(
    connection: Connection, declare: Any, sql: Sql
) -> None:
    declare("box", expires=60)
    expires_at = "SELECT expires_at FROM pgnotify.queues"
    before = sql(expires_at)
    connection.default_channel.basic_get("box")
    wait_until(lambda: sql(expires_at) > before)


def test_a_queue_that_vanished_under_its_consumer_is_declared_again(
    connection: Connection, inbox: Any, sql: Sql, drain: Drain
) -> None:
    got: list[Any] = []
    queue = Queue("box", Exchange("news", type="fanout"), expires=2, auto_delete=True)
    connection.Consumer(queue, callbacks=[lambda body, m: got.append(body)]).consume()
    sql("DELETE FROM pgnotify.queues")
    bound = "SELECT queue_name FROM pgnotify.bindings"
    wait_until(lambda: sql(bound) == [("box",)])
    connection.Producer().publish("x", exchange="news")
    drain(connection, lambda: got == ["x"])


# -- x-max-length


def test_a_full_queue_drops_its_head(declare: Any, take: Any, send: Send) -> None:
    declare("box", max_length=3)
    send(*range(10), to="box")
    assert take("box") == [7, 8, 9]


def test_what_somebody_holds_does_not_count_and_is_not_dropped(
    connection: Connection, declare: Any, take: Any, send: Send
) -> None:
    declare("box", max_length=2)
    send(0, to="box")
    held = connection.default_channel.basic_get("box")
    send(1, 2, 3, to="box")
    held.ack()
    assert take("box") == [2, 3]


def test_a_full_queue_drops_what_comes_by_an_exchange_too(
    connection: Connection, declare: Any, take: Any
) -> None:
    declare("box", Exchange("news", type="fanout"), max_length=0)
    connection.Producer().publish("x", exchange="news")
    assert take("box") == []


# -- priorities


def test_priorities_above_the_queues_are_cut_off(declare: Any, take: Any, send: Send) -> None:
    declare("box", max_priority=5)
    for name, priority in (("first", 5), ("low", 1), ("second", 200), ("third", 9)):
        send(name, to="box", priority=priority)
    assert take("box") == ["first", "second", "third", "low"]


def test_in_redis_order_the_lowest_comes_first(connect: Connect, queue: str) -> None:
    connection = connect(priority_order="redis")
    for priority in (5, 0, 9, 0, 3, 255):
        connection.Producer().publish(priority, routing_key=queue, priority=priority)
    found = [connection.default_channel.basic_get(queue, no_ack=True).payload for _ in range(6)]
    assert found == [0, 0, 3, 5, 9, 255]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("priority", list("bbbccaaa")), ("sorted", list("aaabbbcc")), ("round_robin", None)],
)
def test_queues_take_their_turns_as_asked(
    connect: Connect,
    inbox: Any,
    send: Send,
    drain: Drain,
    strategy: str,
    expected: list[str] | None,
) -> None:
    connection = connect(queue_order_strategy=strategy)
    names = ["b", "c", "a"]
    for name, count in zip(names, (3, 2, 3), strict=True):
        send(*[name] * count, to=name)
    got = inbox(connection, *names, prefetch=1, on_message=lambda m: m.ack())
    drain(connection, lambda: len(got.messages) == 8)
    if expected is None:
        assert set(got.bodies[:3]) == set(names)
    else:
        assert got.bodies == expected


# -- dead letter exchanges


@pytest.fixture
def grave(declare: Any) -> dict[str, Any]:
    """Arguments of a queue whose dead letters go to the queue `grave`."""
    declare("grave", Exchange("dlx", type="direct"), "buried")
    return {"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "buried"}


def test_a_rejected_message_goes_to_the_dead_letter_exchange(
    connection: Connection, declare: Any, grave: dict[str, Any], send: Send, rows: Rows
) -> None:
    declare("box", queue_arguments=grave)
    send("poison", to="box", headers={"mine": 1}, priority=3)
    connection.default_channel.basic_get("box").reject()
    found = connection.default_channel.basic_get("grave")
    assert found.payload == "poison"
    assert found.headers["mine"] == 1
    (death,) = found.headers["x-death"]
    assert death.pop("time") > 1_000_000_000
    assert death == {
        "queue": "box",
        "reason": "rejected",
        "exchange": "",
        "routing-keys": ["box"],
        "count": 1,
    }
    assert found.headers["x-first-death-queue"] == "box"
    assert found.headers["x-first-death-reason"] == "rejected"
    assert found.delivery_info["exchange"] == "dlx"
    assert found.delivery_info["routing_key"] == "buried"
    assert "redelivered" not in found.delivery_info
    found.ack()
    # Nothing is kept where it has somewhere to go.
    assert rows() == (0, 0, 0)


def test_the_routing_key_stays_unless_another_is_given(
    connection: Connection, declare: Any, take: Any, send: Send
) -> None:
    declare("grave", Exchange("dlx", type="topic"), "box.#")
    arguments = {"x-dead-letter-exchange": "dlx"}
    declare("box.1", queue_arguments=arguments)
    declare("named", Exchange("news", type="direct"), "box.2", queue_arguments=arguments)
    send("by its queue", to="box.1")
    connection.Producer().publish("by its key", exchange="news", routing_key="box.2")
    for name in ("box.1", "named"):
        connection.default_channel.basic_get(name).reject()
    assert take("grave") == ["by its queue", "by its key"]


def test_the_default_exchange_goes_to_the_queue_of_that_name(
    connection: Connection, declare: Any, take: Any, send: Send
) -> None:
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave"}
    declare("box", queue_arguments=arguments)
    send("x", to="box")
    connection.default_channel.basic_get("box").reject()
    assert take("grave") == ["x"]


def test_expired_and_dropped_messages_go_there_and_wake_its_consumer(
    connect: Connect, inbox: Any, declare: Any, grave: dict[str, Any], send: Send, drain: Drain
) -> None:
    declare("short", message_ttl=0.1, queue_arguments=grave)
    declare("full", max_length=1, queue_arguments=grave)
    consumer = connect(polling_interval=3600)
    got = inbox(consumer, "grave")
    send("expired", to="short")
    send("dropped", "kept", to="full")
    drain(consumer, lambda: len(got.messages) == 2)
    reasons = {m.payload: m.headers["x-first-death-reason"] for m in got.messages}
    assert reasons == {"expired": "expired", "dropped": "maxlen"}


def test_attempts_used_up_count_as_a_death(
    connect: Connect, declare: Any, grave: dict[str, Any], take: Any, send: Send
) -> None:
    declare("box", queue_arguments=grave)
    send("poison", to="box")
    channel = connect(max_attempts=2).default_channel
    for _ in range(2):
        channel.basic_get("box").requeue()
    assert channel.basic_get("box") is None
    assert take("grave") == ["poison"]


def test_a_message_that_comes_back_by_itself_is_dropped_and_a_rejected_one_is_counted(
    connection: Connection, declare: Any, send: Send, sql: Sql, rows: Rows
) -> None:
    to_itself = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "box"}
    declare("box", queue_arguments=to_itself)
    send("again", to="box")
    for count in range(1, 4):
        message = connection.default_channel.basic_get("box")
        counted = [death["count"] for death in message.headers.get("x-death", [])]
        assert counted == ([count - 1] if count > 1 else [])
        message.reject()
    connection.default_channel.queue_purge("box")
    send("expired", to="box", expiration=0.05)
    gone(sql, 0.05)
    assert connection.default_channel.basic_get("box") is None
    assert rows() == (0, 0, 0)


def test_a_way_through_several_queues_is_told_newest_first(
    connection: Connection, declare: Any, send: Send
) -> None:
    for name, following in (("one", "two"), ("two", "three"), ("three", "end")):
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": following}
        declare(name, queue_arguments=arguments)
    send("x", to="one")
    for name in ("one", "two", "three"):
        connection.default_channel.basic_get(name).reject()
    headers = connection.default_channel.basic_get("end").headers
    assert [death["queue"] for death in headers["x-death"]] == ["three", "two", "one"]
    assert headers["x-first-death-queue"] == "one"


def test_without_a_way_the_message_is_dropped(
    connection: Connection, declare: Any, send: Send, rows: Rows
) -> None:
    declare("box", queue_arguments={"x-dead-letter-exchange": "no such exchange"})
    send("x", to="box")
    connection.default_channel.basic_get("box").reject()
    assert rows() == (0, 0, 0)


# -- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-message-ttl", -1),
        ("x-message-ttl", "soon"),
        ("x-expires", 0),
        ("x-max-length", 1.5),
        ("x-max-priority", 256),
        ("x-dead-letter-exchange", 5),
    ],
)
def test_an_argument_that_cannot_be_is_named(connection: Connection, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*'box'"):
        connection.default_channel.queue_declare("box", arguments={name: value})


def test_the_last_declaration_counts(
    declare: Any, take: Any, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    declare("box", max_length=1)
    declare("box", max_length=3)
    assert "queue.redeclared queue='box'" in caplog.text
    send(*range(5), to="box")
    assert take("box") == [2, 3, 4]
