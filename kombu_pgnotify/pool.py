"""Pool: the open sessions of one process and broker, lent to whoever runs a statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from sqlalchemy import event, exc as sqlalchemy_errors
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

from .flight import Flight
from .session import Session

#: Connections a process may open beyond `pool_size` while all are in use: as many
#: as kombu lets publish at once (broker_pool_limit).
OVERFLOW = 10

#: Seconds to wait for one of them.
POOL_PATIENCE = 10.0


#: Seconds to wait for the answer to what is under way before another connection is opened: it may
#: be waiting for somebody's lock.
FLIGHT_PATIENCE = 0.1


class Loan:
    """A session that is somebody's until :meth:`Pool.take_back`."""

    __slots__ = ("_fairy", "session")

    def __init__(self, fairy: PoolProxiedConnection) -> None:
        self._fairy = fairy
        self.session = cast(Session, fairy.dbapi_connection)

    def end(self, *, close: bool = False) -> None:
        """Give the session back to SQLAlchemy's pool, or `close` it."""
        if close:
            self._fairy.invalidate()
        self._fairy.close()


class Pool:
    """SQLAlchemy's pool, and before it the session that was given back last.

    SQLAlchemy's own work takes longer than to encode a message.  All changes of what is at hand
    are single steps of a dict, since signal handlers come here too.

    Arguments:
        connect: opens a session.
        size: how many are kept while nobody needs them.
        in_use: returns False if nobody is left who would close what is idle.
    """

    def __init__(
        self, connect: Callable[[], Session], size: int, in_use: Callable[[], bool]
    ) -> None:
        self._size = size
        self._in_use = in_use
        self._at_hand: dict[None, Loan] = {}
        # Those who ask SQLAlchemy's pool, which may have them wait.
        self._asking: dict[object, None] = {}
        #: Calls under way on a session of ours.
        self.flight: Flight | None = None
        #: How many sessions were found lost.
        self.losses = 0
        self._pool = QueuePool(
            connect,  # type: ignore[arg-type]
            # Besides the one at hand.  It takes 0 for any number.
            pool_size=max(size - 1, 1),
            max_overflow=size + OVERFLOW - max(size - 1, 1),
            timeout=POOL_PATIENCE,
            use_lifo=True,
            # A session is in autocommit: there is nothing to roll back.
            reset_on_return=None,
        )
        event.listen(self._pool, "checkout", self._refuse_stale)

    def lend(self) -> Loan:
        """Lend a session that the server has not closed meanwhile.

        Raises:
            psycopg.Error, sqlalchemy.exc.SQLAlchemyError: none can be had.
        """
        if (loan := self._take_at_hand()) is not None:
            return loan
        flight = self.flight
        if (
            flight is not None
            and flight.land(FLIGHT_PATIENCE)
            and (loan := self._take_at_hand()) is not None
        ):
            return loan
        me = object()
        self._asking[me] = None
        try:
            # Only now: who puts one at hand from here on sees that somebody asks.
            self._put_away()
            return Loan(self._pool.connect())
        finally:
            del self._asking[me]

    def take_back(self, loan: Loan) -> None:
        """The session has been used; it is kept if it is still good."""
        if loan.session.closed:
            self.losses += 1
            loan.end(close=True)
        elif self._pool.checkedin() >= self._size:
            # It was given back to somebody who had asked, and who then got another one.
            loan.end(close=True)
        elif self._at_hand.setdefault(None, loan) is not loan:
            loan.end(close=self._size == 1 or not self._in_use())
        elif self._asking or not self._in_use():
            self._put_away()

    def close(self) -> None:
        """Close all that are idle."""
        self._put_away()
        self._pool.dispose()

    def _take_at_hand(self) -> Loan | None:
        loan = self._at_hand.pop(None, None)
        if loan is None or not loan.session.looks_stale():
            return loan
        self.losses += 1
        loan.end(close=True)
        return None

    def _put_away(self) -> None:
        loan = self._at_hand.pop(None, None)
        if loan is not None:
            loan.end(close=not self._in_use())

    def _refuse_stale(self, session: Session, record: Any, proxy: Any) -> None:
        """Pool hook: a session the server has closed meanwhile is replaced, not lent."""
        if session.looks_stale():
            self.losses += 1
            raise sqlalchemy_errors.DisconnectionError
