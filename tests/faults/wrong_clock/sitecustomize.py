"""Python imports this at its start, from PYTHONPATH: sets the process's clock wrong."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

SECONDS = float(os.environ["TEST_CLOCK_WRONG_BY"])

_time, _datetime = time.time, datetime.datetime


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _datetime)


class _Wrong(_datetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _datetime.now(tz) + datetime.timedelta(seconds=SECONDS)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


time.time = lambda: _time() + SECONDS
datetime.datetime = _Wrong  # type: ignore[misc]
