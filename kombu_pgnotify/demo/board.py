"""What the demo reads from the database while its workers work."""

from __future__ import annotations

from typing import Any, NamedTuple

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.sql import Statement, quote_identifier

_CREATE_LOG = """
CREATE TABLE {schema}.demo_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    celery_id text, event text, detail text, worker text, pid int, at float8
)"""

_EVENTS = """
SELECT event, detail, worker, pid, at FROM {schema}.demo_log WHERE celery_id = $1 ORDER BY id"""

_COUNTS = """
SELECT count(*) FILTER (WHERE lease_expiration IS NULL),
       count(*) FILTER (WHERE lease_expiration IS NOT NULL),
       (SELECT count(*) FROM {schema}.demo_log WHERE event = 'finished')
FROM {schema}.tasks"""

_LEASES = """
SELECT extract(epoch FROM lease_expiration - clock_timestamp())::float8
FROM {schema}.tasks WHERE lease_expiration IS NOT NULL"""

_DROP = """
DROP SCHEMA IF EXISTS {schema} CASCADE"""


class Event(NamedTuple):
    """Something a task has reported; `at` is a time of the machine's monotonic clock."""

    event: str
    detail: str
    worker: str
    pid: int
    at: float


class Counts(NamedTuple):
    """The tasks table in numbers: who waits, who is being worked on, and the tasks finished."""

    ready: int
    leased: int
    finished: int

    @property
    def empty(self) -> bool:
        """True if the table holds no task."""
        return not self.ready and not self.leased


class Board:
    """The demo's view of its schema, which it also creates and drops.

    Every method may raise what :meth:`kombu_pgnotify.database.Database.session` raises.
    """

    def __init__(self, broker: Broker) -> None:
        self._database = broker.database
        self._schema = quote_identifier(broker.options.schema)
        self._opened = False

    def open(self) -> None:
        """Create the broker's schema, with a table for what tasks report."""
        self._database.acquire()
        self._opened = True
        with self._database.session() as session:
            session.script(_CREATE_LOG.replace("{schema}", self._schema))

    def close(self) -> None:
        """Close the connections, which are opened again should they be needed."""
        self._database.close()

    def drop(self) -> None:
        """Remove the schema and all that is in it; does nothing if it was never there."""
        if self._opened:
            with self._database.session() as session:
                session.script(_DROP.replace("{schema}", self._schema))

    def events(self, celery_id: str) -> list[Event]:
        """Return what the task has reported so far."""
        return [Event(*row) for row in self._query("demo_events", _EVENTS, celery_id)]

    def counts(self) -> Counts:
        """Count the rows of the tasks table now."""
        return Counts(*self._query("demo_counts", _COUNTS)[0])

    def leases(self) -> list[float]:
        """Return for each task that is leased now in how many seconds its lease ends."""
        return [seconds for (seconds,) in self._query("demo_leases", _LEASES)]

    def _query(self, name: str, text: str, *params: object) -> list[tuple[Any, ...]]:
        statement = Statement(name, text.replace("{schema}", self._schema).encode())
        return self._database.run((statement, params))[0]
