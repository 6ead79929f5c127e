"""Flight: calls that were sent, and whose answer has not been read yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic

from .errors import DatabaseUnavailable, PgnotifyError
from .session import Session
from .wire import Rows

#: Seconds between two looks of somebody who needs the session: a claim takes less than one.
LOOK_EVERY = 0.0005


class Flight:
    """One transaction under way; the session is its own until it has landed.

    Anybody may land it: who started it and wants the answer, or who needs the session.  Safe from
    any thread, and from a signal handler that interrupts any of this.

    Arguments:
        session: it was sent on.
        mapped_errors: makes driver errors ours.
        give_back: takes the session back.
        landed: called when the answer was read before :meth:`expect`.
    """

    def __init__(
        self,
        session: Session,
        mapped_errors: Callable[[], AbstractContextManager[None]],
        give_back: Callable[[], None],
        landed: Callable[[], None],
    ) -> None:
        self._session = session
        self._fd = session.fileno()
        self._mapped_errors = mapped_errors
        self._give_back = give_back
        self._landed = landed
        self._reader: int | None = None
        # Reentrant: a signal handler may strike between taking it and saying so.
        self._lock = threading.RLock()
        self._rows: list[Rows] | None = None
        self._error: PgnotifyError | None = None

    def fileno(self) -> int:
        """The socket that becomes readable with the answer, unless somebody else reads it."""
        return self._fd

    @property
    def patience(self) -> float:
        """How many seconds the answer may still take; 0 once it has been read."""
        return 0.0 if self.has_landed else self._session.patience_left

    @property
    def has_landed(self) -> bool:
        """True once the answer has been read, or will never come."""
        return not self._under_way()

    def _under_way(self) -> bool:
        return self._rows is None and self._error is None

    def answered(self) -> bool:
        """True if there is no need to wait for the answer, or no use."""
        if not self._under_way():
            return True
        if self._reader is not None or not self._lock.acquire(blocking=False):
            # Somebody is reading it, and tells us when it has landed.
            return False
        try:
            return not self._under_way() or self._session.has_answer()
        finally:
            self._lock.release()

    def land(self, timeout: float | None = None) -> bool:
        """Wait for the answer; False if this thread is just doing so, below a signal handler.

        Arguments:
            timeout: seconds after which it is False as well; None: as long as the session has
                patience.
        """
        me = threading.get_ident()
        if self._reader == me:
            return False
        if timeout is not None and not self._answered_within(timeout):
            return False
        with self._lock:
            self._reader = me
            try:
                if not self.has_landed:
                    self._read()
            finally:
                self._reader = None
        return True

    def _answered_within(self, timeout: float) -> bool:
        """Wait for the answer without reading more than has come."""
        deadline = monotonic() + timeout
        while not self.answered():
            left = deadline - monotonic()
            if left <= 0:
                return False
            # Not on the socket: somebody else may be waiting there.
            time.sleep(min(left, LOOK_EVERY))
        return True

    def rows(self) -> list[Rows]:
        """Return the rows of each call, waiting for them.

        Raises:
            PgnotifyError: the server refused a statement, or is lost.
        """
        self.land()
        if self._rows is None:
            raise self._error or DatabaseUnavailable("the answer is just being read")
        return self._rows

    def expect(self) -> None:
        """Whoever would have to be told that it has landed is asking for the answer now."""
        self._landed = lambda: None

    def _read(self) -> None:
        try:
            with self._mapped_errors():
                self._rows = self._session.receive()
        except PgnotifyError as exc:
            self._error = exc
        except BaseException:
            self._error = DatabaseUnavailable("the wait for an answer was interrupted")
            raise
        finally:
            self._give_back()
            self._landed()
