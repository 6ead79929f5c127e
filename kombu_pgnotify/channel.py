"""Channel: kombu's verbs, carried out by the store."""

from __future__ import annotations

import logging
from datetime import datetime
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any

from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from . import envelopes
from .broker import Broker
from .claims import ClaimCursor
from .consumption import Consumer
from .keeper import Lease, LeaseKeeper, Outcome
from .qos import QoS, flush
from .store import Claimed

if TYPE_CHECKING:
    from .transport import Transport

logger = logging.getLogger(__name__)

#: Where a declaration stops counting what is in the queue; a passive one counts all.
DECLARE_COUNTS_TO = 1000

#: Kept with a dead letter whose envelope cannot be read.
UNREADABLE = "unreadable"


class Message(virtual.Message):
    """A delivered message; weakly referenceable, see :meth:`QoS.let_go`."""


class Channel(virtual.Channel):
    """One kombu channel.

    After :meth:`close` messages can still be acknowledged and rejected: their leases
    belong to the process, not to the channel.
    """

    Message: type[Message] = Message

    #: None: a body is kept as it is, text or bytes, without base64.
    body_encoding: Any = None
    max_priority = 255

    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._transport = connection
        self._consumer_of: dict[str, Consumer] = {}
        self._qos = QoS(
            self,
            keeper=self._keeper,
            settle_later=connection.settles_soon,
            credit_regained=connection.credit_regained,
        )

    @property
    def broker(self) -> Broker:
        """The current process's broker."""
        return self._transport.broker

    # -- publishing

    def _inplace_augment_message(
        self, message: dict[str, Any], exchange: str, routing_key: str
    ) -> None:
        properties = message["properties"]
        message["body"], properties["body_encoding"] = self.encode_body(
            message["body"], self.body_encoding
        )
        # The delivery tag is made anew for every delivery.
        properties["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str]:
        """Leave text and bytes alone unless an encoding is asked for."""
        if encoding is None:
            return body, envelopes.TEXT if isinstance(body, str) else envelopes.BINARY
        return super().encode_body(body, encoding)  # type: ignore[no-any-return]

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        """Undo :meth:`encode_body`."""
        if encoding in (None, envelopes.TEXT, envelopes.BINARY):
            return body
        return super().decode_body(body, encoding)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        envelope, payload = envelopes.pack(message)
        self.broker.store.publish(
            queue,
            envelope,
            payload,
            priority=self._get_message_priority(message),
            available_at=self._held_until(message["headers"]),
        )

    def _held_until(self, headers: dict[str, Any]) -> str | None:
        """Return the ETA of a Celery task (protocol 2) that the table is to hold."""
        eta = headers.get("eta")
        if not eta or "task" not in headers or not self.broker.options.eta_in_broker:
            return None
        try:
            when = datetime.fromisoformat(str(eta).replace("Z", "+00:00"))
        except ValueError:
            # Not Celery's format: the worker makes of it what it can.
            return None
        return when.isoformat() if when.tzinfo is not None else None

    # -- consuming

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        """Start a consumer of `queue`."""

        def deliver(row: Claimed, lease: Lease | None) -> None:
            message = self._receive(row, queue, lease)
            if message is None:
                return
            try:
                callback(message)
            except Exception:
                if lease is not None:
                    # Should it go back now, it has been tried: max_attempts must count it.
                    lease.tried = True
                raise

        consumer = Consumer(queue, no_ack, lambda: self.qos, deliver)
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
        try:
            row, lease = self._get_row(queue, no_ack)
        except Empty:
            return None
        return self._receive(row, queue, lease)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message, or all delivered up to it."""
        self.qos.ack(delivery_tag, multiple)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        row, _ = self._get_row(queue, no_ack=True)
        return envelopes.unpack(row)

    def _get_row(self, queue: str, no_ack: bool) -> tuple[Claimed, Lease | None]:
        broker = self.broker
        broker.store.promote(queue)
        everything = ClaimCursor().next_ranges(0)
        if no_ack:
            rows = broker.store.take(queue, everything, 1)
            leases: list[Lease | None] = [None]
        else:
            started = monotonic()
            rows = broker.store.claim(queue, everything, 1, broker.worker)
            leases = [*broker.keeper.hold(queue, rows, started)]
        if not rows:
            raise Empty
        return rows[0], leases[0]

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

    def _message(self, row: Claimed) -> virtual.Message:
        raw = envelopes.unpack(row)
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

    # -- queues

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        """Translate ``expires``, ``message_ttl`` … into RabbitMQ's argument names."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(
        self, queue: str | None = None, passive: bool = False, **kwargs: Any
    ) -> queue_declare_ok_t:
        """Declare a queue; a passive declaration counts exactly, others up to 1000."""
        queue = queue or f"amq.gen-{uuid()}"
        self._new_queue(queue, **kwargs)
        store = self.broker.store
        size = store.size(queue) if passive else store.size(queue, DECLARE_COUNTS_TO)
        return queue_declare_ok_t(queue, size, 0)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> int:
        """Delete the messages nobody holds and forget the bindings; return how many."""
        if if_empty and self.broker.store.size(queue, 1):
            return 0
        deleted = self._purge(queue)
        self.state.queue_bindings_delete(queue)
        for exchange in self.state.exchanges.values():
            exchange["table"] = [meta for meta in exchange["table"] if meta[-1] != queue]
        return deleted

    def queue_bind(self, queue: str, exchange: str | None = None, *args: Any, **kw: Any) -> None:
        """Bind `queue` to `exchange`.

        Raises:
            ChannelError: the exchange is not declared.
        """
        name = exchange or "amq.direct"
        if name not in self.state.exchanges:
            raise ChannelError(
                f"NOT_FOUND - no exchange {name!r}", (50, 20), "Channel.queue_bind", "404"
            )
        super().queue_bind(queue, exchange, *args, **kw)

    def _purge(self, queue: str) -> int:
        return self.broker.store.purge(queue)

    def _size(self, queue: str) -> int:
        return self.broker.store.size(queue)

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
