"""Rows that somebody wrote by hand, in every table, end no consumer and lose no other row."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from faults.nonsense import (
    CLEAR,
    FEW,
    LONG,
    MODEST,
    Receiver,
    Sender,
    json_values,
    nothing_leased,
    text,
)
from hypothesis import example, given, strategies as st
from kombu import Connection, Queue

from kombu_pgnotify.errors import ConfigurationError

Sql = Callable[..., list[tuple[Any, ...]]]

# Our threads draw from the same random numbers, which Hypothesis takes for a strategy that does.
pytestmark = pytest.mark.filterwarnings(
    "ignore::hypothesis.errors.HypothesisDeprecationWarning",
)

times = st.sampled_from(
    ["infinity", "-infinity", "4713-01-01 BC", "294276-01-01", "2000-01-01", None]
)
counts = st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1])
envelopes = st.sampled_from(["", "{}", "[]", "null", "1", '"x"', "{", "\ud83d", "[" * 5000]) | (
    st.fixed_dictionaries(
        {"properties": json_values | st.just({}), "headers": json_values | st.just({})},
        optional={"content-type": json_values, "content-encoding": json_values},
    ).map(json.dumps)
)
deaths = (
    st.none()
    | json_values.map(json.dumps)
    | st.lists(
        st.dictionaries(
            st.sampled_from(["queue", "reason", "count", "exchange", "routing-keys", "time"]),
            json_values | st.sampled_from(["box", "rejected", 1.5, -1e30, 10**9]),
        ),
        max_size=2,
    ).map(json.dumps)
)
TASK_COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "task_name": st.just("box"),
    "priority": st.sampled_from([0, 0, 0, 255, -1, 256, None]),
    "available_at": times,
    "published_at": times,
    "attempts": counts,
    "deliveries": counts,
    "lease": st.none() | st.tuples(text, times),
    "envelope": envelopes,
    "payload": st.binary(max_size=20),
    "expires_at": times,
    "exchange_name": st.none() | text | st.just(LONG),
    "routing_key": st.none() | text | st.just(LONG),
    "deaths": deaths,
}


@pytest.mark.parametrize("arguments", [{}, {"x-dead-letter-exchange": "", "x-max-length": 50}])
@pytest.mark.parametrize("no_ack", [False, True])
def test_rows_written_badly_end_no_consumer_and_lose_no_other_row(
    no_ack: bool,
    arguments: dict[str, Any],
    connect: Callable[..., Connection],
    sender: Sender,
    sql: Sql,
) -> None:
    connection = connect(max_attempts=3)
    receiver = Receiver(connection, Queue("box", queue_arguments=arguments), no_ack=no_ack)
    written = 0

    @MODEST
    @given(st.fixed_dictionaries({}, optional=TASK_COLUMNS))
    @example({"envelope": "x", "routing_key": LONG})
    @example({"envelope": "x", "expires_at": "2000-01-01", "routing_key": LONG})
    @example({"deaths": json.dumps([{"queue": "box", "reason": "unreadable", "count": 1.5}])})
    @example({"deaths": json.dumps([{"queue": 1, "reason": [2], "count": -1e30}]), "attempts": 9})
    @example({"lease": ("\N{PILE OF POO}", "2000-01-01"), "deliveries": 2**31 - 1})
    @example({"available_at": "infinity", "expires_at": "-infinity"})
    def check(row: dict[str, Any]) -> None:
        nonlocal written
        row = {"task_name": "box", "envelope": "{}", "payload": b"", **row}
        if (lease := row.pop("lease", None)) is not None:
            row["lease_worker_id"], row["lease_expiration"] = lease
        names = ", ".join(row)
        places = ", ".join(["%s"] * len(row))
        try:
            sql(f"INSERT INTO pgnotify.tasks ({names}) VALUES ({places})", *row.values())
            written += 1
        except (psycopg.Error, UnicodeEncodeError):
            # The server, or psycopg, refuses the row.
            pass
        sender.good(routing_key="box")
        receiver.wait_for(sender.labels)

    check()
    assert written
    receiver.finish(sender.labels)
    connection.transport.broker.housekeeper.sweep()
    nothing_leased(receiver, sql)
    # What is left is none that a consumer could have now.
    assert (
        sql(
            "SELECT * FROM pgnotify.tasks WHERE task_name = 'box'"
            " AND (available_at IS NULL OR available_at <= now())"
            " AND (lease_expiration IS NULL OR lease_expiration < now())"
        )
        == []
    )


limits = st.sampled_from(["NaN", "infinity", "-infinity", 1e300, -5, 0, 0.001, None])
QUEUE_COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "arguments": st.sampled_from(["", "no JSON", "[]", "\N{PILE OF POO}"]),
    "message_ttl": limits,
    "expires": limits,
    "max_priority": st.sampled_from([-5, 0, 3000, None]),
    "max_length": st.sampled_from([-1, 0, 2**62, None]),
    "dead_letter_exchange": st.sampled_from(["", "odd", "nowhere", LONG, None]),
    "dead_letter_routing_key": st.sampled_from(["", "box", "odd", LONG, None]),
    "name_prefix": st.sampled_from(["", "o", "odd", LONG]),
    "expires_at": times,
    "exclusive": st.booleans(),
    "auto_delete": st.booleans(),
    "durable": st.booleans(),
    "live": st.booleans(),
    "binding_version": st.sampled_from([-1, 0, 2**63 - 1]),
}
PATTERNS = ["", "(((", "^", ".*", "(a*)*b", r"\1", "[", "***:x", "^.$"]


def test_rows_written_badly_into_other_tables_hold_up_nothing_else(
    connect: Callable[..., Connection], sender: Sender, receiver: Receiver, sql: Sql
) -> None:
    connection = connect()
    channel, broker = connection.default_channel, connection.transport.broker
    Queue("neighbour", auto_delete=True)(channel).declare()
    complaints: list[str] = []

    @FEW
    @given(
        columns=st.fixed_dictionaries({}, optional=QUEUE_COLUMNS),
        kind=st.sampled_from(["direct", "topic", "fanout", "headers", ""]),
        pattern=st.sampled_from(PATTERNS),
    )
    @example(columns={"expires": "-infinity"}, kind="direct", pattern="^")
    @example(columns={"message_ttl": "NaN"}, kind="direct", pattern="^")
    @example(columns={"binding_version": 2**63 - 1}, kind="topic", pattern="(((")
    @example(columns={"max_priority": -5}, kind="topic", pattern="(((")
    @example(columns={"dead_letter_exchange": "odd"}, kind="topic", pattern="(((")
    def check(columns: dict[str, Any], kind: str, pattern: str) -> None:
        row = {
            "queue_name": "odd", "durable": True, "exclusive": False, "auto_delete": True,
            "arguments": "{}", "declared_by": "nobody", **columns,
        }  # fmt: skip
        sql("DELETE FROM pgnotify.queues WHERE queue_name = 'odd'")
        sql("DELETE FROM pgnotify.exchanges WHERE exchange_name = 'odd'")
        places = ", ".join(["%s"] * len(row))
        inserts: list[tuple[str, list[Any]]] = [
            (f"INSERT INTO pgnotify.queues ({', '.join(row)}) VALUES ({places})", [*row.values()]),
            ("INSERT INTO pgnotify.exchanges VALUES ('odd', %s, true)", [kind]),
            ("INSERT INTO pgnotify.bindings VALUES ('odd', 'k', 'odd', %s)", [pattern]),
        ]
        for insert, values in inserts:
            try:
                sql(insert, *values)
            except psycopg.Error:
                pass
        steps: list[Callable[[], Any]] = [
            lambda: sender.producer.publish(1, routing_key="odd", priority=9, expiration=0),
            lambda: sender.producer.publish(1, exchange="odd", routing_key="k", expiration=0),
            lambda: channel.basic_get("odd").reject(),
            lambda: channel.queue_bind("odd", "odd", "x"),
            lambda: channel.queue_declare("odd"),
            lambda: channel.queue_delete("odd"),
        ]
        for step in steps:
            # What is in use beside it stays in use, and what has expired goes.
            assert "neighbour" in broker.topology.touch(["neighbour", "odd"])
            broker.housekeeper.sweep()
            try:
                step()
            except CLEAR as error:
                complaints.append(str(error))
            except AttributeError:
                pass  # there was none to reject
        sender.good(routing_key="box")
        receiver.wait_for(sender.labels)

    check()
    assert all(complaints)
    # Among what was sent elsewhere are dead letters.
    receiver.finish(sender.labels)
    nothing_leased(receiver, sql)


def test_odd_rows_of_the_books_are_refused_in_one_sentence_or_passed_over(
    connect: Callable[..., Connection], sql: Sql
) -> None:
    connection = connect()
    sql("UPDATE pgnotify.chores SET done_at = 'infinity'")
    sql("INSERT INTO pgnotify.chores (chore, done_at) VALUES ('\N{PILE OF POO}', '-infinity')")
    sql(
        "INSERT INTO pgnotify.broadcasts (published_at, envelope, payload)"
        " VALUES ('-infinity', 'x', ''), ('infinity', '[]', '')"
    )
    connection.transport.broker.housekeeper.sweep()
    assert sql("SELECT envelope FROM pgnotify.broadcasts") == [("[]",)]
    sql("INSERT INTO pgnotify.migrations (version) VALUES (2147483647)")
    with pytest.raises(ConfigurationError, match="install the newer kombu_pgnotify here too"):
        connect(application_name="another broker")
