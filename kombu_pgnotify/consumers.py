"""Consumers: where the messages of a queue go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .housekeeper import Declaration
from .keeper import Lease
from .store import Claimed


class Credit(Protocol):
    """What a channel's QoS says about how much it takes."""

    def can_consume(self) -> bool: ...

    def can_consume_max_estimate(self) -> int | None: ...


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
