"""Exchanges, queues and bindings are the same for all processes, and so is where messages go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings, strategies as st

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import Ranges
from kombu_pgnotify.errors import StatementFailed
from kombu_pgnotify.messages import Outgoing
from kombu_pgnotify.store import MessageStore
from kombu_pgnotify.topology import Queue, Topology, topic_pattern

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

MESSAGE = Outgoing("{}", b"body")

#: What PostgreSQL keeps as text.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
odd = st.text(st.sampled_from("ab.#*\"'\\\n{}[]()|?+^$%_ é😀"), max_size=12)
names = texts | odd


@pytest.fixture
def topology(broker: Broker) -> Topology:
    return broker.topology


def declare(topology: Topology, *queues: str) -> None:
    for queue in queues:
        topology.declare_queue(Queue(queue), "me")


def exchange(
    topology: Topology, name: str, kind: str, bindings: Iterable[tuple[str, str]] = ()
) -> None:
    """Declare an exchange with `(queue, key)` bound to it, and the queues."""
    topology.declare_exchange(name, kind, durable=True)
    for queue, key in bindings:
        declare(topology, queue)
        assert topology.bind(queue, name, key) == (True, True)


def routed(store: MessageStore, name: str, key: str) -> list[str]:
    return sorted(store.publish_routed(name, key, MESSAGE).queues)


# -- topics


def amqp_matches(pattern: list[str], words: list[str]) -> bool:
    """AMQP 0-9-1, 3.1.3.3: `*` is one word, `#` any number of them."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(amqp_matches(pattern[1:], words[n:]) for n in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and amqp_matches(pattern[1:], words[1:])


def words_of(key: str) -> list[str]:
    return key.split(".") if key else []


few_words = st.lists(st.sampled_from(["a", "b", "", "*", "#", "#", "ab"]), max_size=6)
topics = few_words.map(".".join) | odd
keys = st.lists(st.sampled_from(["a", "b", "", "ab", "*", "#"]), max_size=6).map(".".join) | odd


def test_a_topic_pattern_matches_what_amqp_says(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:

        @settings(max_examples=100, deadline=None)
        @given(pairs=st.lists(st.tuples(topics, keys), min_size=20, max_size=60))
        def check(pairs: list[tuple[str, str]]) -> None:
            found = connection.execute(
                "SELECT (CASE WHEN key = '' THEN '' ELSE '.' || key END) ~ pattern"
                " FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS t (key, pattern, place)"
                " ORDER BY place",
                ([key for _, key in pairs], [topic_pattern(topic) for topic, _ in pairs]),
            ).fetchall()
            expected = [amqp_matches(words_of(topic), words_of(key)) for topic, key in pairs]
            assert [row[0] for row in found] == expected

        check()


@pytest.mark.parametrize(
    ("topic", "matching", "others"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "aXb", ".a.b", "a.b\n", "A.b"]),
        ("a.*", ["a.b", "a.", "a.\n"], ["a", "a.b.c", "b.a"]),
        ("*", ["a", "*", "#", "é😀"], ["", "a.b", "."]),
        ("#", ["", "a", "a.b.c", "...", "\n"], []),
        ("a.#", ["a", "a.b", "a.b.c", "a."], ["", "b", "ab"]),
        ("#.a", ["a", "b.a", "..a"], ["a.b", "ba", ""]),
        ("a.#.b", ["a.b", "a.x.b", "a.x.y.b", "a..b"], ["a", "b", "ab", "a.bb"]),
        ("#.#", ["", "a", "a.b"], []),
        ("", [""], ["a", "."]),
        (".", ["."], ["", "a", ".."]),
        ("a.\\d+(x)", ["a.\\d+(x)"], ["a.1x"]),
    ],
)
def test_a_topic_exchange_sends_where_the_key_matches(
    topic: str, matching: list[str], others: list[str], topology: Topology, store: MessageStore
) -> None:
    exchange(topology, "x", "topic", [("queue", topic)])
    for key in matching:
        assert routed(store, "x", key) == ["queue"], key
    for key in others:
        assert routed(store, "x", key) == [], key


def test_many_wildcards_take_no_time_to_speak_of(topology: Topology, store: MessageStore) -> None:
    exchange(topology, "x", "topic", [("queue", ".".join("#*" * 30)), ("other", "#.z")])
    # Within statement_timeout, that is.
    assert routed(store, "x", ".".join("ab" * 60)) == ["queue"]


# -- where messages go


def test_a_direct_exchange_sends_to_each_queue_with_that_key(
    topology: Topology, store: MessageStore
) -> None:
    exchange(topology, "x", "direct", [("one", "k"), ("two", "k"), ("three", "other")])
    assert routed(store, "x", "k") == ["one", "two"]
    assert routed(store, "x", "other") == ["three"]
    assert routed(store, "x", "K") == []


def test_a_fanout_exchange_sends_to_all(topology: Topology, store: MessageStore) -> None:
    exchange(topology, "x", "fanout", [("one", ""), ("two", "whatever"), ("three", "#")])
    assert routed(store, "x", "any key") == ["one", "three", "two"]


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_a_queue_gets_one_copy_however_many_bindings_match(
    kind: str, topology: Topology, store: MessageStore
) -> None:
    bindings = [("queue", "k"), ("queue", "#"), ("queue", "*"), ("other", "k")]
    exchange(topology, "x", kind, [*bindings, *bindings])
    assert routed(store, "x", "k") == ["other", "queue"]
    assert (store.size("queue"), store.size("other")) == (1, 1)


def test_what_arrives_is_what_was_sent(
    topology: Topology, store: MessageStore, everything: Ranges
) -> None:
    exchange(topology, "x", "fanout", [("one", ""), ("two", "")])
    body = bytes(range(256)) * 50
    store.publish_routed("x", "", Outgoing('{"a": "\\u0000"}', body, priority=3))
    for queue in ("one", "two"):
        (row,) = store.take(queue, everything, 10)
        assert (row.envelope, row.payload, row.rank) == ('{"a": "\\u0000"}', body, 252)


def test_what_no_queue_is_bound_for_is_written_nowhere(
    topology: Topology, store: MessageStore, sql: Sql
) -> None:
    exchange(topology, "bound", "direct", [("queue", "k")])
    for kind in ("direct", "topic", "fanout"):
        exchange(topology, f"unbound {kind}", kind)
    for name in ("unknown", "unbound direct", "unbound topic", "unbound fanout", "bound"):
        found = store.publish_routed(name, "nowhere", MESSAGE)
        assert (found.queues, found.live) == ([], 0)
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]
    assert sql("SELECT count(*) FROM pgnotify.broadcasts") == [(0,)]


def test_only_a_durable_direct_exchange_without_any_binding_is_unbound(
    topology: Topology, store: MessageStore
) -> None:
    for kind in ("direct", "topic", "fanout"):
        topology.declare_exchange(kind, kind, durable=True)
        topology.declare_exchange(f"passing {kind}", kind, durable=False)
    exchange(topology, "bound", "direct", [("queue", "k")])
    names = ["direct", "topic", "fanout", "bound", "unknown", ""]
    names += [f"passing {kind}" for kind in ("direct", "topic", "fanout")]
    unbound = [name for name in names if store.publish_routed(name, "other", MESSAGE).unbound]
    assert unbound == ["direct"]


def test_those_that_amqp_predeclares_are_there(topology: Topology, store: MessageStore) -> None:
    assert topology.exchanges() == ["amq.direct", "amq.fanout", "amq.topic"]
    declare(topology, "queue")
    topology.bind("queue", "amq.topic", "a.*")
    assert routed(store, "amq.topic", "a.b") == ["queue"]


# -- for everybody at once


def test_another_process_sees_each_change_at_once(make_broker: MakeBroker) -> None:
    one, two = make_broker(), make_broker()
    for n in range(3):
        exchange(one.topology, "x", "topic", [(f"queue{n}", "a.*")])
        assert routed(two.store, "x", "a.b") == [f"queue{m}" for m in range(n + 1)]
    assert two.topology.bindings() == [(f"queue{n}", "x", "a.*") for n in range(3)]
    two.topology.unbind("queue0", "x", "a.*")
    assert routed(one.store, "x", "a.b") == ["queue1", "queue2"]
    two.topology.delete_queue("queue1")
    assert routed(one.store, "x", "a.b") == ["queue2"]
    two.topology.declare_exchange("x", "direct", durable=True)
    assert routed(one.store, "x", "a.b") == []
    assert routed(one.store, "x", "a.*") == ["queue2"]
    two.topology.delete_exchange("x")
    assert routed(one.store, "x", "a.*") == []
    assert one.topology.exchange_type("x") is None


def test_schemas_have_exchanges_of_their_own(make_broker: MakeBroker) -> None:
    one, two = make_broker(schema='we"ird'), make_broker(schema="two")
    exchange(one.topology, "x", "fanout", [("queue", "")])
    assert two.topology.exchange_type("x") is None
    assert routed(one.store, "x", "") == ["queue"]
    assert two.store.size("queue") == 0


# -- declarations


def test_an_exchange_declared_anew_with_another_type_wins_and_says_so(
    topology: Topology, store: MessageStore, caplog: pytest.LogCaptureFixture
) -> None:
    exchange(topology, "x", "direct", [("queue", "a.*")])
    assert caplog.text == ""
    topology.declare_exchange("x", "topic", durable=True)
    assert "exchange.redeclared" in caplog.text
    assert "'x'" in caplog.text
    assert topology.exchange_type("x") == "topic"
    assert routed(store, "x", "a.b") == ["queue"], "its bindings are kept"


def test_a_declaration_that_changes_nothing_writes_nothing(
    topology: Topology, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    def versions() -> list[tuple[Any, ...]]:
        return sql(
            "SELECT xmin::text FROM pgnotify.exchanges WHERE exchange_name = 'x'"
            " UNION ALL SELECT xmin::text FROM pgnotify.queues"
            " UNION ALL SELECT xmin::text FROM pgnotify.bindings"
        )

    exchange(topology, "x", "topic", [("queue", "#")])
    before = versions()
    exchange(topology, "x", "topic", [("queue", "#")])
    assert versions() == before
    assert caplog.text == ""


def test_a_queue_declared_anew_with_other_arguments_wins_and_keeps_its_bindings(
    topology: Topology, store: MessageStore, caplog: pytest.LogCaptureFixture, sql: Sql
) -> None:
    exchange(topology, "x", "direct", [("queue", "k")])
    topology.declare_queue(Queue.declared("queue", {"x-max-priority": 5}), "me")
    assert "queue.redeclared" in caplog.text
    assert routed(store, "x", "k") == ["queue"]
    assert sql("SELECT max_priority FROM pgnotify.queues") == [(5,)]


def test_a_binding_needs_both_ends_and_says_which_is_missing(topology: Topology) -> None:
    exchange(topology, "x", "direct", [("queue", "k")])
    assert topology.bind("nobody", "x", "k") == (False, True)
    assert topology.bind("queue", "nothing", "k") == (True, False)
    assert topology.bind("nobody", "nothing", "k") == (False, False)
    assert topology.bindings() == [("queue", "x", "k")]


def test_an_exchange_goes_with_its_bindings_and_without_its_queues(
    topology: Topology, store: MessageStore
) -> None:
    exchange(topology, "x", "direct", [("queue", "k")])
    exchange(topology, "y", "direct", [("queue", "k")])
    store.publish("queue", MESSAGE)
    topology.delete_exchange("x")
    assert topology.bindings() == [("queue", "y", "k")]
    assert topology.has_queue("queue")
    assert store.size("queue") == 1
    topology.declare_exchange("x", "direct", durable=True)
    assert routed(store, "x", "k") == []


def test_an_exchange_in_use_is_not_deleted_if_unused(topology: Topology) -> None:
    exchange(topology, "x", "direct", [("queue", "k")])
    topology.delete_exchange("x", if_unused=True)
    assert topology.exchange_type("x") == "direct"
    topology.unbind("queue", "x", "k")
    topology.delete_exchange("x", if_unused=True)
    assert topology.exchange_type("x") is None


def test_a_queue_goes_with_its_bindings_and_without_its_messages(
    topology: Topology, store: MessageStore
) -> None:
    exchange(topology, "x", "direct", [("queue", "k"), ("other", "k")])
    assert routed(store, "x", "k") == ["other", "queue"]
    topology.delete_queue("queue")
    assert topology.bindings() == [("other", "x", "k")]
    assert routed(store, "x", "k") == ["other"]
    assert store.size("queue") == 1
    assert topology.has_queue("queue"), "it has a message"
    store.purge("queue")
    assert not topology.has_queue("queue")


def test_unbinding_removes_one_binding_and_no_other(
    topology: Topology, store: MessageStore
) -> None:
    bindings = [("queue", "a"), ("queue", "b"), ("other", "a")]
    exchange(topology, "x", "direct", bindings)
    for _ in range(2):
        topology.unbind("queue", "x", "a")
    assert sorted(topology.bindings()) == [("other", "x", "a"), ("queue", "x", "b")]
    assert routed(store, "x", "a") == ["other"]


def test_a_queue_that_holds_messages_counts_as_declared(
    topology: Topology, store: MessageStore
) -> None:
    assert not topology.has_queue("queue")
    store.publish("queue", MESSAGE)
    assert topology.has_queue("queue")
    store.publish("held", Outgoing("{}", b"", available_at="2999-01-01T00:00:00+00:00"))
    assert topology.has_queue("held")


# -- names


def test_names_may_hold_anything(
    topology: Topology, store: MessageStore, everything: Ranges
) -> None:
    @settings(max_examples=60, deadline=None)
    @given(queue=names, name=names, key=names, kind=st.sampled_from(["direct", "topic", "fanout"]))
    def check(queue: str, name: str, key: str, kind: str) -> None:
        exchange(topology, name, kind, [(queue, key)])
        assert topology.exchange_type(name) == kind
        assert topology.bindings() == [(queue, name, key)]
        found = store.publish_routed(name, key, MESSAGE)
        assert found.queues == [queue]
        assert len(store.take(queue, everything, 5)) == 1
        topology.unbind(queue, name, key)
        topology.delete_exchange(name)
        topology.delete_queue(queue)
        assert not topology.has_queue(queue)

    check()


@pytest.mark.parametrize("name", ["x" * 200, "é😀" * 50, "#" * 100, ".".join("*" * 60), " ", "\n"])
def test_long_and_odd_names_are_told_apart(
    name: str, topology: Topology, store: MessageStore
) -> None:
    exchange(topology, name, "direct", [(name, name), (name + "y", name + "y")])
    assert routed(store, name, name) == [name]
    assert routed(store, name, name + "y") == [name + "y"]
    assert routed(store, name + "y", name) == []


@pytest.mark.parametrize("name", ["a\0b", "lone \ud800"])
def test_names_that_postgres_cannot_keep_are_refused(
    name: str, topology: Topology, store: MessageStore
) -> None:
    exchange(topology, "x", "direct", [("queue", "k")])
    for act in (
        lambda: topology.declare_exchange(name, "direct", durable=True),
        lambda: declare(topology, name),
        lambda: topology.bind("queue", "x", name),
        lambda: store.publish_routed(name, "k", MESSAGE),
        lambda: store.publish_routed("x", name, MESSAGE),
        lambda: store.publish_batch([("x", "k", MESSAGE), ("", name, MESSAGE)]),
        lambda: store.publish_batch([("x", "k", MESSAGE), (name, "k", MESSAGE)]),
    ):
        with pytest.raises(StatementFailed):
            act()
    assert store.size("queue") == 0
    assert routed(store, "x", "k") == ["queue"], "the store still works"


@pytest.mark.parametrize("key", ["(", "[", "*a", "a#", "***=", "(?i)a", "\\", "{1,", "a{2}", "a|b"])
def test_what_means_something_in_regular_expressions_is_plain(
    key: str, topology: Topology, store: MessageStore
) -> None:
    exchange(topology, "x", "topic", [("queue", key)])
    assert routed(store, "x", key) == ["queue"]
    assert routed(store, "x", "a") == []
