"""Outage: how a consumer bears a server that is away for a moment."""

from __future__ import annotations

import logging
import random
from time import monotonic

logger = logging.getLogger(__name__)

#: Seconds before the first and at the most between attempts, doubling.
FIRST_BACKOFF, LAST_BACKOFF = 0.05, 1.0


class Outage:
    """Says when to try again, and when to give up.

    A restart or a failover takes seconds.  Told of it, Celery drops what it has prefetched,
    waits 2, 4, 6 … seconds and starts its consumer anew; but the leases are in the database
    and nothing is wrong with them.  So a consumer keeps quiet and tries again for a while.

    Arguments:
        tolerance: seconds to bear, counted from the first failure.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._since: float | None = None
        self._backoff = FIRST_BACKOFF
        self._retry_at = 0.0

    @property
    def lasts(self) -> bool:
        """True from the first failure on until :meth:`over`."""
        return self._since is not None

    def bears(self, exc: Exception) -> bool:
        """Note a failure; False if it has lasted for too long."""
        now = monotonic()
        if self._since is None:
            self._since = now
            if self._tolerance:
                logger.warning(
                    "consumption.interrupted tried again for %g s: %s", self._tolerance, exc
                )
        if now - self._since >= self._tolerance:
            self._end()
            return False
        self._retry_at = now + self._backoff * random.uniform(0.8, 1.2)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)
        return True

    def wait(self) -> float:
        """Return the seconds until the next attempt."""
        return max(0.0, self._retry_at - monotonic())

    def hurry(self) -> None:
        """The server seems to be back: try at once.  Called by any thread."""
        self._retry_at = 0.0

    def over(self) -> None:
        """The server has answered."""
        if self._since is not None:
            logger.warning("consumption.resumed after=%.1fs", monotonic() - self._since)
        self._end()

    def _end(self) -> None:
        self._since = None
        self._backoff = FIRST_BACKOFF
