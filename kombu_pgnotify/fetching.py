"""Fetching: looks at queues for one kombu connection, one claim under way at a time."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, TypeAlias

from .broker import Broker
from .celery.worker import is_stopping
from .claiming import Claim
from .claims import Outlook
from .consumers import Consumer, Watch
from .errors import StatementFailed
from .leases import Lease
from .messages import Claimed
from .qos import discarded, flush

logger = logging.getLogger(__name__)

#: Seconds between two checks of a busy queue for held messages that have become due.
PROMOTE_EVERY = 1.0

#: Seconds to wait when the database said that something is there and it could not be got, and
#: for a process of the worker's to be free.
AGAIN_SOON = 0.05

#: Seconds after the last message before the server is asked when to look again: a prefork pool
#: hands a task to a process within two iterations of the loop, and a round trip in between would
#: hold it up.  A worker told to end during it would forget the task and give it back although a
#: process carries it out.
HAND_OVER = 0.005

#: Share by which polls are spread, so that workers started together do not poll together.
JITTER = 0.2

#: A message, whom it goes to, and its lease (None: it is gone from the table).
Entry: TypeAlias = tuple[Consumer, Claimed, Lease | None]


class _Fetch(NamedTuple):
    watch: Watch
    taker: Consumer
    limit: int
    claim: Claim


class Fetcher:
    """What one connection claims; used by its consuming thread.

    Arguments:
        broker: this process's broker.
        wake: called when somebody else has read the answer to a claim.
        listen: has the listener tell publishers which queues wait.
        seen_empty: called with the channel of a queue in which nothing is left.
    """

    def __init__(
        self,
        broker: Broker,
        wake: Callable[[], None],
        listen: Callable[[], None],
        seen_empty: Callable[[str], None],
    ) -> None:
        self._broker = broker
        self._wake = wake
        self._listen = listen
        self._seen_empty = seen_empty
        self._fetch: _Fetch | None = None

    @property
    def under_way(self) -> Claim | None:
        """The claim whose answer has not been collected."""
        return self._fetch.claim if self._fetch is not None else None

    def abandon(self) -> None:
        """Nobody will collect it: the keeper gives back what it brings."""
        if self._fetch is not None:
            self._fetch = None
            self._broker.keeper.look_after()
            self._broker.keeper.hurry()

    def look(
        self, watch: Watch, taker: Consumer, limit: int, *, at_once: bool = False
    ) -> list[Entry]:
        """Look at one queue for `taker`; return what is gone from it, else begin to claim.

        What one queue's rows make the server refuse must not end the others' worker.

        Arguments:
            at_once: the caller collects the claim before it does anything else.
        """
        try:
            now = monotonic()
            if watch.seen_empty:
                self._plan(watch, now)
                if watch.look_at > now:
                    return []
            elif watch.promote_now:
                self._promote(watch, now)
            return (
                self._take(watch, taker, limit)
                if taker.no_ack
                else self._start(watch, taker, limit, at_once)
            )
        except StatementFailed as exc:
            self._refused(watch, exc)
            return []

    def collect(self, *, wait: bool) -> list[Entry]:
        """Return what the claim under way has brought.

        Arguments:
            wait: for the answer, if it has not come yet.
        """
        fetch = self._fetch
        if fetch is None or not (wait or fetch.claim.answered()):
            return []
        try:
            rows, leases = self._broker.keeper.collect(fetch.claim)
        except StatementFailed as exc:
            self._refused(fetch.watch, exc)
            return []
        finally:
            self._fetch = None
        self._learn(fetch.watch, rows, fetch.limit, fetch.claim.asked_at)
        return self._fit(fetch.taker, rows, leases)

    def _start(self, watch: Watch, taker: Consumer, limit: int, at_once: bool) -> list[Entry]:
        broker, now = self._broker, monotonic()
        ranges = watch.cursor.next_ranges(now)
        claim = broker.keeper.start_claim(
            watch.queue,
            broker.store.claiming(watch.queue, ranges, limit, broker.worker),
            now,
            wanted=lambda: taker.active and not is_stopping(),
            landed=self._wake,
            at_once=at_once,
        )
        self._fetch = _Fetch(watch, taker, limit, claim)
        return []

    def _take(self, watch: Watch, taker: Consumer, limit: int) -> list[Entry]:
        started, keeper = monotonic(), self._broker.keeper
        ranges = watch.cursor.next_ranges(started)
        rows = self._broker.store.take(watch.queue, ranges, limit, keeper.run_with_acks)
        self._learn(watch, rows, limit, started)
        return self._fit(taker, rows, [])

    def _learn(self, watch: Watch, rows: list[Claimed], limit: int, started: float) -> None:
        """Find out from what came when to look again."""
        now = monotonic()
        outlook = watch.cursor.claimed([(r.rank, r.task_id) for r in rows], limit, started, now)
        if outlook is Outlook.MORE:
            # A queue that is never empty still has to let due messages in.
            watch.promote_now = now >= watch.promote_at
            self.note_busy(watch, now)
        elif outlook is Outlook.UNSURE:
            # Whatever is left lies below, and is looked for here before long.
            self._seen_empty(watch.channel)
            self.look_later(watch, watch.cursor.due_from_start())
        else:
            watch.seen_empty, watch.busy_since = True, None
            self._seen_empty(watch.channel)
            if rows:
                # First hand over what came; then ask when to look again.
                self.look_later(watch, now + HAND_OVER)

    def _fit(self, taker: Consumer, rows: list[Claimed], leases: list[Lease]) -> list[Entry]:
        """Return what may be delivered."""
        keeper, max_attempts = self._broker.keeper, self._broker.options.max_attempts
        fit: list[Entry] = [
            (taker, row, lease)
            for row, lease in itertools.zip_longest(rows, leases)
            if not discarded(keeper, row, lease, max_attempts)
        ]
        if len(fit) < len(rows):
            flush(keeper)
        return fit

    def _promote(self, watch: Watch, now: float) -> bool:
        """Make held messages ready whose time has come; True if there were any."""
        watch.promote_now, watch.promote_at = False, now + PROMOTE_EVERY
        promoted = self._broker.store.promote(watch.queue)
        if promoted:
            watch.cursor.look_from_start()
        return bool(promoted)

    def _plan(self, watch: Watch, now: float) -> None:
        """The queue is empty: find out when to look again although nobody announces anything."""
        watch.seen_empty = False
        wait = self._broker.options.poll_every * random.uniform(1 - JITTER, 1)
        seconds = self._broker.store.next_look(watch.queue)
        if seconds is None or seconds > 0:
            self.look_later(watch, monotonic() + (wait if seconds is None else min(wait, seconds)))
            return
        # Due, or expired: take it now, or soon where somebody else is at it.
        watch.cursor.look_from_start()
        if not self._promote(watch, now):
            self.look_later(watch, now + AGAIN_SOON)

    def note_busy(self, watch: Watch, now: float) -> None:
        """There is more than is taken."""
        if watch.busy(now):
            self._listen()

    def look_later(self, watch: Watch, when: float) -> None:
        """Nothing is to be had before `when`, or before publishers, once they know, tell of it."""
        if watch.rest(when):
            self._listen()

    def _refused(self, watch: Watch, exc: StatementFailed) -> None:
        self.look_later(watch, monotonic() + self._broker.options.poll_every)
        logger.error("claim.failed queue=%r tried again later: %s", watch.queue, exc)
