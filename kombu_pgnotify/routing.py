"""The publishing side of a channel: exchanges, queues, bindings, and messages on their way in."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import UndeliverableWarning
from kombu.utils.uuid import uuid

from . import envelopes
from .batches import PublishBatch
from .broker import Broker
from .celery.worker import is_workers_event
from .errors import ConfigurationError, DatabaseUnavailable
from .messages import Outgoing, Routed
from .topology import EXCHANGE_TYPES, Queue

if TYPE_CHECKING:
    from .transport import Transport

logger = logging.getLogger(__name__)

#: Where a declaration stops counting what is in the queue; a passive one counts all.
DECLARE_COUNTS_TO = 1000

#: Exchanges that are there without having been declared (AMQP 0-9-1, 3.1.3.1).
PREDECLARED = {f"amq.{kind}": kind for kind in EXCHANGE_TYPES}

#: AMQP's delivery mode of a message that need not survive a crash of the server.
_TRANSIENT = 1

#: Milliseconds in AMQP's ``expiration``.
_MILLISECONDS = 1000.0

#: No message lasts longer: seconds, a hundred years.
_FOR_EVER = 3.2e9


class RoutingChannel(virtual.Channel):
    """kombu's verbs for exchanges, queues, bindings and publishing, carried out in the tables."""

    #: None: a body is kept as it is, text or bytes, without base64.
    body_encoding: Any = None
    max_priority = 255
    supports_fanout = True

    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._transport = connection

    @property
    def broker(self) -> Broker:
        """The current process's broker."""
        return self._transport.broker

    def full_name(self, name: str) -> str:
        """Return how a queue or an exchange is called in the database."""
        return self.broker.options.queue_name_prefix + name

    def _own_name(self, full_name: str) -> str | None:
        """Undo :meth:`full_name`; None: it is another application's."""
        prefix = self.broker.options.queue_name_prefix
        return full_name[len(prefix) :] if full_name.startswith(prefix) else None

    # -- publishing

    def basic_publish(
        self, message: dict[str, Any] | str | bytes, exchange: str, routing_key: str, **kwargs: Any
    ) -> None:
        """Publish a message; it is committed when this returns.

        Raises:
            ChannelError: it is persistent, and nothing at all is bound to its durable direct
                exchange: it would be lost silently.
        """
        if isinstance(message, (str, bytes)):
            # ``celery amqp basic.publish`` hands over the text alone.
            text: Any = message
            message = dict(self.prepare_message(text, content_type="text/plain"))
        outgoing = self.prepare(message, exchange, routing_key)
        store = self.broker.store
        if exchange and is_workers_event(exchange):
            self._publish_event(exchange, routing_key, outgoing)
        elif exchange:
            routed = store.publish_routed(self.full_name(exchange), routing_key, outgoing)
            self.check_routed(routed, exchange, routing_key, outgoing)
        else:
            store.publish(self.full_name(routing_key), outgoing)

    def _publish_event(self, exchange: str, routing_key: str, event: Outgoing) -> None:
        """Publish a worker's event, at most once.

        Celery would try without end, in the thread of its event loop: the worker would stand
        still while the server is away, and its consumer never come to give up.
        """
        broker = self.broker
        if broker.interrupted:
            return
        try:
            broker.store.publish_routed(self.full_name(exchange), routing_key, event)
        except DatabaseUnavailable as exc:
            # A process of the pool consumes nothing: its task may well wait.
            if not (broker.options.outage_tolerance and broker.housekeeper.consuming):
                raise
            logger.info("event.dropped routing_key=%r: %s", routing_key, exc)

    def prepare(self, message: dict[str, Any], exchange: str, routing_key: str) -> Outgoing:
        """Complete a kombu message and make of it what the store takes."""
        self._inplace_augment_message(message, exchange, routing_key)
        return self._outgoing(message)

    def check_routed(
        self, routed: Routed, exchange: str, routing_key: str, outgoing: Outgoing
    ) -> None:
        """Do what is to be done about a message that no queue has received."""
        if routed.queues or routed.live:
            return
        fallback: str | None = self.deadletter_queue
        if fallback is not None:
            text = f"no queue for exchange {exchange!r} and routing key {routing_key!r}"
            warnings.warn(UndeliverableWarning(text), stacklevel=3)
            self._new_queue(fallback)
            self.broker.store.publish(self.full_name(fallback), outgoing)
        elif routed.unbound and outgoing.persistent:
            raise ChannelError(
                f"NO_ROUTE - nothing is bound to the durable direct exchange {exchange!r}: "
                f"declare the queue that is to get {routing_key!r} before publishing",
                (60, 40),
                "Channel.basic_publish",
                "312",
            )

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Begin a batch, see :meth:`kombu.Producer.batch`."""
        return PublishBatch(self, max_size)

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

    def _outgoing(self, message: dict[str, Any]) -> Outgoing:
        envelope, payload = envelopes.pack(message)
        return Outgoing(
            envelope,
            payload,
            self._get_message_priority(message),
            self._held_until(message["headers"]),
            self._lasting(message),
            message["properties"].get("delivery_mode") != _TRANSIENT,
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

    def _lasting(self, message: dict[str, Any]) -> float | None:
        """Return after how many seconds nobody may get the message; None: never."""
        expiration = message["properties"].get("expiration")
        if expiration is None:
            return None
        headers = message["headers"]
        is_task = "task" in headers and headers.get("expires") is not None
        if is_task and self.broker.options.expired_tasks == "deliver":
            # The worker that gets it records the task as revoked.
            return None
        try:
            seconds = float(expiration) / _MILLISECONDS
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"a message's expiration must be milliseconds, not {expiration!r}"
            ) from None
        return seconds if 0 <= seconds < _FOR_EVER else None

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self.broker.store.publish(self.full_name(queue), self._outgoing(message))

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None:
        outgoing = self._outgoing(message)
        self.broker.store.publish_routed(self.full_name(exchange), routing_key, outgoing)

    # -- exchanges

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str | None = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Declare an exchange; if it was declared otherwise, that is replaced.

        Raises:
            ChannelError: passive, and there is none; or an unknown type.
        """
        kind = type or "direct"
        name = exchange or f"amq.{kind}"
        topology = self.broker.topology
        if passive:
            if topology.exchange_type(self.full_name(name)) is None:
                raise _not_found("exchange", name, (40, 10), "Channel.exchange_declare")
            return
        if kind not in EXCHANGE_TYPES:
            raise ChannelError(
                f"COMMAND_INVALID - exchange {name!r} has type {kind!r}, "
                f"known are {', '.join(EXCHANGE_TYPES)}",
                (40, 10),
                "Channel.exchange_declare",
                "503",
            )
        topology.declare_exchange(self.full_name(name), kind, durable=durable)
        self.broker.housekeeper.exchange_declared(self.full_name(name), kind, durable=durable)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings; queues stay."""
        self.broker.topology.delete_exchange(self.full_name(exchange), if_unused=if_unused)

    def get_exchanges(self) -> list[str]:
        """Return the names of the exchanges."""
        names = map(self._own_name, self.broker.topology.exchanges())
        return [name for name in names if name is not None]

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """Return the type of an exchange, looked up in the database."""
        found = self.broker.topology.exchange_type(self.full_name(exchange))
        return self.exchange_types[found or default]

    def get_table(self, exchange: str) -> list[tuple[str, None, str]]:
        """Return ``(routing key, None, queue)`` of an exchange's bindings."""
        return [(key, None, queue) for queue, name, key in self.list_bindings() if name == exchange]

    # -- queues

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        """Translate ``expires``, ``message_ttl`` … into RabbitMQ's argument names."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(
        self, queue: str | None = None, passive: bool = False, **kwargs: Any
    ) -> queue_declare_ok_t:
        """Declare a queue; a passive declaration counts exactly, others up to 1000.

        Raises:
            ChannelError: passive, and there is none.
            ConfigurationError: an argument that cannot be.
        """
        queue = queue or f"amq.gen-{uuid()}"
        full_name, store = self.full_name(queue), self.broker.store
        if passive:
            if not self.broker.topology.has_queue(full_name):
                raise _not_found("queue", queue, (50, 10), "Channel.queue_declare")
            return queue_declare_ok_t(queue, store.size(full_name), 0)
        self._new_queue(queue, **kwargs)
        return queue_declare_ok_t(queue, store.size(full_name, DECLARE_COUNTS_TO), 0)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> int:
        """Delete a queue, its bindings and the messages nobody holds; return how many."""
        full_name = self.full_name(queue)
        if if_empty and self.broker.store.size(full_name, 1):
            return 0
        self.broker.housekeeper.deleted(full_name)
        self.broker.topology.delete_queue(full_name)
        return self.broker.store.purge(full_name)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str | None = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        """Bind a queue to an exchange.

        Raises:
            ChannelError: one of them is not declared.
        """
        name, key = exchange or "amq.direct", routing_key or ""
        full_queue, full_exchange = self.full_name(queue), self.full_name(name)
        topology = self.broker.topology
        has_queue, has_exchange = topology.bind(full_queue, full_exchange, key)
        if not has_exchange and (kind := PREDECLARED.get(name)):
            # In this application's namespace it was not.
            topology.declare_exchange(full_exchange, kind, durable=True)
            has_queue, has_exchange = topology.bind(full_queue, full_exchange, key)
        if not has_exchange:
            raise _not_found("exchange", name, (50, 20), "Channel.queue_bind")
        if not has_queue:
            raise _not_found("queue", queue, (50, 20), "Channel.queue_bind")
        self.broker.housekeeper.bound(full_queue, full_exchange, key)

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str | None = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        """Remove a binding, if there is one."""
        full_queue = self.full_name(queue)
        full_exchange = self.full_name(exchange or "amq.direct")
        # Forgotten first, so that it is not taken for lost in between.
        self.broker.housekeeper.unbound(full_queue, full_exchange, routing_key or "")
        self.broker.topology.unbind(full_queue, full_exchange, routing_key or "")

    def list_bindings(self) -> list[tuple[str, str, str]]:
        """Return ``(queue, exchange, routing key)`` of every binding."""
        found = []
        for queue, exchange, key in self.broker.topology.bindings():
            own_queue, own_exchange = self._own_name(queue), self._own_name(exchange)
            if own_queue is not None and own_exchange is not None:
                found.append((own_queue, own_exchange, key))
        return found

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        declared = Queue.declared(
            self.full_name(queue),
            kwargs.get("arguments"),
            durable=kwargs.get("durable", True),
            exclusive=kwargs.get("exclusive", False),
            auto_delete=kwargs.get("auto_delete", False),
        )
        declared = replace(declared, name_prefix=self.broker.options.queue_name_prefix)
        if declared.dead_letter_exchange:
            full_name = self.full_name(declared.dead_letter_exchange)
            declared = replace(declared, dead_letter_exchange=full_name)
        self.broker.housekeeper.declare(declared)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.broker.topology.has_queue(self.full_name(queue))

    def _purge(self, queue: str) -> int:
        return self.broker.store.purge(self.full_name(queue))

    def _size(self, queue: str) -> int:
        return self.broker.store.size(self.full_name(queue))


def _not_found(kind: str, name: str, method_sig: tuple[int, int], method: str) -> ChannelError:
    return ChannelError(f"NOT_FOUND - no {kind} {name!r}", method_sig, method, "404")
