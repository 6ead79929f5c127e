"""What several tests need and no fixture gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL = 0.02  # seconds between two looks


def wait_until(
    condition: Callable[[], T], timeout: float = 20, message: str | Callable[[], str] = ""
) -> T:
    """Wait until the condition gives something true and return that; else fail with the message.

    A message that costs something, like the end of a log file, can be a function.
    """
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > deadline:
            text = message if isinstance(message, str) else message()
            raise AssertionError(text or f"{condition} is still not true after {timeout} s")
        time.sleep(POLL_INTERVAL)
    return result
