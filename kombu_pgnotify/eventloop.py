"""The transport's part in kombu's event loop (the hub)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from .claiming import Claim
from .consumption import Consumption
from .keeper import LeaseKeeper
from .qos import flush
from .waker import Waker

#: Seconds of deliveries after which the hub gets its turn: a solo worker runs its tasks
#: inside them, and an ack must not wait for the next task.
TURN = 0.01

#: Seconds that a planned look may come late: the same moment, reckoned twice from now, differs.
SLACK = 0.001


class HubLink:
    """Claims, delivers and settles once per iteration of a hub.

    An iteration runs call_soon callbacks (Celery's acks), timers, on_tick (ours), then
    waits for file descriptors.  So acks made in it go to the server with the claim that
    their credit allows, or by the keeper when a slow delivery keeps them here.  The hub
    may be reset under us at any time, and others may drain the same connection
    synchronously: nothing here depends on having been called.

    Arguments:
        loop: kombu's Hub.
        consumption: what to consume.
        keeper: settles.
        waker: readable when there is something to do.
    """

    def __init__(
        self, loop: Any, consumption: Consumption, keeper: LeaseKeeper, waker: Waker
    ) -> None:
        self._loop = loop
        self._consumption = consumption
        self._keeper = keeper
        self._waker = waker
        self._pid = os.getpid()
        self._thread: int | None = None
        self._slow = False
        # The claim whose answer the hub waits for.
        self._watched: Claim | None = None
        self._timer: Any = None
        self._timer_due = 0.0
        loop.on_tick.add(self.tick)
        loop.on_close.add(self.stopped)

    def settles_soon(self) -> bool:
        """True if the calling thread's acks will be settled within its loop's iteration."""
        return self._thread == threading.get_ident() and self._consumption.active

    def tick(self) -> None:
        """One iteration's work.

        Raises:
            DatabaseUnavailable: Celery reconnects.
        """
        if os.getpid() != self._pid:
            return
        self._thread = threading.get_ident()
        self._watch_waker()
        if self._slow and self._consumption.waiting:
            # Nothing is claimed before the next delivery, which may run another long task.
            self._flush()
        delivered = False
        started = monotonic()
        while self._consumption.deliver_one(one_by_one=False):
            delivered = True
            self._slow = monotonic() - started > TURN
            # Acks that the delivery has queued (a solo worker's) come before the next one.
            if self._slow or self._loop._ready or not self._consumption.waiting:
                break
        if delivered:
            # The hub does not shorten its wait for acks that deliveries have just queued
            # (call_soon from its own thread), nor for a queue that has more.
            self._waker.wake()
        else:
            if not self._consumption.gathering and self._consumption.claim is None:
                # What no claim took along.
                self._flush()
            self._plan_next_look()
        self._watch_claim()

    def _flush(self) -> None:
        # While the server is away the keeper's thread goes on trying, and blocks no loop.
        if self._keeper.noted and not self._consumption.interrupted:
            flush(self._keeper)

    def stopped(self, _hub: Any) -> None:
        """The hub is being reset or closed: from now on acks go at once."""
        self._thread = None
        # It has forgotten the sockets.
        self._watched = None

    def close(self) -> None:
        """Take everything of ours out of the hub."""
        self._forget_claim(unless=None)
        self.stopped(None)
        self._loop.on_tick.discard(self.tick)
        self._loop.on_close.discard(self.stopped)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._forget(self._waker.fileno())

    def _watch_waker(self) -> None:
        """Put the waker into the poller; a reset hub has forgotten it."""
        fd = self._waker.fileno()
        if not self._is_ours(self._loop.readers.get(fd)):
            self._loop.add_reader(fd, self._woken)

    def _watch_claim(self) -> None:
        """Have the hub wake up when the claim under way is answered."""
        claim = self._consumption.claim
        if claim is self._watched:
            return
        self._forget_claim(unless=claim)
        self._watched = claim
        if claim is not None and not claim.has_landed:
            # Again even on the same socket: it may be another one of the same number.
            try:
                self._loop.add_reader(claim.fileno(), self._woken)
            except OSError:
                # Another thread has read the answer, which wakes us, and closed the connection.
                if not claim.has_landed:
                    raise

    def _forget_claim(self, unless: Claim | None) -> None:
        if self._watched is not None:
            fd = self._watched.fileno()
            if unless is None or unless.fileno() != fd:
                self._forget(fd)

    def _forget(self, fd: int) -> None:
        if self._is_ours(self._loop.readers.get(fd)):
            self._loop.remove_reader(fd)

    def _is_ours(self, entry: tuple[Callable[..., Any], Any] | None) -> bool:
        # File descriptors are reused: one of the same number may be somebody else's.
        return entry is not None and entry[0] == self._woken

    def _woken(self) -> None:
        # The next iteration's tick does the work.
        self._waker.drain()

    def _plan_next_look(self) -> None:
        """Have the hub wake up in time for the next look."""
        seconds = self._consumption.next_look()
        if seconds is None:
            return
        due = monotonic() + seconds
        if self._timer is not None:
            if self._timer_due <= due + SLACK:
                # Too early does no harm: it looks, and plans anew.
                return
            self._timer.cancel()
        self._timer, self._timer_due = self._loop.call_later(seconds, self._look), due
        # This iteration's wait was computed before the timer existed.
        self._waker.wake()

    def _look(self) -> None:
        # Fired before on_tick of the same iteration: tick does the work.
        self._timer = None
