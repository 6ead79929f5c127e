"""Database: one pool per process and broker, and the mapping of errors."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import psycopg
from sqlalchemy import exc as sqlalchemy_errors

from . import schema, sql
from .errors import ConfigurationError, DatabaseUnavailable, PgnotifyError, StatementFailed
from .flight import Flight
from .options import Options
from .pool import OVERFLOW, POOL_PATIENCE, Loan, Pool
from .session import Call, Session
from .urls import Target
from .wire import Rows

logger = logging.getLogger(__name__)

#: Seconds that a server is away at the least when it restarts: one that answered so recently
#: has not.
RESTART_TAKES = 0.02

#: Seconds that the server's own statement_timeout is given before we stop waiting for
#: its answer, so that the server's clearer error wins where there is one …
GRACE = 5.0

#: … and the whole patience where statement_timeout is switched off.
PATIENCE_WITHOUT_TIMEOUT = 30.0

#: How soon TCP finds a dead peer: 30 + 3 x 10 seconds idle, 30 seconds with data unsent.
_TCP = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

#: Settings of our sessions.  A role's own search_path may have others' functions before
#: pg_catalog's; triggers that somebody has put on our tables find the usual.  The others make the
#: planner take the indexes that every statement of ours is written for, in the order in which it
#: is written, whatever the tables' sizes are while it plans.  Else a worker that has idled beside
#: an empty table goes on reading it from end to end when it has filled up, until the next ANALYZE
#: (a claim beside 100,000 rows: 150 ms).  And to plan a short statement takes longer than to
#: carry it out.
SETTINGS = " ".join(
    f"-c {setting}"
    for setting in (
        'search_path=pg_catalog,"$user",public',
        "plan_cache_mode=force_generic_plan",
        "enable_seqscan=off",
        "enable_bitmapscan=off",
        "enable_hashjoin=off",
        "enable_mergejoin=off",
        # By which scans of small tables that have no index would seem to be worth compiling.
        "jit=off",
    )
)

#: SQLSTATEs that say our tables are not there (any more): look again at the next connect.
_SCHEMA_GONE = ("42P01", "3F000", "42883")

#: SQLSTATE classes and codes where trying again may help: connection, transaction
#: rollback, resources, operator intervention, system; read-only, lock not available,
#: object in use, prepared statement gone or outdated.
_RETRY_CLASSES = ("08", "40", "53", "57", "58", "XX")
_RETRY_CODES = ("25006", "25P03", "55P03", "55006", "26000", "0A000")

#: SQLSTATEs of prepared statements that are not there, or there already.
_POOLED = ("26000", "42P05")

#: SQLSTATEs of a refused login or a missing database.
_REFUSED_CODES = ("28000", "28P01", "3D000")

#: While connecting libpq gives no SQLSTATE, only its (English) words.
_REFUSALS = (
    # For password, peer, ident, certificate, LDAP …
    "authentication failed for user",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
    "pg_hba.conf rejects",
    "permission denied for database",
    "is not permitted to log in",
    "invalid connection option",
    "invalid value",
    "invalid sslmode",
    "definition of service",
    "service file",
    "certificate verify failed",
    "valid client certificate",
    "alert unknown ca",
    "alert bad certificate",
    "private key file",
    "certificate file",
    "does not match host name",
    "server does not support SSL",
    "root certificate file",
    "unsupported startup parameter",
)


class Database:
    """What one process holds of one broker: its connections and its error mapping.

    No I/O happens before the first use.  Not to be used after a fork: see
    :mod:`kombu_pgnotify.broker`.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.statements = sql.statements(options.schema)
        self.pid = os.getpid()
        self._users = 0
        self._lock = threading.Lock()
        self._verified = False
        self._reached = False
        self._served = False
        self._answered_at = 0.0  # monotonic
        self._pool = Pool(
            lambda: self._connect(self.options.target),
            options.pool_size,
            in_use=lambda: self._users > 0,
        )

    def acquire(self) -> None:
        """Count one more user and make sure the server and the schema can serve it.

        Raises:
            DatabaseUnavailable: not now.
            ConfigurationError: not without somebody's help.
        """
        with self.session() as session:
            self._verify(session)
            with self._lock:
                # Within, so that the connection goes back to the pool.
                self._users += 1

    def adopt(self) -> None:
        """Count one more user, whom a fork has brought here; no I/O."""
        with self._lock:
            self._users += 1

    def check(self) -> None:
        """Make sure that the server and the schema can serve us again; raises as acquire."""
        with self.session() as session:
            self._verify(session)

    def _verify(self, session: Session) -> None:
        if self._verified:
            session.run((self.statements["ping"], ()))
        else:
            schema.ensure(session, self.options.schema, create=self.options.create_schema)
            self._verified = True

    def release(self) -> None:
        """Count one user less; with the last one the idle connections are closed."""
        with self._lock:
            self._users -= 1
            idle = self._users <= 0
        if idle:
            self._pool.close()

    def run(self, *calls: Call, hints: Sequence[Call] = ()) -> list[Rows]:
        """:meth:`Session.run` on a pooled session."""
        with self.session() as session:
            rows = session.run(*calls, hints=hints)
        self._note_answer()
        return rows

    def start(self, *calls: Call, landed: Callable[[], None]) -> Flight:
        """Send calls, one transaction, and do not wait for the answer.

        Whoever needs a session meanwhile waits for it first, rather than open another connection.

        Arguments:
            landed: called when somebody else has read the answer, see :meth:`Flight.expect`.
        """
        with self.mapped_errors():
            loan = self._pool.lend()
            try:
                loan.session.send(*calls)
            except BaseException:
                self._pool.take_back(loan)
                raise
        flight = Flight(loan.session, self.mapped_errors, lambda: self._give_back(loan), landed)
        self._pool.flight = flight
        return flight

    def _give_back(self, loan: Loan) -> None:
        self._pool.flight = None
        if not loan.session.closed:
            self._note_answer()
        self._pool.take_back(loan)

    def _note_answer(self) -> None:
        self._served = True
        self._answered_at = monotonic()

    def losses(self) -> int:
        """Return how many connections were lost so far, one that was just found lost included.

        Raises:
            DatabaseUnavailable: none can be opened now.
        """
        if monotonic() - self._answered_at > RESTART_TAKES:
            with self.session():
                # Lending one looks whether it is still there.
                pass
        return self._pool.losses

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """Lend a pooled session; driver errors leave as ours.

        Raises:
            DatabaseUnavailable, StatementFailed, ConfigurationError: see there.
        """
        with self.mapped_errors():
            loan = self._pool.lend()
            try:
                yield loan.session
            finally:
                self._pool.take_back(loan)

    def open(self, target: Target | None = None) -> Session:
        """Open a connection outside the pool; the caller closes it.

        Arguments:
            target: where to, if not where the broker URL points.

        Raises:
            DatabaseUnavailable, ConfigurationError: see there.
        """
        with self.mapped_errors(target):
            return self._connect(target or self.options.target)

    def close(self) -> None:
        """Close every idle connection."""
        self._pool.close()

    def _connect(self, target: Target) -> Session:
        options = self.options
        try:
            connection = psycopg.connect(autocommit=True, **self._conninfo(target))
        except UnicodeEncodeError:
            # It holds the password: nothing of it may be shown, not even as a cause.
            raise ConfigurationError(
                "user, password or another parameter cannot be written in UTF-8"
            ) from None
        except psycopg.Error as exc:
            # psycopg leaves what took too long to the garbage collector, which may not come for
            # hours: behind a network that recovers, the server would go on to serve it.
            traceback.clear_frames(exc.__traceback__)
            raise
        self._reached = True
        patience = options.statement_timeout + GRACE
        if not options.statement_timeout:
            patience = PATIENCE_WITHOUT_TIMEOUT
        return Session(connection, patience, options.prepared_statements)

    def _conninfo(self, target: Target) -> dict[str, Any]:
        """libpq's keywords: ours, overridden by the user's."""
        options = self.options
        info: dict[str, Any] = {
            **_TCP,
            "client_encoding": "UTF8",
            "target_session_attrs": "read-write",
            "connect_timeout": max(2, round(options.connect_timeout)),
            "application_name": options.application_name or _application_name(),
            **target.params,
        }
        if options.statement_timeout:
            limit = round(options.statement_timeout * 1000)
            ours = f"-c statement_timeout={limit} {SETTINGS}"
            # The user's own -c settings come last and win.
            info["options"] = f"{ours} {info.get('options', '')}".strip()
        password = target.password
        if options.password_source is not None:
            try:
                password = options.password_source()
            except Exception as exc:
                raise DatabaseUnavailable(f"the password cannot be had: {exc}") from exc
        if password is not None:
            info["password"] = str(password)
        return info

    @contextlib.contextmanager
    def mapped_errors(self, target: Target | None = None) -> Iterator[None]:
        """The one place where driver errors become ours.

        Arguments:
            target: the server they name, if not the one of the broker URL.
        """
        try:
            yield
        except PgnotifyError:
            raise
        except psycopg.Error as exc:
            raise self._translate(exc, target or self.options.target) from exc
        except sqlalchemy_errors.TimeoutError as exc:
            raise DatabaseUnavailable(
                f"all {self.options.pool_size + OVERFLOW} connections of this process are in use "
                f"and none came free within {POOL_PATIENCE:g} seconds"
            ) from exc
        except sqlalchemy_errors.InvalidRequestError as exc:
            raise DatabaseUnavailable("the pooled connections were lost") from exc
        except UnicodeEncodeError as exc:
            raise StatementFailed(
                f"a queue name cannot be written in UTF-8: {exc.object!r}"
            ) from exc

    def _translate(self, exc: psycopg.Error, target: Target) -> PgnotifyError:
        state = exc.sqlstate or ""
        where = target.describe()
        reason = _first_line(exc)
        if state in _SCHEMA_GONE:
            self._verified = False
            return DatabaseUnavailable(
                f"schema {self.options.schema!r} is incomplete or gone on {where}: {reason}"
            )
        if state == "42501":
            # A process that has worked before outlives a right that is taken away.
            kind = DatabaseUnavailable if self._served else ConfigurationError
            return kind(
                f"a right is missing on {where}: {reason}; "
                f"grant it on schema {self.options.schema!r} (see the README, Rights)"
            )
        if state in _POOLED:
            return DatabaseUnavailable(
                f"{where} cannot serve us: {reason}; behind a pooler in transaction mode set the "
                "option prepared_statements to False"
            )
        if "unsupported startup parameter" in reason:
            reason += "; behind a pooler set the option statement_timeout to 0"
        if _refused(state, reason):
            if not self._reached:
                return ConfigurationError(f"{where} refuses the login: {reason}")
            # It has let us in before: passwords and certificates are being changed.
            return DatabaseUnavailable(f"{where} refuses the login now: {reason}")
        if state == "57014":
            return DatabaseUnavailable(
                f"{where} did not finish a statement within statement_timeout "
                f"({self.options.statement_timeout:g} s): {reason}"
            )
        if isinstance(exc, psycopg.DataError):
            return StatementFailed(reason)
        if not state or state.startswith(_RETRY_CLASSES) or state in _RETRY_CODES:
            return DatabaseUnavailable(f"{where} cannot serve us: {reason}")
        return StatementFailed(f"{where} refused a statement: {reason}")


def _refused(state: str, reason: str) -> bool:
    """True where trying again cannot help: a wrong password, role, database, certificate …"""
    return state in _REFUSED_CODES or (not state and any(sign in reason for sign in _REFUSALS))


def _first_line(exc: psycopg.Error) -> str:
    """Return what the driver says, on one line and without its hints about TCP/IP."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip(" ^")]
    kept = [line for line in lines if not line.startswith(("Is the server", "HINT:", "LINE "))]
    return "; ".join(kept[:3]) or type(exc).__name__


def _application_name() -> str:
    return f"kombu_pgnotify@{socket.gethostname()[:32]}:{os.getpid()}"
