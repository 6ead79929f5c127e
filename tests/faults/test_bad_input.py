"""Nonsense in, a clear error or a dead letter out: no consumer ends, and no neighbour is lost."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from faults.nonsense import (
    CLEAR,
    LONG,
    MODEST,
    Receiver,
    Sender,
    is_clear,
    json_values,
    nothing_leased,
    numbers,
    scalars,
    text,
    values,
)
from helpers import wait_until
from hypothesis import assume, example, given, strategies as st
from kombu import Connection, Exchange, Queue

from kombu_pgnotify import options, urls
from kombu_pgnotify.errors import ConfigurationError
from kombu_pgnotify.store import channel_of, exchange_channel_of

Sql = Callable[..., list[tuple[Any, ...]]]

# Our threads draw from the same random numbers, which Hypothesis takes for a strategy that does.
pytestmark = pytest.mark.filterwarnings(
    "ignore::hypothesis.errors.HypothesisDeprecationWarning",
)

# -- publishing


def test_whatever_is_published_or_refused_the_next_message_arrives(
    sender: Sender, receiver: Receiver, sql: Sql
) -> None:
    refused: Counter[str] = Counter()

    @MODEST
    @given(
        body=values,
        headers=st.dictionaries(text, values, max_size=3),
        properties=st.fixed_dictionaries(
            {},
            optional={
                "priority": scalars,
                "expiration": numbers,
                "delivery_mode": st.sampled_from([1, 2, "persistent", "transient"]) | numbers,
                "correlation_id": values,
                "reply_to": values,
                "message_id": values,
                "timestamp": values,
                "serializer": st.sampled_from(["json", "pickle", "yaml", "msgpack", "raw"]),
                "compression": st.sampled_from(["gzip", "bzip2"]),
                "strange": values,
            },
        ),
    )
    @example(body="x\0\ud800", headers={"a\0": "\ud800"}, properties={"priority": -1})
    @example(body=b"\0\xff", headers={"task": "x", "eta": "\0"}, properties={"priority": 2**40})
    @example(body=1, headers={"task": "x", "eta": "0001-01-01T00:00:00+23:59"}, properties={})
    @example(body=1, headers={"task": "x", "eta": "9999-12-31T23:59:59-23:59"}, properties={})
    @example(body=[None], headers={}, properties={"serializer": "raw"})
    @example(body=5, headers={}, properties={"serializer": "raw"})
    @example(body=10**400, headers={}, properties={"serializer": "raw"})
    @example(body=1, headers={}, properties={"expiration": math.nan})
    @example(body=1, headers={}, properties={"expiration": 10**400})
    def check(body: Any, headers: dict[str, Any], properties: dict[str, Any]) -> None:
        assume("good" not in headers)
        try:
            sender.producer.publish(body, routing_key="box", headers=headers, **properties)
        except Exception as error:
            if not is_clear(error):
                raise
            refused[type(error).__name__] += 1
        sender.good(routing_key="box")
        receiver.wait_for(sender.labels)

    check()
    receiver.finish(sender.labels)
    nothing_leased(receiver, sql)
    assert receiver.others
    assert refused["EncodeError"]


def test_any_name_is_taken_or_refused_clearly(
    connect: Callable[..., Connection], sender: Sender, receiver: Receiver, sql: Sql
) -> None:
    channel = connect().default_channel
    complaints: list[str] = []

    @MODEST
    @given(
        names=st.lists(text, min_size=3, max_size=3),
        kind=st.sampled_from(["direct", "topic", "fanout", "headers", "\0", "x'y"]),
        arguments=st.dictionaries(
            st.sampled_from(
                "x-message-ttl x-expires x-max-priority x-max-length x-dead-letter-exchange"
                " x-dead-letter-routing-key x-overflow x-other".split()
            ),
            values,
            max_size=2,
        ),
    )
    @example(names=["q\0", "x", "k"], kind="topic", arguments={})
    @example(names=["q", "x\ud800", "k"], kind="topic", arguments={})
    @example(names=["q", "x", "\0"], kind="topic", arguments={})
    @example(names=["q", "x", LONG], kind="topic", arguments={})
    @example(names=[LONG, LONG, LONG], kind="direct", arguments={})
    @example(names=["q", "amq.topic", ".*#[(\\"], kind="topic", arguments={})
    @example(names=["q", "", "(((("], kind="topic", arguments={"x-message-ttl": 2**31})
    def check(names: list[str], kind: str, arguments: dict[str, Any]) -> None:
        queue, exchange, key = names
        assume(queue != "box")
        steps: list[Callable[[], Any]] = [
            lambda: channel.exchange_declare(exchange, kind, durable=True),
            lambda: channel.queue_declare(queue, arguments=arguments, exclusive=True),
            lambda: channel.queue_bind(queue, exchange, key),
            lambda: sender.producer.publish(1, exchange=exchange, routing_key=key),
            lambda: sender.producer.publish(1, exchange=exchange, routing_key="other.key"),
            lambda: sender.producer.publish(1, routing_key=queue),
            lambda: channel.basic_get(queue, no_ack=True),
            lambda: channel.queue_unbind(queue, exchange, key),
            lambda: channel.queue_delete(queue),
            lambda: None if exchange.startswith("amq.") else channel.exchange_delete(exchange),
        ]
        for step in steps:
            try:
                step()
            except CLEAR as error:
                complaints.append(str(error))
        sender.good(routing_key="box")
        receiver.wait_for(sender.labels)

    check()
    assert complaints
    assert all(complaints)
    receiver.finish(sender.labels)
    nothing_leased(receiver, sql)


@MODEST
@given(
    st.builds(
        "pgnotify://{}:{}@{}:{}/{}?{}={}".format, text, text, text, text, text,
        st.sampled_from([*options.NAMES, "sslmode", "host", "x", "options"]), text,
    )
    | st.builds("pgnotify://{}".format, text)
)  # fmt: skip
def test_any_url_is_read_or_refused_clearly(url: str) -> None:
    try:
        target = urls.parse(url, options.NAMES)
        options.build(target, {})
    except ConfigurationError as error:
        complaint = str(error)
    else:
        complaint = "none"
    assert complaint


@MODEST
@given(st.dictionaries(st.sampled_from(options.NAMES) | text, values, max_size=3))
def test_any_option_is_taken_or_refused_clearly(given_options: dict[str, Any]) -> None:
    try:
        built = options.build(urls.parse("pgnotify://host/db", options.NAMES), given_options)
    except ConfigurationError as error:
        complaint = str(error)
    else:
        complaint = "none"
        hash(built)
    assert complaint


# -- notifications

notices = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300
) | st.builds(
    "{}\n{}\n{}".format,
    st.fixed_dictionaries(
        {"keys": st.just(["", "k"]) | json_values, "not": st.just([]) | json_values,
         "ttl": st.none() | json_values},
    ).map(json.dumps),
    json_values.map(json.dumps)
    | st.fixed_dictionaries({"properties": json_values, "headers": json_values}).map(json.dumps),
    st.sampled_from(["t", "t[1]", "b", "b!", "bAAAA", "#1", "#99999999999999999999", "#x", ""]),
)  # fmt: skip


def test_forged_notifications_end_no_consumer_and_lose_nothing(
    connect: Callable[..., Connection], sender: Sender, receiver: Receiver, sql: Sql
) -> None:
    calls = Exchange("calls", "fanout", durable=False)
    ears = Queue("ears", calls, exclusive=True, auto_delete=True, durable=False)
    live = Receiver(connect(), ears, no_ack=True)

    def is_live() -> bool:
        with pytest.raises(TimeoutError):
            live.connection.drain_events(timeout=0.05)
        return sql("SELECT live FROM pgnotify.queues WHERE queue_name = 'ears'") == [(True,)]

    wait_until(is_live)
    told = Sender(connect())
    channels = [
        channel_of("pgnotify", "box"),
        channel_of("pgnotify", "ears"),
        exchange_channel_of("pgnotify", "calls"),
        "pgnotify_of_somebody_else",
    ]

    @MODEST
    @given(
        channel=st.sampled_from(channels),
        payload=notices | st.sampled_from(["published", "released", "bound", "", "x" * 7000]),
    )
    def check(channel: str, payload: str) -> None:
        try:
            sql("SELECT pg_notify(%s, %s)", channel, payload)
        except psycopg.Error:
            return
        sender.good(routing_key="box")
        told.good(exchange="calls", delivery_mode=1)
        receiver.wait_for(sender.labels)
        live.wait_for(told.labels)

    check()
    receiver.finish(sender.labels)
    live.finish(told.labels)
    nothing_leased(receiver, sql)
