"""Publish batches: kombu's ``producer.batch()`` as one transaction a flush."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # kombu before 5.7 has no batches
    from kombu.exceptions import KombuError as BatchPublishError  # type: ignore[assignment]

from .messages import Outgoing

if TYPE_CHECKING:
    from .routing import RoutingChannel


class PublishBatch:
    """Messages that are written together: all of a flush, or none.

    Arguments:
        channel: where they are published.
        max_size: messages after which the batch flushes by itself.
    """

    def __init__(self, channel: RoutingChannel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[tuple[str, str, Outgoing]] = []
        self._failed: BaseException | None = None
        self._state = "open"

    def publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> None:
        """Add a message."""
        self._check_usable()
        outgoing = self.channel.prepare(message, exchange, routing_key)
        self._waiting.append((exchange, routing_key, outgoing))
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last flush.

        Raises:
            BatchPublishError: it was refused, or nobody knows; the batch is of no more use.
            ChannelError: all was written but what no queue gets, see
                :meth:`RoutingChannel.basic_publish`.
        """
        self._check_usable()
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        channel = self.channel
        items = [
            (channel.full_name(exchange), key, outgoing)
            if exchange
            else ("", channel.full_name(key), outgoing)
            for exchange, key, outgoing in waiting
        ]
        try:
            routed = channel.broker.store.publish_batch(items)
        except BaseException as exc:
            self._failed = exc
            if isinstance(exc, Exception):
                raise BatchPublishError(
                    f"publishing a batch of {len(items)} failed, all were written or none: {exc}"
                ) from exc
            raise
        for (exchange, key, outgoing), where in zip(waiting, routed, strict=True):
            if where is not None:
                channel.check_routed(where, exchange, key, outgoing)

    def discard(self) -> None:
        """Forget what was not flushed."""
        self._waiting.clear()
        self._state = "aborted"

    def close(self) -> None:
        """End the batch without flushing."""
        self._waiting.clear()
        self._state = "closed"

    def _check_usable(self) -> None:
        if self._state != "open":
            raise RuntimeError(f"the publish batch is {self._state}")
        if self._failed is not None:
            raise BatchPublishError("an earlier flush of this batch failed") from self._failed
