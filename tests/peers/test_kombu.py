"""kombu's own integration tests, unrewritten: what each of its transports inherits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kombu
import pytest
from integration import common


class DrainsAll(kombu.Connection):
    """Delivers all that is ready in one call, as pyamqp does and the priority tests expect.

    kombu's virtual transports, and so ours, deliver one message a call.
    """

    def drain_events(self, timeout: float | None = None, **kwargs: Any) -> None:
        super().drain_events(timeout=timeout, **kwargs)
        while True:
            try:
                super().drain_events(timeout=0, **kwargs)
            except TimeoutError:
                return


class TestBasicFunctionality(common.BasicFunctionality):
    def test_failed_connection_is_retried(self, invalid_connection: kombu.Connection) -> None:
        """Of all errors Celery retries only these. kombu's Redis module asserts the same."""
        with pytest.raises(invalid_connection.transport.connection_errors):
            invalid_connection.connect()


class TestExchangeTypes(common.BaseExchangeTypes):
    pass


class TestMessage(common.BaseMessage):
    pass


class TestTimeToLive(common.BaseTimeToLive):
    pass


class TestPriority(common.BasePriority):
    PRIORITY_ORDER = "asc"  # as AMQP: 9 before 0

    @pytest.fixture
    def connection(self, broker_url: str) -> Iterator[kombu.Connection]:
        with DrainsAll(broker_url) as made:
            yield made


class TestFailover(common.BaseFailover):
    pass


class TestEventLoop(common.BaseEventLoop):
    pass
