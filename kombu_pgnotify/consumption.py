"""Consumption: which queues to look at, when, for whom, and what is waiting for delivery."""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

from .broker import Broker
from .celery.worker import is_stopping
from .claims import Outlook
from .consumers import Consumer, Consumers, Watch, Watches, in_order
from .errors import DatabaseUnavailable, StatementFailed
from .leases import Lease, Outcome
from .live import LiveQueues
from .messages import RELEASED, Claimed, channel_of
from .outage import Outage
from .qos import discarded, flush
from .topology import BOUND

logger = logging.getLogger(__name__)

#: Seconds between two checks of a busy queue for held messages that have become due.
PROMOTE_EVERY = 1.0

#: Seconds to wait when the database said that something is there and it could not be got, and
#: for a process of the worker's to be free.
AGAIN_SOON = 0.05

#: Messages that were told directly (control commands, events) and go before others, since a
#: command given before a task is to be obeyed before it; then the others get a turn.
LIVE_IN_A_ROW = 16

#: Share by which polls are spread, so that workers started together do not poll together.
JITTER = 0.2

#: A message, whom it goes to, and its lease (None: it is gone from the table).
_Entry: TypeAlias = tuple[Consumer, Claimed, Lease | None]


class Consumption:
    """Claims for the consumers of one kombu connection and hands messages over, one by one.

    Used by one thread at a time, except for :meth:`cancel`, :meth:`credit_regained` and
    the listener's calls, which take no lock and do no I/O.

    Arguments:
        broker: this process's broker.
        waker: woken when there may be something to do.
    """

    def __init__(self, broker: Broker, wake: Callable[[], None]) -> None:
        self._broker = broker
        self._wake = wake
        self._consumers = Consumers()
        self._watches = Watches()
        self._buffer: deque[_Entry] = deque()
        self._live = LiveQueues(
            broker.topology,
            broker.store,
            broker.options.schema,
            listen=self._listen,
            heard=lambda: broker.listener.heard_by(self),
        )
        self._live_in_a_row = 0
        self._queue_turn = itertools.count()
        self._blocked = False
        #: A claim waits for more credit, and so may acknowledgements.
        self.gathering = False
        self._losses = broker.losses
        self._outage = Outage(broker.options.outage_tolerance)

    @property
    def active(self) -> bool:
        """True while anybody consumes."""
        return bool(self._consumers)

    @property
    def interrupted(self) -> bool:
        """True while the server is away."""
        return self._outage.lasts

    def add(self, consumer: Consumer) -> None:
        """Start consuming: look at once, and listen."""
        queue, options = consumer.queue, self._broker.options
        self._consumers.add(consumer)
        if queue not in self._watches:
            self._watches[queue] = Watch(queue, channel_of(options.schema, queue))
            self._listen()
        if consumer.no_ack and options.notify and options.live_queues:
            self._live.add(queue)
        consumer.declaration = self._broker.housekeeper.use(queue)
        self._watches[queue].look_at = 0.0
        self._wake()

    def cancel(self, consumer: Consumer) -> None:
        """Stop consuming; what was claimed and not delivered is released by the keeper."""
        if not consumer.active:
            return
        consumer.active = False
        queue = consumer.queue
        self._broker.housekeeper.left(queue, consumer.declaration)
        if not self._consumers.remove(consumer):
            self._watches.pop(queue, None)
            self._live.remove(queue)
            if not self._watches:
                self._broker.listener.unsubscribe(self)
        self._release_undelivered()

    def close(self) -> None:
        """Forget all consumers; what was claimed and not delivered is released."""
        for consumer in self._consumers.all():
            self.cancel(consumer)
        self._broker.interrupted.discard(self)
        self._broker.listener.unsubscribe(self)

    def credit_regained(self) -> None:
        """A message was settled: if the limit held us back, look again at once."""
        if self._blocked:
            self._wake()

    # -- Subscriber: called by the listener's thread

    def notified(self, channel: str, payload: str) -> None:
        if self._live.hear(channel, payload):
            pass
        elif payload == BOUND:
            self._live.rebound(channel)
        else:
            self._watches.announced([channel], from_start=payload == RELEASED)
        self._wake()

    def resync(self, channels: frozenset[str]) -> None:
        self._watches.announced(channels, from_start=True)
        self._outage.hurry()
        self._wake()

    def awaited(self, channels: frozenset[str]) -> None:
        self._watches.announced(channels, from_start=False)
        self._wake()

    def deafened(self) -> None:
        self._live.deafened()
        self._wake()

    # -- The consuming thread

    def deliver_one(self, *, one_by_one: bool) -> bool:
        """Hand over one message, claiming if none is waiting; False if there is none now.

        Arguments:
            one_by_one: the caller may stop after any message: take no more than one of
                those that are gone from the table once taken.

        Raises:
            DatabaseUnavailable: the server has been away for longer than `outage_tolerance`, or
                was for another consumer of this process.  Celery expects all its connections
                to be lost together: gevent's and eventlet's mailboxes start anew only when the
                main connection does.
        """
        self.gathering = False
        if self._losses != self._broker.losses:
            self._losses = self._broker.losses
            raise DatabaseUnavailable("another connection of this process has lost the server")
        try:
            entry = self._next(one_by_one)
        except DatabaseUnavailable as exc:
            if self._outage.bears(exc):
                self._broker.interrupted.add(self)
                return False
            self._broker.interrupted.discard(self)
            self._broker.losses += 1
            self._losses = self._broker.losses
            raise
        if entry is None:
            return False
        consumer, row, lease = entry
        consumer.deliver(row, lease)
        return True

    def _next(self, one_by_one: bool) -> _Entry | None:
        """Return what to deliver next, None if there is nothing now."""
        if not self._outage.lasts:
            return self._find(one_by_one)
        if self._outage.wait() > 0:
            # What was claimed before is ours all the same.
            return self._next_deliverable()
        self._broker.database.check()
        self._watches.announced(self._watches.channels(), from_start=True)
        entry = self._find(one_by_one)
        self._outage.over()
        self._broker.interrupted.discard(self)
        return entry

    def _find(self, one_by_one: bool) -> _Entry | None:
        """Return the next message that was told, claimed before, or can be claimed now."""
        self._watches.absorb()
        if self._live:
            for queue in self._live.tend():
                if (watch := self._watches.get(queue)) is not None:
                    # What was published before is in rows.
                    watch.look_at = 0.0
            if self._live_in_a_row < LIVE_IN_A_ROW and (entry := self._next_live(one_by_one)):
                self._live_in_a_row += 1
                return entry
            self._live_in_a_row = 0
        while True:
            if (entry := self._next_deliverable()) is not None:
                return entry
            if is_stopping() or not self._fetch_somewhere(one_by_one):
                return self._next_live(one_by_one) if self._live else None

    def _next_live(self, one_by_one: bool) -> _Entry | None:
        """Return a message that an exchange has told us, if there is one.

        Rows of the same queue come first: they were published before.
        """
        for queue in self._live.with_mail():
            watch = self._watches.get(queue)
            if watch is None or (taker := self._consumers.taker(queue)) is None:
                continue
            if any(consumer.queue == queue for consumer, _, _ in list(self._buffer)):
                continue
            if watch.look_at <= monotonic() and self._look_safely(watch, taker, one_by_one):
                continue
            if (row := self._live.next(queue)) is not None:
                return taker, row, None
        return None

    def _next_deliverable(self) -> _Entry | None:
        """Return the next claimed message that is still ours, for a consumer still there."""
        while (entry := self._next_waiting()) is not None:
            consumer, _, lease = entry
            # A signal may have come while the claim was under way.
            startable = not is_stopping() and (lease and self._broker.keeper.holds(lease))
            if consumer.active and (lease is None or startable):
                return entry
            self._give_back(lease)
        return None

    def _next_waiting(self) -> _Entry | None:
        try:
            return self._buffer.popleft()
        except IndexError:
            return None  # a signal handler's cancel may empty it at any moment

    @property
    def waiting(self) -> bool:
        """True if a message waits for delivery, with nothing left to be claimed."""
        return bool(self._buffer or self._live.with_mail())

    def next_look(self) -> float | None:
        """Return in how many seconds to look again; None: only when woken."""
        if self._outage.lasts:
            return self._outage.wait()
        if is_stopping():
            return AGAIN_SOON
        times = self._watches.next_looks(self._consumers)
        if any(consumer.credit().waits_for_slot for consumer in self._consumers.all()):
            times.append(monotonic() + AGAIN_SOON)
        return max(0.0, min(times) - monotonic()) if times else None

    def _note_busy(self, watch: Watch, now: float) -> None:
        if watch.busy(now):
            self._listen()

    def _look_later(self, watch: Watch, when: float) -> None:
        """Nothing is to be had before `when`, or before publishers, once they know, tell of it."""
        if watch.rest(when):
            self._listen()

    def _listen(self) -> None:
        if self._broker.options.notify:
            channels = self._watches.channels() | self._live.channels
            waiting = self._watches.channels(waiting=True)
            self._broker.listener.subscribe(self, channels, waiting)
            if not self._watches:
                # A signal handler has cancelled the last consumer meanwhile.
                self._broker.listener.unsubscribe(self)

    def _fetch_somewhere(self, one_by_one: bool) -> bool:
        """Look at the queues that are due, in turn, until one gave something."""
        # Said before it is known, so that an ack made meanwhile by another thread wakes us.
        self._blocked = True
        blocked = False
        watches, strategy = self._watches.all(), self._broker.options.queue_order_strategy
        for watch in in_order(watches, strategy, next(self._queue_turn)):
            if watch.look_at > (now := monotonic()):
                continue
            if not one_by_one and self._consumers.gather_until(watch.queue) > now:
                self.gathering = True
                continue
            taker = self._consumers.taker(watch.queue)
            if taker is None:
                blocked = True
                self._note_busy(watch, now)
            elif self._look_safely(watch, taker, one_by_one):
                return True
        self._blocked = blocked
        return False

    def _look_safely(self, watch: Watch, taker: Consumer, one_by_one: bool) -> bool:
        """Look; what one queue's rows make the server refuse must not end the others' worker."""
        try:
            return self._look(watch, taker, one_by_one)
        except StatementFailed as exc:
            self._look_later(watch, monotonic() + self._broker.options.poll_every)
            logger.error("claim.failed queue=%r tried again later: %s", watch.queue, exc)
            return False

    def _look(self, watch: Watch, taker: Consumer, one_by_one: bool) -> bool:
        """Claim from one queue for `taker`; True if something came."""
        now = monotonic()
        if watch.seen_empty:
            self._plan(watch, now)
            if watch.look_at > now:
                return False
        elif watch.promote_now:
            self._promote(watch, now)
        limit = self._broker.options.max_batch
        credit = taker.credit().can_consume_max_estimate()
        if credit is not None:
            limit = max(1, min(limit, credit))
        if one_by_one and (taker.no_ack or credit is None):
            # Who sets no limit may take one message and stop: hoard nothing for it.
            limit = 1
        rows = self._claim(watch, taker, limit)
        self._buffer.extend(rows)
        return bool(rows)

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
            self._look_later(watch, monotonic() + (wait if seconds is None else min(wait, seconds)))
            return
        # Due, or expired: take it now, or soon where somebody else is at it.
        watch.cursor.look_from_start()
        if not self._promote(watch, now):
            self._look_later(watch, now + AGAIN_SOON)

    def _claim(self, watch: Watch, taker: Consumer, limit: int) -> list[_Entry]:
        broker, started = self._broker, monotonic()
        ranges, store = watch.cursor.next_ranges(started), broker.store
        leases: list[Lease] = []
        if taker.no_ack:
            rows = store.take(watch.queue, ranges, limit, broker.keeper.run_with_acks)
        else:
            rows, leases = broker.keeper.claim(
                watch.queue,
                lambda run: store.claim(watch.queue, ranges, limit, broker.worker, run),
                started,
            )
        now = monotonic()
        outlook = watch.cursor.claimed([(r.rank, r.task_id) for r in rows], limit, started, now)
        if outlook is Outlook.MORE:
            # A queue that is never empty still has to let due messages in.
            watch.promote_now = now >= watch.promote_at
            self._note_busy(watch, now)
        elif outlook is Outlook.UNSURE:
            self._look_later(watch, watch.cursor.due_from_start())
        else:
            # First hand over what came; then ask when to look again.
            watch.seen_empty, watch.busy_since = True, None
        fit = [
            (taker, row, lease)
            for row, lease in itertools.zip_longest(rows, leases)
            if not discarded(broker.keeper, row, lease, broker.options.max_attempts)
        ]
        if len(fit) < len(rows):
            flush(broker.keeper)
        return fit

    def _give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            self._broker.keeper.settle(lease, Outcome.RELEASED)
            self._broker.keeper.hurry()

    def _release_undelivered(self) -> None:
        """Give back what waits for consumers that are gone, keeping the others' order."""
        for _ in range(len(self._buffer)):
            entry = self._buffer.popleft()
            if entry[0].active:
                self._buffer.append(entry)
            else:
                self._give_back(entry[2])
