"""Consumers: where the messages of a queue go, and what is known about the queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Protocol

from .claims import ClaimCursor
from .housekeeper import Declaration
from .leases import Lease
from .messages import Claimed

#: Seconds with always more than is taken after which publishers need not tell us of more.
BUSY_AFTER = 0.05


#: Seconds after which one looks who was told in reserve: who was told first has long looked then.
RESERVE_AFTER = 0.05


class Credit(Protocol):
    """What a channel's QoS says about how much it takes."""

    def can_consume(self) -> bool: ...

    def can_consume_max_estimate(self) -> int | None: ...

    def room_ahead(self, waiting: int, most: int) -> int: ...

    @property
    def idle(self) -> bool: ...

    @property
    def waits_for_slot(self) -> bool: ...

    @property
    def gathers_until(self) -> float: ...


class Consumer:
    """One ``basic_consume``: where messages of a queue go."""

    __slots__ = ("active", "credit", "declaration", "deliver", "no_ack", "queue")

    def __init__(
        self,
        queue: str,
        no_ack: bool,
        credit: Callable[[], Credit],
        deliver: Callable[[Claimed, Lease | None], None],
    ) -> None:
        self.queue = queue
        self.no_ack = no_ack
        self.credit = credit
        self.deliver = deliver
        self.active = True
        self.declaration: Declaration | None = None


class Consumers:
    """The consumers of one connection, by queue.

    Used by one thread at a time, except that a signal handler may :meth:`remove` at any moment.
    """

    def __init__(self) -> None:
        self._of: dict[str, list[Consumer]] = {}
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._of)

    def all(self) -> list[Consumer]:
        """Return all of them."""
        return list(itertools.chain.from_iterable(list(self._of.values())))

    def add(self, consumer: Consumer) -> None:
        """One more."""
        self._of[consumer.queue] = [*self._of.get(consumer.queue, ()), consumer]

    def remove(self, consumer: Consumer) -> bool:
        """One less; True if its queue has others."""
        left = [other for other in self._of.get(consumer.queue, ()) if other is not consumer]
        if left:
            self._of[consumer.queue] = left
        else:
            self._of.pop(consumer.queue, None)
        return bool(left)

    def want_more(self, queue: str) -> bool:
        """True if anybody takes more of `queue`."""
        return any(consumer.credit().can_consume() for consumer in self._of.get(queue, ()))

    def gather_until(self, queue: str) -> float:
        """Return until when (monotonic) all of `queue` would rather have more credit first."""
        consumers = [c for c in self._of.get(queue, ()) if c.credit().can_consume()]
        return min((consumer.credit().gathers_until for consumer in consumers), default=0.0)

    def took(self) -> None:
        """One has got something; now it is another one's turn."""
        self._turn += 1

    def taker(self, queue: str) -> Consumer | None:
        """Return a consumer of `queue` that takes more, whose turn it is."""
        consumers = self._of.get(queue, [])
        for n in range(len(consumers)):
            consumer = consumers[(self._turn + n) % len(consumers)]
            if consumer.active and consumer.credit().can_consume():
                return consumer
        return None


class Watch:
    """What is known about one queue."""

    __slots__ = (
        "busy_since",
        "channel",
        "cursor",
        "look_at",
        "promote_at",
        "promote_now",
        "queue",
        "seen_empty",
        "waits",
    )

    def __init__(self, queue: str, channel: str) -> None:
        self.queue = queue
        self.channel = channel
        self.cursor = ClaimCursor()
        self.look_at = 0.0  # monotonic time of the next look
        self.promote_at = 0.0  # … and of the next check for due messages, if busy
        self.promote_now = False
        self.seen_empty = False
        self.waits = True  # publishers are to tell us
        self.busy_since: float | None = None  # monotonic: there was always more than we took

    def busy(self, now: float) -> bool:
        """Note that there is more than is taken; True if publishers need not tell us any more."""
        if self.busy_since is None:
            self.busy_since = now
        changed = self.waits and now >= self.busy_since + BUSY_AFTER
        self.waits = self.waits and not changed
        return changed

    def rest(self, when: float) -> bool:
        """Do not look before `when`; True if publishers are to tell us again."""
        self.look_at = when
        if when <= monotonic():
            return False
        self.busy_since = None
        changed, self.waits = not self.waits, True
        return changed


class Watches(dict[str, Watch]):
    """The queues that one connection watches, by name, and what was announced of them.

    :meth:`announced` may be called by other threads at any moment.
    """

    def __init__(self) -> None:
        # Channels that something was announced on; True: look from the start.
        self._news: dict[str, bool] = {}
        # Those that only we were told of, until they were seen to be empty.
        self._unseen: dict[str, None] = {}
        # Channels to look at later (monotonic), in reserve.
        self._later: dict[str, float] = {}

    def announced(self, channels: Iterable[str], *, from_start: bool) -> None:
        """Something was published on `channels`, or has come back below what was passed."""
        for channel in channels:
            if from_start:
                self._news[channel] = True
            else:
                self._news.setdefault(channel, False)

    def named(self, channel: str, *, reserve: bool) -> None:
        """Something was published on `channel` that only one other was told of, in reserve."""
        if reserve:
            self._later[channel] = monotonic() + RESERVE_AFTER
        else:
            # In this order, so that a look that began before does not count.
            self._unseen[channel] = None
            self.announced([channel], from_start=False)

    def unseen(self, channel: str) -> bool:
        """True until the queue was seen to be empty after :meth:`named`."""
        return channel in self._news or channel in self._unseen

    def seen_empty(self, channel: str) -> None:
        """A look has found nothing more."""
        self._unseen.pop(channel, None)

    def absorb(self) -> None:
        """Have the queues looked at that something was announced of."""
        while self._later:
            channel, when = self._later.popitem()
            for watch in self.all():
                if watch.channel == channel:
                    watch.look_at = min(watch.look_at, when)
                    watch.seen_empty = False
        for channel in list(self._news):
            # Before it is taken, so that no look that began before counts.
            self._unseen[channel] = None
            from_start = self._news.pop(channel)
            for watch in self.all():
                if watch.channel == channel:
                    watch.look_at = 0.0
                    watch.seen_empty = False
                    if from_start:
                        watch.cursor.look_from_start()

    def all(self) -> list[Watch]:
        """Return them; a signal handler may remove one at any moment."""
        return list(self.values())

    def next_looks(self, consumers: Consumers) -> list[float]:
        """Return when (monotonic) which queue is to be looked at next."""
        times = []
        for watch in self.all():
            if consumers.want_more(watch.queue):
                times.append(max(watch.look_at, consumers.gather_until(watch.queue)))
            elif watch.waits and watch.busy_since is not None:
                # To say that it is busy.
                times.append(max(watch.look_at, watch.busy_since + BUSY_AFTER))
        return times

    def channels(self, *, waiting: bool = False) -> set[str]:
        """Return the channels of all queues, or of those that publishers are to tell of."""
        return {watch.channel for watch in self.all() if watch.waits or not waiting}


def in_order(watches: list[Watch], strategy: str, turn: int) -> list[Watch]:
    """Return the queues in the order in which to look at them.

    Arguments:
        strategy: of the option `queue_order_strategy`.
        turn: how often this was asked before, for round_robin.
    """
    if strategy == "sorted":
        return sorted(watches, key=lambda watch: watch.queue)
    if strategy == "round_robin" and watches:
        start = turn % len(watches)
        return watches[start:] + watches[:start]
    return watches
