"""Consumption: which queues to look at, when, for whom, and what is waiting for delivery."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from time import monotonic

from .broker import Broker
from .celery.worker import is_stopping
from .claiming import Claim
from .consumers import Consumer, Consumers, Watch, Watches, in_order
from .errors import DatabaseUnavailable
from .fetching import AGAIN_SOON, Entry, Fetcher
from .leases import Lease, Outcome
from .live import LiveQueues
from .messages import RELEASED, channel_of
from .outage import Outage
from .topology import BOUND

#: Messages that were told directly (control commands, events) and go before others, since a
#: command given before a task is to be obeyed before it; then the others get a turn.
LIVE_IN_A_ROW = 16


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
        self._buffer: deque[Entry] = deque()
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
        self._fetcher = Fetcher(broker, wake, self._listen, self._watches.seen_empty)
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
        self._watches.announced([self._watches[queue].channel], from_start=False)
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
        if self._fetcher.under_way:
            self._broker.keeper.hurry()

    def close(self) -> None:
        """Forget all consumers; what was claimed and not delivered is released."""
        for consumer in self._consumers.all():
            self.cancel(consumer)
        self._fetcher.abandon()
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

    def named(self, channel: str, *, reserve: bool) -> None:
        self._watches.named(channel, reserve=reserve)
        self._wake()

    def unseen(self, channel: str) -> bool:
        return self._watches.unseen(channel)

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

    def _next(self, one_by_one: bool) -> Entry | None:
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

    def _find(self, one_by_one: bool) -> Entry | None:
        """Return the next message that was told, claimed before, or can be claimed now."""
        self._collect(wait=False)
        if self._live:
            for queue in self._live.tend():
                if (watch := self._watches.get(queue)) is not None:
                    # What was published before is in rows.
                    self._watches.announced([watch.channel], from_start=False)
                    self._absorb()
            if self._live_in_a_row < LIVE_IN_A_ROW and (entry := self._next_live(one_by_one)):
                self._live_in_a_row += 1
                return entry
            self._live_in_a_row = 0
        while True:
            self._collect(wait=one_by_one and not self._buffer)
            if self._buffer:
                self._fetch_ahead(one_by_one)
            if (entry := self._next_deliverable()) is not None:
                return entry
            if self._fetcher.under_way or is_stopping() or not self._fetch_somewhere(one_by_one):
                return self._next_live(one_by_one) if self._live else None

    def _next_live(self, one_by_one: bool) -> Entry | None:
        """Return a message that an exchange has told us, if there is one.

        Rows of the same queue come first: they were published before.
        """
        for queue in self._live.with_mail():
            watch = self._watches.get(queue)
            if watch is None or (taker := self._consumers.taker(queue)) is None:
                continue
            if any(consumer.queue == queue for consumer, _, _ in list(self._buffer)):
                continue
            if watch.look_at <= monotonic():
                if self._fetcher.under_way and not taker.no_ack:
                    continue
                if self._fetch(watch, taker, one_by_one):
                    continue
            if (row := self._live.next(queue)) is not None:
                self._consumers.took()
                return taker, row, None
        return None

    def _next_deliverable(self) -> Entry | None:
        """Return the next claimed message that is still ours, for a consumer still there."""
        while (entry := self._next_waiting()) is not None:
            consumer, _, lease = entry
            # A signal may have come while the claim was under way.
            startable = not is_stopping() and (lease and self._broker.keeper.holds(lease))
            if consumer.active and (lease is None or startable):
                return entry
            self._give_back(lease)
        return None

    def _next_waiting(self) -> Entry | None:
        try:
            return self._buffer.popleft()
        except IndexError:
            return None  # a signal handler's cancel may empty it at any moment

    @property
    def waiting(self) -> bool:
        """True if a message waits for delivery, with nothing left to be claimed."""
        return bool(self._buffer or self._live.with_mail())

    @property
    def claim(self) -> Claim | None:
        """The claim that is under way."""
        return self._fetcher.under_way

    def next_look(self) -> float | None:
        """Return in how many seconds to look again; None: only when woken."""
        if self._outage.lasts:
            return self._outage.wait()
        if is_stopping():
            return AGAIN_SOON
        if (claim := self._fetcher.under_way) is not None:
            return claim.patience
        times = self._watches.next_looks(self._consumers)
        if any(consumer.credit().waits_for_slot for consumer in self._consumers.all()):
            times.append(monotonic() + AGAIN_SOON)
        return max(0.0, min(times) - monotonic()) if times else None

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
                self._fetcher.note_busy(watch, now)
            elif self._fetch(watch, taker, one_by_one):
                return True
            elif self._fetcher.under_way:
                break
        self._blocked = blocked
        return False

    def _fetch(self, watch: Watch, taker: Consumer, one_by_one: bool) -> bool:
        """Look at one queue for `taker`; True if something came."""
        limit = self._broker.options.max_batch
        credit = taker.credit().can_consume_max_estimate()
        if credit is not None:
            limit = max(1, min(limit, credit))
        if one_by_one and (taker.no_ack or credit is None):
            # Who sets no limit may take one message and stop: hoard nothing for it.
            limit = 1
        self._consumers.took()
        # When there is nothing else to do.
        at_once = one_by_one or taker.credit().idle
        self._buffer.extend(self._fetcher.look(watch, taker, limit, at_once=at_once))
        if at_once:
            self._collect(wait=True)
        return bool(self._buffer)

    def _collect(self, *, wait: bool) -> None:
        """Take in what the claim under way has brought, and then what was announced meanwhile."""
        self._buffer.extend(self._fetcher.collect(wait=wait))
        self._absorb()

    def _absorb(self) -> None:
        # Not while a claim is under way: it may have looked before, and find the queue empty.
        if not self._fetcher.under_way:
            self._watches.absorb()

    def _fetch_ahead(self, one_by_one: bool) -> None:
        """Claim more before the last message has been handed over: the server works meanwhile."""
        if self._fetcher.under_way or is_stopping():
            return
        now, waiting, most = monotonic(), len(self._buffer), self._broker.options.max_batch
        for watch in self._watches.all():
            if watch.look_at > now or watch.seen_empty or watch.promote_now:
                continue
            taker = self._consumers.taker(watch.queue)
            if taker is None or taker.no_ack:
                continue
            room = taker.credit().room_ahead(waiting, 0 if one_by_one else most)
            if room > 0:
                self._consumers.took()
                self._fetcher.look(watch, taker, min(room, most))
                return

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
