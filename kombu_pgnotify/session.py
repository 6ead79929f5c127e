"""Session: runs prepared statements on one connection, several in one round trip.

Written on libpq's calls (psycopg.pq) since this is the hot path: measured on one
machine, an INSERT and the announcement that follows its commit take 1.27k/s through
psycopg's pipeline(), 1.4k/s as two calls and 2.3k/s here, where an INSERT alone takes
2.2k/s.  It also bounds every statement on this side: a server behind a frozen network
never answers, whatever its own timeout says.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeAlias

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from .sql import Statement
from .waker import wait_ready

#: One statement with its parameters.
Call: TypeAlias = tuple[Statement, Sequence[Any]]

#: The rows of one statement.
Rows: TypeAlias = list[tuple[Any, ...]]

logger = logging.getLogger(__name__)

_TEXT, _BINARY = 0, 1

#: SQLSTATEs after which another connection may do better: the server has dropped (26000) or got
#: from somebody else (42P05, both behind a pooler) or outgrown (0A000, by a changed table) what was
#: prepared, or has become read-only (25006), and another of the URL's hosts has not.
_HOPELESS = ("26000", "42P05", "0A000", "25006")


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


#: Type OID of bytea (pg_type.dat).
_BYTEA = 17

#: Decoders of the binary format by type OID (pg_type.dat).
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    16: lambda raw: raw != b"\0",  # boolean
    _BYTEA: bytes,
    20: _int,  # bigint
    21: _int,  # smallint
    23: _int,  # integer
    701: lambda raw: struct.unpack("!d", raw)[0],  # double precision
}


class Session:
    """One open connection in autocommit, used by one thread at a time.

    Arguments:
        connection: an open psycopg connection; the session owns it.
        patience: seconds the server may take to answer a :meth:`run`.
        prepare: keep statements prepared on the server.
    """

    def __init__(self, connection: psycopg.Connection[Any], patience: float, prepare: bool) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._patience = patience
        self._prepare = prepare
        self._prepared: set[str] = set()

    @property
    def closed(self) -> bool:
        """True once the connection is gone; a session never reconnects."""
        return self._pgconn.status != pq.ConnStatus.OK

    def fileno(self) -> int:
        """The connection's socket."""
        return self._pgconn.socket

    def run(self, *calls: Call, hints: Sequence[Call] = ()) -> list[Rows]:
        """Run the calls as one transaction, then each hint in one of its own, in one round trip.

        When the answers do not come, or anything interrupts the wait, the connection is
        closed: nobody knows its state.

        Arguments:
            hints: calls whose failure is only logged: what they announce is in the table,
                and a poll finds it.

        Raises:
            psycopg.Error: the server refused a statement, or is lost.
        """
        outcomes: list[list[Rows] | Exception] = []
        try:
            self._exchange([calls, *((hint,) for hint in hints)], outcomes)
        except psycopg.Error as exc:
            self.close()
            if not outcomes:
                raise
            outcomes.append(exc)
        except BaseException:
            self.close()
            raise
        done, *announced = outcomes
        if isinstance(done, psycopg.Error) and done.sqlstate in _HOPELESS:
            self.close()
        if isinstance(done, Exception):
            raise done
        for outcome in announced:
            if isinstance(outcome, Exception):
                reason = str(outcome).partition("\n")[0]
                logger.warning("announce.failed polls will find it: %s", reason)
        return done

    def script(self, text: str) -> Rows:
        """Run one or more statements as text, without parameters; return the last one's rows.

        Several statements are one transaction, unless the text says otherwise.  The
        connection is closed on any failure, and with it an open transaction.

        Raises:
            psycopg.Error: the server refused a statement, or is lost.
        """
        rows: Rows = []
        try:
            self._pgconn.send_query(text.encode())
            deadline = self._deadline()
            while True:
                self._await_answer(deadline)
                result = self._pgconn.get_result()
                if result is None:
                    return rows
                if result.status == pq.ExecStatus.TUPLES_OK:
                    rows = _rows(result)
                elif result.status == pq.ExecStatus.FATAL_ERROR:
                    raise error_from_result(result, encoding="utf-8")
        except BaseException:
            self.close()
            raise

    def looks_stale(self) -> bool:
        """True if the server has closed the connection while it was idle; no round trip."""
        if self.closed:
            return True
        try:
            # Readable while idle: a notice or a parameter change, or a farewell and behind it
            # the end, which only the next read meets.
            while wait_ready(self.fileno(), 0):
                self._pgconn.consume_input()
        except psycopg.Error:
            return True
        return self.closed

    def notifications(self) -> list[tuple[str, str]]:
        """Read what has arrived without waiting: ``(channel, payload)`` pairs."""
        self._pgconn.consume_input()
        found = []
        while (notify := self._pgconn.notifies()) is not None:
            found.append((notify.relname.decode(), notify.extra.decode("utf-8", "replace")))
        return found

    def close(self) -> None:
        """Close the connection at once, whatever it is doing."""
        self._pgconn.finish()

    def _exchange(
        self, transactions: Sequence[Sequence[Call]], outcomes: list[list[Rows] | Exception]
    ) -> None:
        """Run each group of calls as a transaction; `outcomes` grows as they are answered."""
        # Encoded before anything is sent: a value that cannot be must not leave half a pipeline.
        encoded = [
            [(statement, *_encode_all(params)) for statement, params in calls]
            for calls in transactions
        ]
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        fresh = []
        for calls in encoded:
            fresh.append([self._send(*call) for call in calls])
            # The sync ends the implicit transaction.
            pgconn.pipeline_sync()
        for names in fresh:
            outcomes.append(self._receive(names, self._deadline()))
        pgconn.exit_pipeline_mode()

    def _deadline(self) -> float:
        return monotonic() + self._patience

    def _send(
        self, statement: Statement, values: list[bytes | None], formats: list[int]
    ) -> str | None:
        """Queue one call; return the statement's name if it is prepared for the first time."""
        if not self._prepare:
            self._pgconn.send_query_params(
                statement.sql, values, param_formats=formats, result_format=_BINARY
            )
            return None
        name = statement.name.encode()
        fresh = statement.name not in self._prepared
        if fresh:
            self._pgconn.send_prepare(name, statement.sql)
            self._prepared.add(statement.name)
        self._pgconn.send_query_prepared(name, values, param_formats=formats, result_format=_BINARY)
        return statement.name if fresh else None

    def _receive(self, fresh: list[str | None], deadline: float) -> list[Rows] | Exception:
        """Collect the outcome of the next transaction: the rows of its calls, or the error.

        Arguments:
            fresh: for each call the name of its statement if it is prepared first, else None.
        """
        pgconn = self._pgconn
        rows: list[Rows] = []
        error: Exception | None = None
        while True:
            self._await_answer(deadline)
            result = pgconn.get_result()
            if result is None:
                continue
            status = result.status
            if status == pq.ExecStatus.PIPELINE_SYNC:
                return error or rows
            if status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
                if fresh[len(rows)] is not None:
                    # This answers the prepare; the execution comes next.
                    fresh[len(rows)] = None
                else:
                    rows.append(_rows(result))
            elif status != pq.ExecStatus.PIPELINE_ABORTED:
                error = error_from_result(result, encoding="utf-8")
                self._prepared.difference_update(fresh)

    def _await_answer(self, deadline: float) -> None:
        """Send what is still to be sent and wait until something can be read."""
        pgconn = self._pgconn
        while True:
            unsent = pgconn.flush()
            if not unsent and not pgconn.is_busy():
                return
            left = deadline - monotonic()
            if left <= 0 or not wait_ready(self.fileno(), left, writable=bool(unsent)):
                raise psycopg.errors.ConnectionTimeout(
                    f"no answer from the server within {self._patience:g} seconds"
                )
            pgconn.consume_input()


def _rows(result: pq.abc.PGresult) -> Rows:
    """Decode a result's rows."""
    columns = range(result.nfields)
    decoders = [_DECODERS.get(result.ftype(column), bytes.decode) for column in columns]
    get_value = result.get_value
    if result.nfields and not result.fformat(0):
        return [
            tuple(get_value(row, column) for column in columns) for row in range(result.ntuples)
        ]
    return [
        tuple(
            None if (raw := get_value(row, column)) is None else decoders[column](raw)
            for column in columns
        )
        for row in range(result.ntuples)
    ]


def _encode_all(params: Sequence[Any]) -> tuple[list[bytes | None], list[int]]:
    """Encode parameters; return them and their formats."""
    formats = [_BINARY if _is_binary(param) else _TEXT for param in params]
    return [_encode(param) for param in params], formats


def _is_binary(value: Any) -> bool:
    return isinstance(value, bytes) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], bytes)
    )


def _encode(value: Any) -> bytes | None:
    """Encode a parameter: bytes as they are, anything else as PostgreSQL's text."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _text(value).encode()
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], bytes):
            return _bytea_array(value)
        return ("{" + ",".join(map(_element, value)) + "}").encode()
    return str(value).encode()


def _text(value: str) -> str:
    if "\0" in value:
        # libpq would cut it there, silently.
        raise psycopg.DataError(f"text with a NUL cannot be kept: {value!r}")
    return value


def _element(value: Any) -> str:
    """Write an array's element (PostgreSQL documentation, 8.15.6)."""
    if isinstance(value, str):
        escaped = _text(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return "NULL" if value is None else str(value)


def _bytea_array(items: Sequence[bytes]) -> bytes:
    """Write a one-dimensional bytea[] in binary (array_recv in PostgreSQL's source)."""
    parts = [struct.pack("!5i", 1, 0, _BYTEA, len(items), 1)]
    for item in items:
        parts += (struct.pack("!i", len(item)), item)
    return b"".join(parts)
