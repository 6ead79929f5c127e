"""Signals that end the demo are not lost, wherever they come."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kombu_pgnotify.demo.signals import SIGNALS, Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    # The run itself may be in the background, where a shell has them ignored.
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    signals = Signals()
    signals.install()
    yield signals
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Deaf:
    """Python drops what is raised while it is deleted."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)
        raise AssertionError("the handler raises")


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_was_dropped_is_raised_again(
    signals: Signals, number: int, error: type[BaseException]
) -> None:
    signals.check()
    Deaf(number)
    with pytest.raises(error):
        signals.check()
