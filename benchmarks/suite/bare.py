"""Ours beside what PostgreSQL does for a bare INSERT of the same row into the same table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import psycopg
from celery import Celery
from psycopg.sql import SQL, Identifier, Placeholder

from .context import QUEUE, WARM_UP, Figures, connect, dsn, empty_queue, publish
from .sides import Stopwatch
from .tasks import empty_task_queue, noop, send

TABLE = Identifier("pgnotify", "tasks")

#: What a publisher fills in: not what the server does.
COLUMNS = """
SELECT column_name FROM information_schema.columns
WHERE table_schema = 'pgnotify' AND table_name = 'tasks' AND column_default IS NULL
  AND is_identity = 'NO' AND is_generated = 'NEVER'
ORDER BY ordinal_position
"""


class Row(NamedTuple):
    """What the transport has written, without what the server fills in."""

    columns: list[str]
    values: list[Any]

    def insert(self) -> SQL:
        """Return the statement that writes it once more."""
        names = SQL(", ").join(map(Identifier, self.columns))
        values = SQL(", ").join(self._placeholders())
        return cast(SQL, SQL("INSERT INTO {} ({}) VALUES ({})").format(TABLE, names, values))

    def insert_many(self, count: int) -> tuple[SQL, list[list[Any]]]:
        """Return the statement that writes it so many times at once, and its parameters."""
        names = SQL(", ").join(map(Identifier, self.columns))
        arrays = SQL(", ").join(
            SQL("{}::bytea[]" if isinstance(value, bytes) else "{}::text[]").format(place)
            for place, value in zip(self._placeholders(), self.values, strict=True)
        )
        statement = SQL("INSERT INTO {} ({}) SELECT * FROM unnest({})").format(TABLE, names, arrays)
        return cast(SQL, statement), [[value] * count for value in self.values]

    def _placeholders(self) -> list[Placeholder]:
        """Bytes travel as they are, not in hexadecimal digits."""
        return [
            Placeholder(format=psycopg.adapt.PyFormat.BINARY)
            if isinstance(value, bytes)
            else Placeholder()
            for value in self.values
        ]


def written_row(link: psycopg.Connection[Any]) -> Row:
    """Return the row that was just published to the queue."""
    columns = [name for (name,) in link.execute(COLUMNS)]
    names = SQL(", ").join(map(Identifier, columns))
    query = SQL("SELECT {} FROM {} WHERE task_name = %s LIMIT 1").format(names, TABLE)
    values = link.execute(query, [QUEUE]).fetchone() or ()
    given = [(c, v) for c, v in zip(columns, values, strict=True) if v is not None]
    return Row([column for column, _ in given], [value for _, value in given])


@contextmanager
def silent(options: str = "") -> Iterator[psycopg.Connection[Any]]:
    """A plain connection, for which the table's triggers say nothing."""
    with psycopg.connect(dsn(), autocommit=True, options=options) as link:
        link.execute("SET kombu_pgnotify.quiet = 'on'")
        yield link


def _insert_repeatedly(link: psycopg.Connection[Any], row: Row, count: int) -> Stopwatch:
    statement = row.insert().as_string(link)
    with link.cursor() as cursor:
        for _ in range(WARM_UP):
            cursor.execute(statement, row.values, prepare=True)
        with Stopwatch() as watch:
            for _ in range(count):
                cursor.execute(statement, row.values, prepare=True)
    return watch


def insert_one_by_one(count: int) -> Figures:
    """What sides.publish_one_by_one() writes, by psycopg alone."""
    with connect() as connection, silent() as link:
        empty_queue(connection)
        publish(connection.Producer(serializer="json"))
        watch = _insert_repeatedly(link, written_row(link), count)
        empty_queue(connection)
    return watch.figures(count)


def publish_in_batches(batches: int, size: int) -> Figures:
    """By kombu's producer.batch()."""
    with connect() as connection:
        empty_queue(connection)
        producer = connection.Producer(serializer="json")
        _publish_batches(producer, 2, size)
        with Stopwatch() as watch:
            _publish_batches(producer, batches, size)
        empty_queue(connection)
    return watch.figures(batches * size)


def _publish_batches(producer: Any, batches: int, size: int) -> None:
    for _ in range(batches):
        with producer.batch(max_size=size):
            for _ in range(size):
                publish(producer)


def insert_in_batches(batches: int, size: int) -> Figures:
    """The same rows, by one INSERT for each batch."""
    with connect() as connection, silent() as link:
        empty_queue(connection)
        publish(connection.Producer(serializer="json"))
        statement, values = written_row(link).insert_many(size)
        text = statement.as_string(link)
        with link.cursor() as cursor:
            for _ in range(2):
                cursor.execute(text, values, prepare=True)
            with Stopwatch() as watch:
                for _ in range(batches):
                    cursor.execute(text, values, prepare=True)
        empty_queue(connection)
    return watch.figures(batches * size)


def send_tasks_to_memory(count: int) -> Figures:
    """What Celery's own cost allows: apply_async() without a broker, and then a bare INSERT."""
    empty_task_queue()
    noop.apply_async()
    with silent() as link:
        row = written_row(link)
        inserting = _insert_repeatedly(link, row, count)
    empty_task_queue()
    in_memory = Celery("bench-in-memory", broker="memory://", set_as_current=False)
    in_memory.conf.update(task_default_queue=QUEUE, task_ignore_result=True)
    task = in_memory.task(name=noop.name)(noop.run)
    send(WARM_UP, task.apply_async)
    with Stopwatch() as sending:
        send(count, task.apply_async)
    return {
        "rate": count / (sending.seconds + inserting.seconds),
        "celery_us": sending.seconds / count * 1e6,
        "insert_us": inserting.seconds / count * 1e6,
    }
