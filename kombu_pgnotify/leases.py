"""Leases: one message that this process holds, and how that ends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from .messages import Claimed, Fence

logger = logging.getLogger(__name__)


class Outcome(Enum):
    """How a delivery ends."""

    ACKNOWLEDGED = "acknowledged"
    #: Given back without having been started: not an attempt.
    RELEASED = "released"
    #: Given back by the consumer that had it: an attempt.
    REQUEUED = "requeued"
    DEAD_LETTERED = "dead-lettered"
    #: It had outlived its time when it was claimed.
    EXPIRED = "expired"


class Lease:
    """One message that this process holds.

    Attributes:
        fence: names the delivery.
        queue: where it came from and goes back to.
        published: when the message was published, see :class:`Claimed`.
        renewed_at: monotonic time the lease was got or renewed.
        tried: the consumer raised: however it goes back, this was an attempt.
        watch: a weak reference kept alive by the lease, see :meth:`QoS.let_go`.
    """

    __slots__ = ("fence", "published", "queue", "renewed_at", "tried", "watch")

    def __init__(self, row: Claimed, queue_name: str, renewed_at: float) -> None:
        self.fence = Fence(row.task_id, row.delivery)
        self.published = row.published
        self.queue = queue_name
        self.renewed_at = renewed_at
        self.tried = False
        self.watch: object = None


class Settlement(NamedTuple):
    """A delivery that has ended, and that the server is to be told of."""

    lease: Lease
    outcome: Outcome
    reason: str
    since: float
    #: It was sent before, and the answer never came.
    doubtful: bool = False

    def in_doubt(self) -> Settlement:
        """Return it as one that the server may have carried out already."""
        return self._replace(doubtful=True)

    def log_missed(self) -> None:
        """The server has found nothing to settle."""
        if self.doubtful:
            logger.info(
                "settle.unconfirmed task_id=%d queue=%r: %s before the answer was lost, or its"
                " lease was lost since",
                self.lease.fence.task_id,
                self.lease.queue,
                self.outcome.value,
            )
        else:
            log_lost(self.lease, f"it was not {self.outcome.value}")


class Outbox(deque[Settlement]):
    """What the server is to be told of, in order; any thread may append at any moment."""

    def take_acks(self) -> list[Settlement]:
        """Take the acknowledgements at the head, to be told together."""
        items: list[Settlement] = []
        while self and self[0].outcome is Outcome.ACKNOWLEDGED:
            items.append(self.popleft())
        return items

    def take(self, most: int) -> list[Settlement]:
        """Take what is at the head; a signal handler may do so in the middle of it."""
        items: list[Settlement] = []
        try:
            while len(items) < most:
                items.append(self.popleft())
        except IndexError:
            pass  # it is empty now
        return items

    def put_back(self, items: Iterable[Settlement]) -> None:
        """The server's answer never came: it may have carried them out or not."""
        self.extendleft(item.in_doubt() for item in reversed(list(items)))


def log_lost(lease: Lease, consequence: str) -> None:
    """Somebody else has the message by now."""
    logger.warning(
        "lease.lost task_id=%d delivery=%d queue=%r: %s",
        lease.fence.task_id,
        lease.fence.delivery,
        lease.queue,
        consequence,
    )
