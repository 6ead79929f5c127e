"""Waker: how another thread ends a consumer's wait."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Sequence

#: One read empties the socket: wake() is a single byte and rarely piles up.
_DRAIN_BYTES = 4096


# select.poll is looked up at call time, so that gevent's and eventlet's cooperative
# versions are used where they have replaced it.


def wait_ready(fd: int, timeout: float | None, *, writable: bool = False) -> bool:
    """Wait until `fd` can be read (or written too, with `writable`).

    Arguments:
        timeout: seconds; None waits for ever, 0 only looks.
    """
    if timeout is not None:
        timeout = max(0.0, timeout)
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(fd, select.POLLIN | (select.POLLOUT if writable else 0))
        return bool(poller.poll(_milliseconds(timeout)))
    ready = select.select([fd], [fd] if writable else [], [], timeout)
    return bool(ready[0] or ready[1])


def _milliseconds(timeout: float | None) -> int | None:
    """Rounded up: a wait cut to 0 ms would spin until the time is over."""
    return None if timeout is None else math.ceil(timeout * 1000)


def wait_any(fds: Sequence[int], timeout: float) -> None:
    """Wait until one of `fds` can be read, at most `timeout` seconds."""
    timeout = max(0.0, timeout)
    if hasattr(select, "poll"):
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        poller.poll(_milliseconds(timeout))
    else:
        select.select(fds, [], [], timeout)


class Waker:
    """A socket that becomes readable when somebody calls :meth:`wake`.

    One end goes into kombu's hub (``fileno``) or into :meth:`wait`; any
    thread, signal handler or weakref callback may call :meth:`wake`, since
    it takes no lock and never blocks.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """File descriptor to watch; -1 once closed."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the reader readable."""
        try:
            self._writer.send(b"\0")
        except OSError:
            # Full: the reader is readable already.  Closed: nobody waits.
            pass

    def drain(self) -> None:
        """Forget the wakes so far; call before looking at what they are about."""
        try:
            self._reader.recv(_DRAIN_BYTES)
        except OSError:
            # Empty or closed: there is nothing to forget.
            pass

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds for a wake and forget it; True if woken."""
        fd = self.fileno()
        if fd < 0:
            # Closed under a waiting consumer: keep the time, do not spin.
            time.sleep(timeout or 0.0)
            return False
        woken = wait_ready(fd, timeout)
        if woken:
            self.drain()
        return woken

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
