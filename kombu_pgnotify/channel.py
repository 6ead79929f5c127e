"""Channel: kombu's verbs, carried out by the store."""

from __future__ import annotations

import logging
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any

from kombu.exceptions import SerializationError, SerializerNotInstalled
from kombu.transport import virtual

from . import envelopes
from .celery.worker import free_slots, misshapen, survives
from .claims import ClaimCursor
from .consumers import Consumer
from .keeper import LeaseKeeper
from .leases import Lease, Outcome
from .messages import Claimed
from .qos import QoS, discarded, flush
from .routing import RoutingChannel

if TYPE_CHECKING:
    from .transport import Transport

logger = logging.getLogger(__name__)

#: Kept with a dead letter whose envelope cannot be read.
UNREADABLE = "unreadable"

#: Kept with a dead letter that Celery's worker could not make a task of, and the error with it.
NO_TASK = "no task"

#: What code raises that was given data of another shape than it expects.
DATA_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    SerializationError,
    SerializerNotInstalled,
)

#: Characters of an error kept as a reason.
_REASON_LENGTH = 200


class Message(virtual.Message):
    """A delivered message; weakly referenceable, see :meth:`QoS.let_go`."""


class Channel(RoutingChannel):
    """One kombu channel.

    After :meth:`close` messages can still be acknowledged and rejected: their leases
    belong to the process, not to the channel.
    """

    Message: type[Message] = Message

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._consumer_of: dict[str, Consumer] = {}
        self._qos = QoS(
            self,
            keeper=self._keeper,
            see_to=connection.see_to_settling,
            credit_regained=connection.credit_regained,
            free_slots=free_slots if connection.disables_prefetch else None,
        )

    # -- consuming

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        """Start a consumer of `queue`."""
        name = self.full_name(queue)

        def deliver(row: Claimed, lease: Lease | None) -> None:
            message = self._receive(row, name, lease)
            if message is None:
                return
            try:
                if (what := misshapen(message.headers)) and survives(callback):
                    raise ValueError(what)
                callback(message)
            except Exception as exc:
                if isinstance(exc, DATA_ERRORS) and survives(callback):
                    self._give_up(message, row, name, exc)
                    return
                if lease is not None:
                    # Should it go back now, it has been tried: max_attempts must count it.
                    lease.tried = True
                raise

        consumer = Consumer(name, no_ack, lambda: self.qos, deliver)
        self._consumer_of[consumer_tag] = consumer
        self._consumers.add(consumer_tag)
        self._transport.consumption.add(consumer)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop a consumer; no I/O and no lock, since signal handlers call it."""
        self._consumers.discard(consumer_tag)
        consumer = self._consumer_of.pop(consumer_tag, None)
        if consumer is not None:
            self._transport.cancel(consumer)
        if not self._consumers and self._transport.in_event_loop:
            # A worker that shuts down forgets what it has not started: let others have it
            # now, not when the last running task has ended.  Only in an event loop, whose
            # users keep their messages: others may keep no more than a tag.
            self.qos.let_go()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> virtual.Message | None:
        """Fetch one message directly; None if there is none."""
        name = self.full_name(queue)
        self.broker.housekeeper.used(name)
        try:
            row, lease = self._get_row(name, no_ack)
        except Empty:
            return None
        return self._receive(row, name, lease)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message, or all delivered up to it."""
        self.qos.ack(delivery_tag, multiple)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        row, _ = self._get_row(self.full_name(queue), no_ack=True)
        return envelopes.unpack(row, self.broker.options.queue_name_prefix)

    def _get_row(self, name: str, no_ack: bool) -> tuple[Claimed, Lease | None]:
        """Get one message of the queue that is called `name` in the database.

        Raises:
            queue.Empty: there is none.
        """
        broker = self.broker
        broker.store.promote(name)
        everything = ClaimCursor().next_ranges(0)
        while True:
            leases: list[Lease] = []
            if no_ack:
                rows = broker.store.take(name, everything, 1)
            else:
                claiming = broker.store.claiming(name, everything, 1, broker.worker)
                rows, leases = broker.keeper.claim(name, claiming, monotonic())
            if not rows:
                raise Empty
            row, lease = rows[0], leases[0] if leases else None
            if lease is not None and not broker.keeper.holds(lease):
                continue
            if not discarded(broker.keeper, row, lease, broker.options.max_attempts):
                return row, lease
            flush(broker.keeper)

    def _receive(self, row: Claimed, queue: str, lease: Lease | None) -> virtual.Message | None:
        """Make a Message of a claimed row; a row that cannot be one becomes a dead letter."""
        try:
            message = self._message(row)
        except envelopes.Unreadable as exc:
            logger.error("message.unreadable task_id=%d queue=%r: %s", row.task_id, queue, exc)
            if lease is not None:
                self.broker.keeper.settle(lease, Outcome.DEAD_LETTERED, UNREADABLE)
                flush(self.broker.keeper)
            return None
        if lease is not None:
            self.qos.append(message, lease)
        return message

    def _give_up(self, message: virtual.Message, row: Claimed, queue: str, exc: Exception) -> None:
        """Put away what a worker cannot make a task of; without a lease it is gone already."""
        logger.exception("message.no_task task_id=%d queue=%r", row.task_id, queue)
        error = f"{type(exc).__name__}: {exc}".replace("\0", "\\0")
        self.qos.bury(message.delivery_tag, f"{NO_TASK}: {error[:_REASON_LENGTH]}")

    def _message(self, row: Claimed) -> virtual.Message:
        raw = envelopes.unpack(row, self.broker.options.queue_name_prefix)
        try:
            return self.Message(raw, channel=self)
        except Exception as exc:
            raise envelopes.Unreadable(f"{type(exc).__name__}: {exc}") from exc

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        """Deliver one message of this connection.

        Raises:
            queue.Empty: there is none.
        """
        if not self._transport.consumption.deliver_one(one_by_one=True):
            raise Empty

    # -- the end

    def close(self, *, lost: bool = False) -> None:
        """Close the channel.

        Arguments:
            lost: because the connection was lost; keep the leases of messages that are
                still being worked on, instead of releasing all.
        """
        if self.closed:
            return
        self.closed = True
        for consumer_tag in list(self._consumers):
            self.basic_cancel(consumer_tag)
        if lost:
            self.qos.let_go()
        else:
            self.qos.restore_unacked_once()
        if self.connection is not None:
            self.connection.close_channel(self)
        self.exchange_types: Any = None

    def _keeper(self) -> LeaseKeeper:
        return self.broker.keeper
