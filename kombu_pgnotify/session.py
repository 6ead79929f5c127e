"""Session: runs prepared statements on one connection, several in one round trip.

Written on libpq's calls (psycopg.pq) since this is the hot path: measured on one
machine, an INSERT and the announcement that follows its commit take 1.27k/s through
psycopg's pipeline(), 1.4k/s as two calls and 2.3k/s here, where an INSERT alone takes
2.2k/s.  It also bounds every statement on this side: a server behind a frozen network
never answers, whatever its own timeout says.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, TypeAlias

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from .sql import Statement
from .waker import wait_ready
from .wire import BINARY, Rows, decode_rows, encode_all

#: One statement with its parameters.
Call: TypeAlias = tuple[Statement, Sequence[Any]]

logger = logging.getLogger(__name__)

#: Bytes of parameters up to which hints are not waited for.  The server reads 8 kB at once: all
#: that it is to do has then reached it with what has been answered, even if this process ends now.
_AT_ONCE = 4096

#: SQLSTATEs after which another connection may do better: the server has dropped (26000) or got
#: from somebody else (42P05, both behind a pooler) or outgrown (0A000, by a changed table) what was
#: prepared, or has become read-only (25006), and another of the URL's hosts has not.
_HOPELESS = ("26000", "42P05", "0A000", "25006")


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
        # Transactions whose outcome has not been read: what is prepared for each call.
        self._owed: deque[list[str | None]] = deque()
        self._answer_by = 0.0  # monotonic

    @property
    def closed(self) -> bool:
        """True once the connection is gone; a session never reconnects."""
        return self._pgconn.status != pq.ConnStatus.OK

    def fileno(self) -> int:
        """The connection's socket."""
        return self._pgconn.socket

    def run(self, *calls: Call, hints: Sequence[Call] = ()) -> list[Rows]:
        """Run the calls as one transaction, then each hint in one of its own, in one round trip.

        The outcome of hints is read before the next call, or when the session is closed.  When
        the answers do not come, or anything interrupts the wait, the connection is aborted:
        nobody knows its state.

        Arguments:
            hints: calls whose failure is only logged: what they announce is in the table,
                and a poll finds it.

        Raises:
            psycopg.Error: the server refused a statement, or is lost.
        """
        try:
            self._collect_owed()
            small = self._send_all([calls, *((hint,) for hint in hints)])
        except BaseException:
            self.abort()
            raise
        done = self._answer(self._deadline())
        if not small:
            self._collect_hints()
        return done

    def send(self, *calls: Call) -> None:
        """Send the calls, one transaction, whose outcome :meth:`receive` is to return.

        Raises:
            psycopg.Error: the server is lost.
        """
        try:
            self._collect_owed()
            self._send_all([calls])
            self._answer_by = self._deadline()
            self._send_rest(self._answer_by)
        except BaseException:
            self.abort()
            raise

    def has_answer(self) -> bool:
        """True if :meth:`receive` has no reason to wait, or no use; reads what has come.

        Without select or poll: what gevent and eventlet put in their place lets others run, and
        eventlet bears no two who look at one socket.
        """
        try:
            self._pgconn.consume_input()
            return not (self.patience_left and self._pgconn.is_busy())
        except psycopg.Error:
            return True

    @property
    def patience_left(self) -> float:
        """How many seconds :meth:`receive` would wait at the most."""
        return max(0.0, self._answer_by - monotonic())

    def receive(self) -> list[Rows]:
        """Return the rows of each call that was sent.

        Raises:
            psycopg.Error: the server refused a statement, or is lost.
        """
        return self._answer(self._answer_by)

    def script(self, text: str) -> Rows:
        """Run one or more statements as text, without parameters; return the last one's rows.

        Several statements are one transaction, unless the text says otherwise.  The
        connection is closed on any failure, and with it an open transaction.

        Raises:
            psycopg.Error: the server refused a statement, or is lost.
        """
        rows: Rows = []
        try:
            self._collect_owed()
            self._pgconn.send_query(text.encode())
            deadline = self._deadline()
            while True:
                self._await_answer(deadline)
                result = self._pgconn.get_result()
                if result is None:
                    return rows
                if result.status == pq.ExecStatus.TUPLES_OK:
                    rows = decode_rows(result)
                elif result.status == pq.ExecStatus.FATAL_ERROR:
                    raise error_from_result(result, encoding="utf-8")
        except BaseException:
            self.abort()
            raise

    def looks_stale(self) -> bool:
        """True if the server has closed the connection while it was idle; no round trip."""
        if self.closed:
            return True
        try:
            self._collect_owed()
            # Readable while idle: a notice or a parameter change, or a farewell and behind it
            # the end, which only the next read meets.
            while wait_ready(self.fileno(), 0):
                self._pgconn.consume_input()
        except psycopg.Error:
            return True
        except BaseException:
            self.abort()
            raise
        return self.closed

    def notifications(self) -> list[tuple[str, str]]:
        """Read what has arrived without waiting: ``(channel, payload)`` pairs."""
        self._pgconn.consume_input()
        found = []
        while (notify := self._pgconn.notifies()) is not None:
            found.append((notify.relname.decode(), notify.extra.decode("utf-8", "replace")))
        return found

    def close(self) -> None:
        """Close the connection, once the server has done what it was given to do."""
        if not self.closed:
            self._collect_hints()
        self.abort()

    def abort(self) -> None:
        """Close the connection at once, whatever it is doing."""
        self._owed.clear()
        self._pgconn.finish()

    def _answer(self, deadline: float) -> list[Rows]:
        """Return the outcome of the oldest transaction that is owed."""
        try:
            outcome = self._receive(self._owed.popleft(), deadline)
        except BaseException:
            self.abort()
            raise
        if isinstance(outcome, psycopg.Error) and outcome.sqlstate in _HOPELESS:
            self.abort()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _collect_hints(self) -> None:
        """Collect what is owed, where nobody is interested in an error."""
        try:
            self._collect_owed()
        except psycopg.Error as exc:
            _log_failed_hint(exc)
            self.abort()
        except BaseException:
            self.abort()
            raise

    def _collect_owed(self) -> None:
        """Read the outcomes of hints, so that something else can be run.

        Raises:
            psycopg.Error: the connection is lost.
        """
        while self._owed:
            outcome = self._receive(self._owed.popleft(), self._deadline())
            if isinstance(outcome, Exception):
                _log_failed_hint(outcome)
        if self._pgconn.pipeline_status:
            self._pgconn.exit_pipeline_mode()

    def _send_all(self, transactions: Sequence[Sequence[Call]]) -> bool:
        """Send each group of calls as a transaction; True if it was little.

        All of them are owed from now on.
        """
        # Encoded before anything is sent: a value that cannot be must not leave half a pipeline.
        encoded = [
            [(statement, *encode_all(params)) for statement, params in calls]
            for calls in transactions
        ]
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        for calls in encoded:
            self._owed.append([self._send(*call) for call in calls])
            # The sync ends the implicit transaction.
            pgconn.pipeline_sync()
        size = sum(
            len(value) for calls in encoded for _, values, _ in calls for value in values if value
        )
        return size <= _AT_ONCE

    def _deadline(self) -> float:
        return monotonic() + self._patience

    def _send(
        self, statement: Statement, values: list[bytes | None], formats: list[int]
    ) -> str | None:
        """Queue one call; return the statement's name if it is prepared for the first time."""
        if not self._prepare:
            self._pgconn.send_query_params(
                statement.sql, values, param_formats=formats, result_format=BINARY
            )
            return None
        name = statement.name.encode()
        fresh = statement.name not in self._prepared
        if fresh:
            self._pgconn.send_prepare(name, statement.sql)
            self._prepared.add(statement.name)
        self._pgconn.send_query_prepared(name, values, param_formats=formats, result_format=BINARY)
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
                    rows.append(decode_rows(result))
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
            self._wait(deadline, writable=bool(unsent))

    def _send_rest(self, deadline: float) -> None:
        """Wait until all is sent."""
        while self._pgconn.flush():
            self._wait(deadline, writable=True)

    def _wait(self, deadline: float, *, writable: bool) -> None:
        # At least a look: this process may have been stopped, and the answer have long been there.
        if not wait_ready(self.fileno(), deadline - monotonic(), writable=writable):
            raise psycopg.errors.ConnectionTimeout(
                f"no answer from the server within {self._patience:g} seconds"
            )
        self._pgconn.consume_input()


def _log_failed_hint(exc: Exception) -> None:
    reason = str(exc).partition("\n")[0]
    logger.warning("announce.failed polls will find it: %s", reason)
