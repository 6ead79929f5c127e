"""QoS: which messages a channel has in the consumer's hands, and under which lease."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from .errors import PgnotifyError
from .keeper import LeaseKeeper
from .leases import Lease, Outcome
from .messages import Claimed

if TYPE_CHECKING:
    from .channel import Channel, Message

logger = logging.getLogger(__name__)

#: Seconds after an acknowledgement within which others are likely, where less than half of the
#: prefetch limit is free: a pool of short tasks is then served by fewer, larger claims.  It is far
#: from running dry, and a free slot that no ack follows waits no longer than this.
GATHER = 0.002

#: Kept with a dead letter that a consumer rejected without requeue.
REJECTED = "rejected"

#: Kept with a dead letter that was delivered too often.
ATTEMPTS_USED_UP = "attempts used up"


class QoS:
    """Unacknowledged messages of one channel, by delivery tag.

    Not derived from kombu's: that one registers every channel for ever with the
    interpreter's exit, and restores messages by publishing copies.  Here a message stays
    in its row; leases belong to the process and outlive channel and connection.

    Settling is safe from any thread, after the channel was closed, and more than once.

    Arguments:
        channel: the channel.
        keeper: returns the keeper of the *current* process (a fork changes it).
        see_to: called after something was noted: sees that the server learns of it.
        credit_regained: called after a message was settled.
        free_slots: given the prefetch limit, tells how many more may come at once by
            another measure; None: it knows none.
    """

    def __init__(
        self,
        channel: Channel,
        keeper: Callable[[], LeaseKeeper],
        see_to: Callable[[LeaseKeeper], None],
        credit_regained: Callable[[], None],
        free_slots: Callable[[int], int | None] | None = None,
    ) -> None:
        self.channel = channel
        self.prefetch_count = 0
        self._keeper = keeper
        self._see_to = see_to
        self._credit_regained = credit_regained
        self._free_slots = free_slots
        self._settled_at = 0.0  # monotonic
        self._unacked: dict[str, tuple[Message, Lease]] = {}
        # Those that this channel no longer keeps alive, see let_go().
        self._let_go: dict[str, Lease] = {}

    def append(self, message: Message, lease: Lease) -> None:
        """Note that `message` is now in the consumer's hands."""
        self._unacked[message.delivery_tag] = (message, lease)

    def get(self, delivery_tag: str) -> Message:
        """Return an unacknowledged message.

        Raises:
            KeyError: it is none of this channel's.
        """
        return self._unacked[delivery_tag][0]

    def can_consume(self) -> bool:
        """True while the prefetch limit allows one more message."""
        return not self.prefetch_count or self._room > 0

    def can_consume_max_estimate(self) -> int | None:
        """How many more messages the prefetch limit allows; None: no limit."""
        return max(self._room, 0) if self.prefetch_count else None

    @property
    def waits_for_slot(self) -> bool:
        """True if only a free process is missing, which nobody announces."""
        return bool(self.prefetch_count) and self._credit > 0 >= self._room

    @property
    def idle(self) -> bool:
        """True if no message is in the consumer's hands."""
        return not (self._unacked or self._let_go)

    def room_ahead(self, waiting: int, most: int) -> int:
        """How many more messages may be claimed while others wait; 0: not worth a claim yet.

        Arguments:
            waiting: messages that were claimed and not delivered.
            most: how many it may be where there is no prefetch limit.
        """
        if self._free_slots:
            return 0
        limit = self.prefetch_count or most
        room = (self._credit if self.prefetch_count else most) - waiting
        return room if room * 2 >= limit else 0

    @property
    def gathers_until(self) -> float:
        """Until when (monotonic) it is better to wait for more credit than to claim."""
        if not self.prefetch_count or self._free_slots or self._credit * 2 >= self.prefetch_count:
            return 0.0
        return self._settled_at + GATHER

    @property
    def _credit(self) -> int:
        """How many more messages the prefetch limit itself allows."""
        return self.prefetch_count - len(self._unacked) - len(self._let_go)

    @property
    def _room(self) -> int:
        """How many more messages may come now."""
        slots = self._free_slots(self.prefetch_count) if self._free_slots else None
        return self._credit if slots is None else min(self._credit, slots)

    def ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message, or with `multiple` all up to it (AMQP 0-9-1, basic.ack)."""
        self._settle(self._tags(delivery_tag, multiple), Outcome.ACKNOWLEDGED)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give a message back to its place in the queue, or make it a dead letter."""
        if requeue:
            self._settle([delivery_tag], Outcome.REQUEUED)
        else:
            self._settle([delivery_tag], Outcome.DEAD_LETTERED, REJECTED)

    def bury(self, delivery_tag: str, reason: str) -> None:
        """Make a message a dead letter, unless it was settled before or has no lease."""
        if delivery_tag in self._unacked or delivery_tag in self._let_go:
            self._settle([delivery_tag], Outcome.DEAD_LETTERED, reason)

    def restore_unacked(self) -> None:
        """Requeue everything unacknowledged (AMQP 0-9-1, basic.recover)."""
        self._settle(self._tags("", multiple=True), Outcome.REQUEUED)

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Release what is still unacknowledged when the channel closes in good order."""
        if tags := self._tags("", multiple=True):
            logger.info("channel.close released=%d", len(tags))
            self._settle(tags, Outcome.RELEASED)

    def let_go(self) -> None:
        """Hold on to what is still being worked on, and only to that.

        For a lost connection, where the leases in the database were not lost, and for a
        worker that is shutting down.  A message that somebody still refers to (a running
        task) keeps its lease, and its tag still acknowledges it; one that dies
        unacknowledged (reserved, then dropped by Celery) is released at once.  Takes no
        lock and does no I/O, since it happens in signal handlers too.
        """
        keeper = self._keeper()
        for tag in list(self._unacked):
            message, lease = self._unacked.pop(tag)
            self._let_go[tag] = lease
            lease.watch = weakref.ref(message, functools.partial(self._forsaken, keeper, tag))
            del message

    def _forsaken(self, keeper: LeaseKeeper, tag: str, _: object) -> None:
        """Weakref callback: the message died; unless it was settled, give it back."""
        if (lease := self._let_go.pop(tag, None)) is not None:
            keeper.forsaken(lease)
            self._credit_regained()

    def _tags(self, delivery_tag: str, multiple: bool) -> list[str]:
        if not multiple:
            return [delivery_tag]
        tags = [*self._let_go, *self._unacked]
        if delivery_tag in tags:
            return tags[: tags.index(delivery_tag) + 1]
        # AMQP: tag zero means everything outstanding.
        return tags if delivery_tag in (0, "0", "") else []

    def _settle(self, tags: list[str], outcome: Outcome, reason: str = "") -> None:
        keeper = self._keeper()
        for tag in tags:
            entry = self._unacked.pop(tag, None)
            lease = entry[1] if entry else self._let_go.pop(tag, None)
            if lease is None:
                # Settled before, or the lease was lost and reported then.
                logger.debug("settle.unknown tag=%r outcome=%s", tag, outcome.value)
            else:
                keeper.settle(lease, outcome, reason)
        self._settled_at = monotonic()
        self._see_to(keeper)
        self._credit_regained()


def flush(keeper: LeaseKeeper) -> None:
    """Settle now; if the database is away the keeper's thread goes on trying."""
    try:
        keeper.flush()
    except PgnotifyError as exc:
        logger.warning("settle.delayed the keeper tries again: %s", exc)


def discarded(
    keeper: LeaseKeeper, row: Claimed, lease: Lease | None, max_attempts: int | None
) -> bool:
    """Note a message that nobody may get any more: it is too old, or was delivered too often.

    The caller flushes.
    """
    if lease is None or not keeper.holds(lease):
        return False
    if row.expired:
        keeper.settle(lease, Outcome.EXPIRED)
    elif max_attempts is not None and row.attempts > max_attempts:
        logger.error(
            "message.dead_lettered task_id=%d queue=%r: %s (%d)",
            row.task_id,
            lease.queue,
            ATTEMPTS_USED_UP,
            max_attempts,
        )
        keeper.settle(lease, Outcome.DEAD_LETTERED, ATTEMPTS_USED_UP)
    else:
        return False
    return True
