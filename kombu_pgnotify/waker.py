"""Waker and inbox: how other threads end a thread's wait, and tell it something."""

from __future__ import annotations

import math
import queue
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

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


class Inbox(Generic[T]):
    """What one thread is told by others, signal handlers and weakref callbacks.

    Not queue.SimpleQueue, which before Python 3.13 may wait for ever: where its timeout passes
    while it looks whether there is something, it takes what is left, less than nothing, for none.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waker: Waker | None = None

    def open(self) -> None:
        """The thread is about to start; what was put before waits for it."""
        self._waker = Waker()

    def close(self) -> None:
        """The thread ends."""
        if self._waker is not None:
            self._waker.close()
            self._waker = None

    def put(self, item: T) -> None:
        """Tell the thread something; takes no lock and never blocks."""
        self._items.append(item)
        waker = self._waker
        if waker is not None:
            waker.wake()

    def empty(self) -> bool:
        """True if there is nothing to :meth:`get`."""
        return not self._items

    def get(self, timeout: float) -> T:
        """Return what was put first, for the thread itself while the inbox is open.

        Arguments:
            timeout: seconds to wait for it.

        Raises:
            queue.Empty: nothing came.
        """
        assert self._waker is not None
        deadline = time.monotonic() + timeout
        while True:
            self._waker.drain()
            if self._items:
                return self._items.popleft()
            left = deadline - time.monotonic()
            if left <= 0:
                raise queue.Empty
            self._waker.wait(left)
