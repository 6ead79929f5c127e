"""How the table bears an old snapshot, a million messages, and many that others hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
from kombu.connection import Connection
from psycopg.sql import SQL, Identifier

from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.messages import Fence

from .context import QUEUE, Figures, connect, dsn, empty_queue, publish

#: A schema of its own, which goes with what was written into it.
SCHEMA = "pgnotify_bench_tables"

#: Messages published together, claimed together and acknowledged together.
TEN = 10

#: Messages that are always there, so that a claim finds ten whatever the order of commits.
STOCK = 500

#: Claims that are timed.
CLAIMS = 300

#: What is in the queue besides: for `ready` and for `future` messages, and those that others hold.
FILL = """
INSERT INTO {schema}.tasks (task_name, available_at, lease_worker_id, lease_expiration,
                            deliveries, envelope, payload)
SELECT %(queue)s, CASE WHEN kind = 'future' THEN now() + interval '1 day' + n * interval '1 s' END,
       CASE WHEN kind = 'leased' THEN 'somebody' END,
       CASE WHEN kind = 'leased' THEN now() + interval '1 day' END,
       (kind = 'leased')::int, '{{}}', convert_to(repeat('x', 100), 'UTF8')
FROM (VALUES ('leased', 0, %(leased)s), ('future', 1, %(future)s), ('ready', 2, %(ready)s))
         AS kinds (kind, place, count),
     LATERAL generate_series(1, count) AS n
ORDER BY place, n
"""


@contextmanager
def own_tables() -> Iterator[tuple[Connection, psycopg.Connection[Any]]]:
    """A kombu connection to new tables, and a plain one; afterwards they are gone."""
    drop = SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(Identifier(SCHEMA))
    with psycopg.connect(dsn(), autocommit=True) as plain:
        plain.execute(drop)
        try:
            with connect(schema=SCHEMA) as connection:
                empty_queue(connection)
                yield connection, plain
        finally:
            plain.execute(drop)
            _write_down(plain)


def _write_down(plain: psycopg.Connection[Any]) -> None:
    """What comes next must not pay for what was written here."""
    try:
        plain.execute("CHECKPOINT")
    except psycopg.errors.InsufficientPrivilege:
        pass


@contextmanager
def old_snapshot() -> Iterator[None]:
    """Somebody's transaction that sees the database as it is now."""
    with psycopg.connect(dsn()) as link:
        link.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        link.execute("SELECT count(*) FROM pg_class").fetchone()
        yield


def pass_through(count: int, held: bool) -> Figures:
    """Publish ten, claim ten, acknowledge ten, and again; `held`: somebody has an old snapshot."""
    rounds = count // TEN
    with own_tables() as (connection, _):
        producer, claimer = connection.Producer(serializer="json"), _Claimer(connection)
        _publish(producer, STOCK)
        with old_snapshot() if held else nullcontext():
            times = [time.perf_counter()]
            for _ in range(rounds):
                _publish(producer, TEN)
                claimer.claim()
                times.append(time.perf_counter())
    last = max(1, rounds // 10)
    return {
        "rate": count / (times[-1] - times[0]),
        "last_tenth_rate": last * TEN / (times[-1] - times[-1 - last]),
    }


def _publish(producer: Any, count: int) -> None:
    with producer.batch(max_size=count):
        for _ in range(count):
            publish(producer)


def claim_ten(ready: int = 0, future: int = 0, leased: int = 0) -> Figures:
    """A claim of ten as a consumer at work does it, with so many other messages in the queue."""
    # As many as are taken, twice, besides those that are in the way.
    ready += 2 * TEN * CLAIMS
    with own_tables() as (connection, plain):
        plain.execute("SET kombu_pgnotify.quiet = 'on'")
        fill = SQL(FILL).format(schema=Identifier(SCHEMA))
        amounts = {"ready": ready, "future": future, "leased": leased}
        plain.execute(fill, {"queue": QUEUE, **amounts})
        _write_down(plain)
        consumer = _Claimer(connection)
        first, found = consumer.claim(), consumer.claim_often()
        plain.execute(SQL("ANALYZE {}").format(Identifier(SCHEMA, "tasks")))
        analyzed = consumer.claim_often()
    return {
        "p50_ms": statistics.median(found),
        "p95_ms": statistics.quantiles(found, n=20)[-1],
        "max_ms": max(found),
        "first_ms": first,
        "analyzed_p50_ms": statistics.median(analyzed),
    }


class _Claimer:
    """Claims with a cursor that remembers where to look, and acknowledges what it got."""

    def __init__(self, connection: Any) -> None:
        self._broker = connection.default_channel.broker
        self._cursor = ClaimCursor()

    def claim_often(self) -> list[float]:
        """Return the milliseconds of each claim."""
        return [self.claim() for _ in range(CLAIMS - 1)]

    def claim(self) -> float:
        """Claim ten and acknowledge them; return the milliseconds of the claim alone."""
        store, started = self._broker.store, time.monotonic()
        ranges = self._cursor.next_ranges(started)
        rows = store.claim(QUEUE, ranges, TEN, self._broker.worker)
        took = time.monotonic() - started
        self._cursor.claimed([(r.rank, r.task_id) for r in rows], TEN, started, started + took)
        assert len(rows) == TEN
        store.acknowledge([Fence(row.task_id, row.delivery) for row in rows])
        return took * 1000
