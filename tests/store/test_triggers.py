"""Announcements: by the triggers for everybody else, by the transport for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from ear import Ear
from hypothesis import given, settings, strategies as st

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import Ranges
from kombu_pgnotify.messages import Fence, Outgoing, channel_of, lock_of
from kombu_pgnotify.store import MessageStore

Sql = Callable[..., list[tuple[Any, ...]]]

INSERT = "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES (%s, '{}', '')"
RELEASE = "UPDATE pgnotify.tasks SET lease_worker_id = NULL, lease_expiration = NULL"


@pytest.fixture
def ear(database: str, store: MessageStore) -> Iterator[Ear]:
    ear = Ear(database, "one", "two", told=lambda: store.size("one"))
    yield ear
    ear.close()


# -- everybody else


def test_a_foreign_insert_announces_once_for_each_queue_and_transaction(
    database: str, ear: Ear
) -> None:
    with psycopg.connect(database) as connection:
        for queue in ("one", "two", "one", "one"):
            connection.execute(INSERT, (queue,))
        connection.execute(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
            " SELECT 'one', '{}', '' FROM generate_series(1, 100)"
        )
        assert ear.heard() == [], "not before the commit"
        connection.commit()
        assert Counter(ear.heard()) == {("one", "published"): 1, ("two", "published"): 1}
        connection.execute(INSERT, ("one",))
    assert ear.heard() == [("one", "published")]


def test_an_insert_that_was_rolled_back_announces_nothing(database: str, ear: Ear) -> None:
    with psycopg.connect(database) as connection:
        connection.execute(INSERT, ("one",))
        connection.rollback()
    assert ear.heard() == []


def test_a_foreign_release_announces_that_rows_came_back(
    store: MessageStore, everything: Ranges, sql: Sql, ear: Ear
) -> None:
    for queue in ("one", "one", "two"):
        store.publish(queue, Outgoing("{}", b""))
        store.claim(queue, everything, 1, "me")
    ear.heard()
    sql(RELEASE)
    assert Counter(ear.heard()) == {("one", "released"): 1, ("two", "released"): 1}
    sql(RELEASE)
    assert ear.heard() == [], "nothing was leased any more"


def test_a_foreign_promotion_announces(store: MessageStore, sql: Sql, ear: Ear) -> None:
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    store.publish("one", Outgoing("{}", b"", available_at=later))
    ear.heard()
    sql("UPDATE pgnotify.tasks SET available_at = NULL")
    assert ear.heard() == [("one", "released")]


@pytest.mark.parametrize(
    "change",
    [
        "lease_expiration = lease_expiration + interval '1 h'",
        "attempts = attempts + 1",
        "envelope = '{}'",
        "lease_worker_id = 'x'",
    ],
)
def test_other_foreign_changes_announce_nothing(
    change: str, store: MessageStore, everything: Ranges, sql: Sql, ear: Ear
) -> None:
    store.publish("one", Outgoing("{}", b""))
    store.claim("one", everything, 1, "me")
    ear.heard()
    sql(f"UPDATE pgnotify.tasks SET {change}")
    assert ear.heard() == []


def test_a_foreign_writer_needs_no_search_path(database: str, ear: Ear) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("SET search_path = ''")
        connection.execute("SET default_transaction_isolation = 'serializable'")
        connection.commit()
        connection.execute(INSERT, ("one",))
    assert ear.heard() == [("one", "published")]


# -- the transport itself


def test_a_publish_announces_exactly_once(store: MessageStore, ear: Ear) -> None:
    store.publish("one", Outgoing("{}", b""))
    assert ear.heard() == [("one", "published")]


def test_the_row_is_there_when_the_announcement_comes(
    database: str, store: MessageStore, sql: Sql
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        channel = channel_of("pgnotify", "one")
        connection.execute(f'LISTEN "{channel}"'.encode())
        connection.execute("SELECT pg_advisory_lock_shared(%s)", (lock_of(channel),))
        for number in range(20):
            store.publish("one", Outgoing("{}", b""))
            assert len(list(connection.notifies(timeout=10, stop_after=1))) == 1
            assert sql("SELECT count(*) FROM pgnotify.tasks") == [(number + 1,)]


def test_an_announcement_that_fails_is_a_warning_since_the_row_is_written(
    store: MessageStore, everything: Ranges, sql: Sql,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    # Longer than NOTIFY takes; a full notification queue fails in the same way.
    too_long = "x" * 64
    monkeypatch.setattr("kombu_pgnotify.store.channel_of", lambda *_: too_long)
    sql("SELECT pg_advisory_lock_shared(%s)", lock_of(too_long))
    assert store.publish("one", Outgoing("{}", b"")) == 1
    store.size("one")
    assert "announce" in caplog.text
    (row,) = store.claim("one", everything, 1, "me")
    assert store.release([Fence(1, row.delivery)], {"one"}, started=False) == {1}
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(1,)]


def test_the_silence_ends_with_the_statement(broker: Broker, store: MessageStore, ear: Ear) -> None:
    store.publish("one", Outgoing("{}", b""))
    ear.heard()
    with broker.database.session() as session:
        # The same connection, now used by the application.
        rows = session.script(
            "SELECT coalesce(current_setting('kombu_pgnotify.quiet', true), ''),"
            " current_setting('synchronous_commit')"
        )
        assert rows == [(b"", b"on")]
        session.script(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES ('two', '{}', '')"
        )
    assert ear.heard() == [("two", "published")]


def test_claims_renewals_and_acknowledgements_announce_nothing(
    store: MessageStore, everything: Ranges, ear: Ear
) -> None:
    for _ in range(3):
        store.publish("one", Outgoing("{}", b""))
    ear.heard()
    rows = store.claim("one", everything, 2, "me")
    fences = [Fence(row.task_id, row.delivery) for row in rows]
    store.renew(fences)
    store.acknowledge(fences[:1])
    store.dead_letter(fences[1:], "why")
    store.take("one", everything, 1)
    store.purge("one")
    assert ear.heard() == []


def test_a_release_announces_each_queue_once(
    store: MessageStore, everything: Ranges, ear: Ear
) -> None:
    fences = []
    for queue in ("one", "one", "two"):
        store.publish(queue, Outgoing("{}", b""))
        (row,) = store.claim(queue, everything, 1, "me")
        fences.append(Fence(row.task_id, row.delivery))
    ear.heard()
    store.release(fences, {"one", "two"}, started=True)
    assert Counter(ear.heard()) == {("one", "released"): 1, ("two", "released"): 1}


def test_a_promotion_announces_that_rows_came_back(store: MessageStore, sql: Sql, ear: Ear) -> None:
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    for _ in range(3):
        store.publish("one", Outgoing("{}", b"", available_at=later))
    ear.heard()
    assert store.promote("one") == 0
    assert ear.heard() == []
    # Not through the trigger: available_at is set, not cleared.
    sql("UPDATE pgnotify.tasks SET available_at = now() - interval '1 s'")
    assert ear.heard() == []
    assert store.promote("one") == 3
    assert ear.heard() == [("one", "released")]


def test_without_notify_the_transport_announces_nothing(
    make_broker: Callable[..., Broker], everything: Ranges, sql: Sql, ear: Ear
) -> None:
    store = make_broker(notify=False).store
    store.publish("one", Outgoing("{}", b""))
    (row,) = store.claim("one", everything, 1, "me")
    store.release([Fence(row.task_id, row.delivery)], {"one"}, started=False)
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    store.publish("two", Outgoing("{}", b"", available_at=later))
    sql("UPDATE pgnotify.tasks SET available_at = now() WHERE available_at IS NOT NULL")
    assert store.promote("two") == 1
    assert ear.heard() == []
    sql(INSERT, "one")
    assert ear.heard() == [("one", "published")], "everybody else still does"


@pytest.mark.parametrize("durability", ["on", "off", "local"])
def test_a_publish_has_the_durability_that_was_asked_for(
    durability: str, make_broker: Callable[..., Broker], sql: Sql
) -> None:
    store = make_broker(synchronous_commit=durability).store
    sql("CREATE TABLE seen (setting text)")
    sql(
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$"
    )
    sql("CREATE TRIGGER see AFTER INSERT ON pgnotify.tasks FOR EACH ROW EXECUTE FUNCTION see()")
    store.publish("one", Outgoing("{}", b""))
    assert sql("SELECT setting FROM seen") == [(durability,)]


# -- channels


def test_a_channel_is_a_name_that_listen_takes_whole() -> None:
    for queue in ("", "x" * 10_000, "größe", 'a"b', "a\nb"):
        channel = channel_of("s" * 63, queue)
        assert len(channel) < 63
        assert channel.isascii()
        assert channel.startswith("pgnotify_")


def test_sql_and_python_name_the_same_channel(store: MessageStore, database: str) -> None:
    names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    with psycopg.connect(database, autocommit=True) as connection:

        @settings(max_examples=100, deadline=None)
        @given(schema=names, queue=names)
        def check(schema: str, queue: str) -> None:
            ((channel,),) = connection.execute(
                "SELECT pgnotify.channel_of(%s, %s)", (schema, queue)
            ).fetchall()
            assert channel == channel_of(schema, queue)

        check()
        for queue in ("x" * 10_000, "😀" * 5000, "a'b\"c\\", " ", "\n"):
            ((channel,),) = connection.execute(
                "SELECT pgnotify.channel_of('pgnotify', %s)", (queue,)
            ).fetchall()
            assert channel == channel_of("pgnotify", queue)


def test_a_queue_with_a_very_long_name_is_announced_by_both(
    store: MessageStore, database: str, sql: Sql
) -> None:
    queue = "x" * 10_000
    ear = Ear(database, queue, told=lambda: store.size(queue))
    store.publish(queue, Outgoing("{}", b""))
    assert ear.heard() == [(queue, "published")]
    sql(INSERT, queue)
    assert ear.heard() == [(queue, "published")]
    ear.close()


def test_in_a_database_that_is_not_utf8_the_channel_is_the_same(
    server: Any, make_broker: Callable[..., Broker]
) -> None:
    name = "test_latin1"
    server.run_sql(
        f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    try:
        broker = make_broker(server.url(name))
        ear = Ear(server.url(name), "größe", told=lambda: broker.store.size("größe"))
        broker.store.publish("größe", Outgoing("{}", b"\xff"))
        assert ear.heard() == [("größe", "published")]
        server.run_sql(INSERT, name, ("größe",))
        assert ear.heard() == [("größe", "published")]
        ear.close()
        broker.close()
    finally:
        server.drop_database(name)
