"""Signals become exceptions, so that whatever ends the demo, it tidies up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: ^C, `kill`, and a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Raises KeyboardInterrupt for ^C and SystemExit for the others, in the main thread.

    While `held`, the first one waits: cutting a process start in two would leave a process
    that nobody knows of. The second one does not wait, since the user means it.

    Python drops what is raised while it runs a ``__del__`` or a weak reference's callback: loops
    ask :meth:`check`, so that no signal is lost there.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._waiting: int | None = None
        self._raised: int | None = None

    def install(self) -> None:
        """Take over the signals, except those somebody has told us to ignore, as nohup does."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the first signal wait until the end of the block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._waiting is not None:
                number, self._waiting = self._waiting, None
                self._raise(number)

    def check(self) -> None:
        """Raise once more for a signal whose exception has not ended the caller."""
        if self._raised is not None:
            self._raise(self._raised)

    def _handle(self, number: int, frame: object) -> None:
        if self._depth and self._waiting is None:
            self._waiting = number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._raised = number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)  # what a shell reports for a process the signal has ended
