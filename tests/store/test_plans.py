"""The planner walks the right index, with and without statistics, in either kind of plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from helpers import wait_until
from plans import (
    BINDINGS,
    EVERYTHING,
    EXPIRING,
    FEW,
    FILL,
    FILL_TOPOLOGY,
    FUTURE,
    LEASED,
    MESSAGE,
    OF_ONE_QUEUE,
    QUEUES,
    READY,
    TABLES,
    TYPES,
    Plan,
)

from kombu_pgnotify import sql as queries
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.messages import Fence, Outgoing

Explain = Callable[..., Plan]


@pytest.fixture(scope="module")
def filled(server: Server) -> Iterator[str]:
    """The URL of a database full of tasks, without statistics; its tests change nothing."""
    name = server.create_database()
    from kombu_pgnotify import options, urls

    broker = Broker(options.build(urls.parse(server.url(name), options.NAMES), {}))
    broker.database.acquire()
    broker.close()
    with psycopg.connect(server.url(name), autocommit=True) as connection:
        # The statistics are part of what is tested.
        for table in TABLES:
            connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
        fill = FILL.format(queues=QUEUES, leased=LEASED, ready=READY, future=FUTURE)
        connection.execute(fill.encode())
        connection.execute(FILL_TOPOLOGY.format(bindings=BINDINGS, few=FEW).encode())
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(params=["without statistics", "with statistics"])
def connection(request: pytest.FixtureRequest, filled: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection whose changes are undone, statistics included."""
    with psycopg.connect(filled) as connection:
        if request.param == "with statistics":
            connection.execute(f"ANALYZE {', '.join(TABLES)}".encode())
        yield connection
        connection.rollback()


@pytest.fixture
def explain_auto(connection: psycopg.Connection[Any]) -> Explain:
    """A function that explains a statement of ours, as it runs prepared."""
    prepared: set[str] = set()

    def run(name: str, arguments: str) -> Plan:
        if name not in prepared:
            prepared.add(name)
            text = queries.statements("pgnotify")[name].sql
            connection.execute(f"PREPARE p_{name} ({TYPES[name]}) AS ".encode() + text)
        connection.execute("SAVEPOINT before")
        command = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) EXECUTE p_{name} ({arguments})"
        (found,) = connection.execute(command.encode()).fetchone() or ((),)
        connection.execute("ROLLBACK TO before")
        trees = json.loads(found) if isinstance(found, str) else found
        return Plan(trees[0])

    return run


@pytest.fixture(params=["force_generic_plan", "force_custom_plan", "auto"])
def explain(
    request: pytest.FixtureRequest, connection: psycopg.Connection[Any], explain_auto: Explain
) -> Explain:
    """The same with either kind of plan, whichever the server would choose."""
    connection.execute(f"SET LOCAL plan_cache_mode = {request.param}".encode())
    return explain_auto


@pytest.mark.parametrize("name", ["claim", "take"])
def test_a_look_from_the_start_walks_the_ready_index(explain: Explain, name: str) -> None:
    extra = ", 'me', 60" if name == "claim" else ""
    for _ in range(7):  # the sixth may get a generic plan
        plan = explain(name, f"'queue1', {EVERYTHING}, 10{extra}")
    assert plan.seq_scans == set()
    assert "tasks_due" not in plan.indexes
    # The head of the queue is leased: it is walked once, and not much more is.
    assert plan.rows_read_from("tasks_ready") <= LEASED / QUEUES + 10
    # The primary key serves only the rows that were picked.
    assert plan.rows_read_from("tasks_pkey") <= 10


@pytest.mark.parametrize("name", ["claim", "take"])
def test_a_bounded_claim_reads_a_handful_of_pages(explain: Explain, name: str) -> None:
    # As ClaimCursor makes them of the bounds 250: LEASED and 255: LEASED.
    ranges = f"'{{-1,250,255}}', '{{0,{LEASED},{LEASED}}}', '{{249,254,32767}}'"
    extra = ", 'me', 60" if name == "claim" else ""
    for _ in range(7):
        plan = explain(name, f"'queue1', {ranges}, 10{extra}")
    assert plan.seq_scans == set()
    assert plan.rows_read_from("tasks_ready") <= 20
    assert plan.rows_read_from("tasks_pkey") <= 10
    assert plan.buffers < 400, "10 rows are found, locked, changed and returned"


def test_a_claim_of_an_empty_queue_reads_next_to_nothing(explain: Explain) -> None:
    plan = explain("claim", f"'empty', {EVERYTHING}, 10, 'me', 60")
    assert plan.seq_scans == set()
    assert plan.buffers < 60


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("acknowledge", "'somebody'"),
        ("acknowledge_again", "'somebody', array_fill(0.0::float8, '{50}')"),
        ("renew", "NULL, 60"),
        ("still_held", "'somebody'"),
        ("release", "'somebody', 1"),
        ("bury", "NULL, 'why', true"),
    ],
)
def test_settling_finds_its_rows_by_the_primary_key(
    explain: Explain, connection: psycopg.Connection[Any], name: str, extra: str
) -> None:
    rows = connection.execute(
        "SELECT task_id FROM pgnotify.tasks WHERE lease_worker_id IS NOT NULL LIMIT 50"
    ).fetchall()
    ids = ",".join(str(row[0]) for row in rows)
    deliveries = ",".join("1" for _ in rows)
    for _ in range(7):
        plan = explain(name, f"'{{{ids}}}', '{{{deliveries}}}', {extra}")
    assert plan.seq_scans <= {"migrations"}
    assert plan.indexes & {"tasks_ready", "tasks_due"} == set()
    # Each row is found, changed and seen again in the versions that were undone.
    assert plan.rows_read_from("tasks_pkey") <= 50 * 10
    assert plan.buffers < 3000


def test_what_was_leased_unknown_is_looked_for_at_the_head_of_its_queue(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("disown", "'queue1', 'nobody', '{1,2,3}', 1000")
    assert plan.seq_scans == set()
    assert plan.rows_read_from("tasks_ready") <= 1000
    # And the dead versions of some, which the index still leads to until it is vacuumed.
    assert plan.rows_read_from("tasks_pkey") <= 1010


def test_promote_reads_what_is_due_and_nothing_else(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("promote", "'queue1', 1000")
    assert plan.seq_scans == set()
    assert plan.rows_read_from("tasks_due") == 0
    assert plan.buffers < 60


def test_next_look_reads_one_held_row_and_a_thousand_ready_ones(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("next_look", "'queue1'")
    assert plan.seq_scans == set()
    assert plan.indexes == {"tasks_due", "tasks_ready"}
    assert plan.rows_read_from("tasks_due") <= 1
    assert plan.rows_read_from("tasks_ready") <= 1000


def test_the_size_of_an_empty_queue_is_found_without_reading_the_others(
    explain: Explain,
) -> None:
    for _ in range(7):
        plan = explain("queue_size", "'empty', 1000")
    assert plan.seq_scans == set()
    assert plan.buffers < 60


def test_purging_an_empty_queue_reads_none_of_the_others(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("purge", "'empty', 1000, false")
    assert plan.seq_scans == set()
    assert plan.buffers < 60


@pytest.mark.parametrize(
    ("exchange", "key", "read"),
    [("direct", "key.5000", 1), ("topic", "key.5", FEW), ("few", "any", FEW), ("none", "key.1", 0)],
)
def test_an_exchange_finds_its_bindings_by_the_primary_key(
    explain_auto: Explain, exchange: str, key: str, read: int
) -> None:
    for _ in range(7):
        arguments = f"'{exchange}', '{key}', {MESSAGE}, NULL, 'channel', 0"
        plan = explain_auto("publish_routed", arguments)
    assert plan.indexes <= {"bindings_pkey", "queues_pkey", "exchanges_pkey"}
    # One more is looked at to see whether the exchange has any.
    assert plan.rows_of("bindings") <= read + 1
    assert plan.rows_of("queues") <= read
    assert plan.buffers < 60 + 20 * read


def test_a_publish_reads_its_queue_and_nothing_else(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("publish", f"'queue5000', {MESSAGE}, true")
        many = explain(
            "publish_many",
            "'{queue5000,queue1}', '{0,1}', '{NULL,NULL}', '{NULL,NULL}', false, 'off',"
            " '{e,e}', '{x,x}', '{true,false}'",
        )
    assert plan.seq_scans == many.seq_scans == set()
    assert plan.indexes == {"queues_pkey"}
    assert plan.rows_read_from("queues_pkey") <= 2
    assert many.rows_read_from("queues_pkey") <= 4
    assert many.buffers < 150


def test_what_has_expired_is_found_by_its_index(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("sweep_messages", "50")
    assert plan.seq_scans == set()
    assert plan.indexes == {"tasks_expiring"}
    assert plan.rows_read_from("tasks_expiring") <= EXPIRING


def test_the_end_of_a_long_queue_is_not_looked_at_to_trim_another(explain: Explain) -> None:
    for _ in range(7):
        plan = explain("trim", "'empty'")
    assert plan.seq_scans == set()
    assert plan.indexes == {"tasks_ready", "queues_pkey"}
    assert plan.buffers < 60


def test_one_queue_is_found_without_reading_the_others(explain: Explain) -> None:
    for name, arguments, buffers in OF_ONE_QUEUE:
        for _ in range(7):
            plan = explain(name, arguments)
        assert plan.seq_scans <= {"exchanges"}, name
        assert plan.buffers < buffers, name


def test_claims_renewals_and_releases_are_hot_updates(
    broker: Broker, database: str, queue: str, sql: Callable[..., list[tuple[Any, ...]]]
) -> None:
    """No lease column is in an index, and each page has room for the new versions."""
    store = broker.store
    for _ in range(100):
        store.publish(queue, Outgoing("{}", b"x" * 200))
    everything = ClaimCursor().next_ranges(0)
    fences = []
    for _ in range(10):
        rows = store.claim(queue, everything, 10, "me")
        fences += [Fence(row.task_id, row.delivery) for row in rows]
    store.renew(fences[:30])
    store.release(fences[:10], {queue}, started=False)
    # A backend reports what it did when it ends, if not before.
    broker.database.close()

    def counts() -> tuple[int, int] | None:
        ((updated, hot),) = sql(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'tasks'"
        )
        return (updated, hot) if updated >= 140 else None

    updated, hot = wait_until(counts, 10)
    assert updated == 140
    assert hot >= 0.7 * updated


#: Statements on nothing, on tables that stay small, or on all there is; or once in a while.
OTHERS = """
abandon announce announce_published bind bindings claim_chore clear_dead_letters dead_letters
declare_exchange
declare_queue delete_exchange delete_queue exchange_type exchanges expired_queues list_bindings
listening lock_exchange newest_dead_letter ping schema_state schema_version
sweep_broadcasts trim_turn unbind
"""


def test_every_index_and_statement_is_covered_here() -> None:
    assert set(queries.statements("s")) <= set(TYPES) | set(OTHERS.split())
    assert set(TYPES) <= set(queries.statements("s"))
    indexes = re.findall(r"CREATE INDEX (\w+)", "".join(queries.migrations().values()))
    assert indexes == ["tasks_ready", "tasks_due", "bindings_queue", "tasks_expiring"]
