"""Consumers: where the messages of a queue go, and what is known about the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .claims import ClaimCursor
from .housekeeper import Declaration
from .leases import Lease
from .messages import Claimed


class Credit(Protocol):
    """What a channel's QoS says about how much it takes."""

    def can_consume(self) -> bool: ...

    def can_consume_max_estimate(self) -> int | None: ...

    @property
    def waits_for_slot(self) -> bool: ...


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


class Watch:
    """What is known about one queue."""

    __slots__ = ("channel", "cursor", "look_at", "promote_at", "promote_now", "queue", "seen_empty")

    def __init__(self, queue: str, channel: str) -> None:
        self.queue = queue
        self.channel = channel
        self.cursor = ClaimCursor()
        self.look_at = 0.0  # monotonic time of the next look
        self.promote_at = 0.0  # … and of the next check for due messages, if busy
        self.promote_now = False
        self.seen_empty = False


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
