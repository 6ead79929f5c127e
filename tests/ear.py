"""A plain connection that hears what is announced of some queues."""

from __future__ import annotations

import random
from collections.abc import Callable

import psycopg

from kombu_pgnotify.messages import PUBLISHED, channel_of, lock_of, named_in, seat_of


class Ear:
    """Listens to the channels of `queues`; with `waits` it says so, as an idle consumer does.

    Arguments:
        seat: its number for publishers, which those who name somebody mean.
        everybody: hears what is said to others too.
        told: called before it is asked what was heard: publishers return before the server has
            announced what they have published, and know that it has when they do something else.
    """

    def __init__(
        self,
        url: str,
        *queues: str,
        waits: bool = True,
        seat: int | None = None,
        everybody: bool = False,
        told: Callable[[], object] = lambda: None,
    ) -> None:
        self._seat = seat
        self._everybody = everybody
        self._told = told
        self._connection = psycopg.connect(url, autocommit=True)
        self._mark = channel_of("ear", "mark")
        self._names = {channel_of("pgnotify", queue): queue for queue in queues}
        self.locks = [lock_of(channel) for channel in self._names]
        for channel in (self._mark, *self._names):
            self._connection.execute(f'LISTEN "{channel}"'.encode())
        if waits:
            self.wait()

    def wait(self) -> None:
        """Say that announcements are wanted."""
        self._run("pg_advisory_lock_shared", self.locks)
        self._run("pg_advisory_lock", self._seats)

    def wait_no_more(self) -> None:
        """Say that they are not, although they are heard."""
        self._run("pg_advisory_unlock_shared", self.locks)
        self._run("pg_advisory_unlock", self._seats)

    def heard(self) -> list[tuple[str, str]]:
        """What was announced to us until now, as (queue, what), in the order of commits."""
        self._told()
        mark = str(random.random())
        self._connection.execute("SELECT pg_notify(%s, %s)", (self._mark, mark))
        found = []
        for notify in self._connection.notifies(timeout=10):
            if (notify.channel, notify.payload) == (self._mark, mark):
                return found
            if notify.channel == self._mark:
                continue  # another ear's
            named = named_in(notify.payload)
            if named is None:
                found.append((self._names[notify.channel], notify.payload))
            elif self._everybody or self._seat in named:
                found.append((self._names[notify.channel], PUBLISHED))
        raise AssertionError("the mark never came")

    def close(self) -> None:
        self._connection.close()

    @property
    def _seats(self) -> list[int]:
        seats = [] if self._seat is None else [self._seat]
        return [seat_of(channel, seat) for channel in self._names for seat in seats]

    def _run(self, function: str, locks: list[int]) -> None:
        for lock in locks:
            self._connection.execute(f"SELECT {function}(%s)".encode(), (lock,))
