"""The LISTEN pump: one connection per process that hears announcements for everybody."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Iterable
from time import monotonic
from typing import Protocol, TypeAlias

from .database import Database
from .errors import DatabaseUnavailable
from .messages import PUBLISHED, SEATS, any_channel_of, lock_of, named_in, seat_of
from .session import Session
from .sql import quote_identifier
from .waker import Waker, wait_any
from .wire import Rows

logger = logging.getLogger(__name__)

#: Seconds before the first and at the most between attempts to reconnect, doubling.
FIRST_BACKOFF, LAST_BACKOFF = 0.05, 5.0

#: Share of the server's notify queue in use from which on somebody should know.
NOTIFY_QUEUE_FILLS = 0.5

#: Seconds the connection is kept after the last subscriber has left.
LINGER = 5.0

#: Seconds within which a consumer that was named has looked, or everybody is told.
SEEN_WITHIN = 0.02

#: Channels for which a connection says by two locks each that it waits; with more of them, one
#: lock stands for all.  The server counts on 64 a connection (max_locks_per_transaction).
MOST_LOCKS = 8

#: Seconds that a seat is remembered after it was given up: somebody may just be naming it.
SEAT_REMEMBERED = 2.0


class Subscriber(Protocol):
    """Who hears announcements; all methods return at once and take no lock."""

    def notified(self, channel: str, payload: str) -> None:
        """Something was announced on `channel`, to all."""

    def named(self, channel: str, *, reserve: bool) -> None:
        """A message was announced on `channel`, to us and one other: look, in `reserve` later."""

    def unseen(self, channel: str) -> bool:
        """True until it has seen that nothing is left of what it was named for."""

    def resync(self, channels: frozenset[str]) -> None:
        """LISTEN on `channels` is in force from now on; what was announced before is gone."""

    def awaited(self, channels: frozenset[str]) -> None:
        """From now on publishers tell of `channels`; what was published before is in the table."""

    def deafened(self) -> None:
        """No LISTEN is in force any more; the next resync names those that are again."""


#: Who hears which channels.
_Channels: TypeAlias = dict[Subscriber, frozenset[str]]


class Listener:
    """Owns a daemon thread with one autocommit LISTEN connection.

    A thread, since the socket must be read at all times (a listener that stops reading
    holds back the notification queue of the whole cluster) while the consumer's loop may
    be blocked by a task for hours.  It starts with the first subscriber, outlives every
    transient failure and ends by itself after the last one.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._wanted: _Channels = {}
        self._waiting: _Channels = {}
        self._heard: _Channels = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waker: Waker | None = None

    def subscribe(
        self, subscriber: Subscriber, channels: Iterable[str], waiting: Iterable[str] = ()
    ) -> None:
        """Let `subscriber` hear exactly these `channels`; it is told to resync for new ones.

        Arguments:
            waiting: those of them of which publishers are to tell; nobody tells a busy consumer
                what it will find anyway.
        """
        with self._lock:
            self._closing = False
            self._wanted[subscriber] = frozenset(channels)
            self._waiting[subscriber] = frozenset(waiting)
            if self._thread is None:
                self._waker = Waker()
                self._thread = threading.Thread(
                    target=self._run, name="pgnotify-listener", daemon=True
                )
                self._thread.start()
        self._nudge()

    def heard_by(self, subscriber: Subscriber) -> frozenset[str]:
        """Return the channels that `subscriber` hears now."""
        with self._lock:
            return self._heard.get(subscriber, frozenset())

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Forget `subscriber`; takes no lock and does no I/O."""
        self._wanted.pop(subscriber, None)
        self._waiting.pop(subscriber, None)
        self._nudge()

    def close(self, timeout: float) -> None:
        """Forget everybody and wait up to `timeout` seconds for the thread to end."""
        self._closing = True
        self._wanted.clear()
        self._waiting.clear()
        thread = self._thread
        self._nudge()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    @property
    def wanted(self) -> bool:
        """True while anybody wants to hear anything."""
        return bool(self._wanted)

    @property
    def linger(self) -> float:
        """Seconds that the connection is kept for somebody new."""
        return 0.0 if self._closing else LINGER

    def _nudge(self) -> None:
        waker = self._waker
        if waker is not None:
            waker.wake()

    def _run(self) -> None:
        assert self._waker is not None
        backoff = FIRST_BACKOFF
        while not self._ended():
            started = monotonic()
            try:
                self._listen(self._waker)
            except Exception as exc:
                # Whatever it is counts as a lost connection: nobody would start the thread again.
                if monotonic() - started > LAST_BACKOFF:
                    backoff = FIRST_BACKOFF
                logger.warning("listener.lost retry_in=%.2fs: %s", backoff, exc)
                self._waker.wait(backoff * random.uniform(0.8, 1.2))
                backoff = min(backoff * 2, LAST_BACKOFF)

    def _ended(self) -> bool:
        """Let go of the thread if nobody is left."""
        with self._lock:
            if self._wanted:
                return False
            self._thread = None
            if self._waker is not None:
                self._waker.close()
                self._waker = None
            return True

    def _listen(self, waker: Waker) -> None:
        """Listen until nobody is left; any trouble is a lost connection.

        Raises:
            PgnotifyError: the connection is lost or refused.
        """
        target = self._database.options.listen_target
        session = self._database.open(target)
        try:
            with self._database.mapped_errors(target):
                _Ear(self, session, self._database).listen(waker)
        finally:
            session.close()
            self._heard = {}
            for subscriber in list(self._wanted):
                subscriber.deafened()

    def take_wanted(self, heard: _Channels) -> tuple[_Channels, _Channels, _Channels]:
        """Return what is wanted, what of it is `heard` already (from now on only that), and who
        waits for what."""
        with self._lock:
            # At once, so that nobody takes for heard what is just being given up.
            wanted = dict(self._wanted)
            self._heard = {
                subscriber: channels & heard.get(subscriber, frozenset())
                for subscriber, channels in wanted.items()
            }
            return wanted, self._heard, dict(self._waiting)

    def now_heard(self, heard: _Channels) -> None:
        """These LISTENs are in force."""
        self._heard = heard


#: Shared by all who wait; see the statement announce_published.
_LOCK = "SELECT pg_catalog.pg_advisory_lock_shared({})"
_UNLOCK = "SELECT pg_catalog.pg_advisory_unlock_shared({})"

#: Takes a free seat of each of the channels with these locks, NULL where there is none; waits for
#: nobody.  Literal, since it goes in one command with LISTEN, which takes no parameters.
_SIT_DOWN = """
SELECT key, (SELECT seat
             FROM (SELECT ({start} + n) % {seats} AS seat
                   FROM pg_catalog.generate_series(0, {seats} - 1) AS n OFFSET 0) AS seats
             WHERE pg_catalog.pg_try_advisory_lock(key + 1 + seat) LIMIT 1)
FROM pg_catalog.unnest(ARRAY[{locks}]::bigint[]) AS key
"""
_STAND_UP = "SELECT pg_catalog.pg_advisory_unlock({})"


class _Ear:
    """One LISTEN connection's life."""

    def __init__(self, listener: Listener, session: Session, database: Database) -> None:
        self._listener = listener
        self._session = session
        self._check = (database.statements["listening"], ())
        self._check_every = database.options.health_check_interval
        self._check_at = monotonic() + self._check_every
        self._heard: _Channels = {}
        self._awaited: _Channels = {}
        self._locks: frozenset[str] = frozenset()
        # By channel, for those of the locks but for any.
        self._seats: dict[str, int] = {}
        # The same each time, where it is free: else we would soon have had all of them.
        self._usual_seat = random.randrange(SEATS)
        # Given up (channel, seat), and until when (monotonic) somebody may name it all the same.
        self._former_seats: dict[tuple[str, int], float] = {}
        self._any_channel = any_channel_of(database.options.schema)
        self._announce = database.statements["announce"]
        # When (monotonic) those who were named are to have seen which channel, oldest first.
        self._due: dict[tuple[str, Subscriber | None], float] = {}

    def listen(self, waker: Waker) -> None:
        session = self._session
        leave_at = None
        while True:
            waker.drain()
            self._adjust()
            if monotonic() >= self._check_at:
                self._check_health()
            # Last of all: the statements above read announcements off the socket, which then
            # stays silent.
            while self._dispatch():
                pass
            now = monotonic()
            # Sooner than was decided, if the process has begun to end meanwhile.
            sooner = min(leave_at or math.inf, now + self._listener.linger)
            leave_at = None if self._listener.wanted else sooner
            if leave_at is not None and now >= leave_at:
                self._due = dict.fromkeys(self._due, now)
                self._tell_all_of_unseen()
                return
            until = min(self._check_at, leave_at or self._check_at, *self._due.values())
            wait_any((session.fileno(), waker.fileno()), until - monotonic())

    def _adjust(self) -> None:
        """Make the LISTENs those that are wanted, then tell whom it concerns.

        That we wait is told to publishers by a lock, since it is seen at once and ends with the
        connection.  They look for it after their commit: who sees none has committed before we
        took it, so that the look that :meth:`Subscriber.awaited` asks for finds the message.
        """
        wanted, kept, waiting = self._listener.take_wanted(self._heard)
        before = frozenset().union(*self._heard.values())
        after = frozenset().union(*wanted.values())
        locks = self._locks_for(frozenset().union(*waiting.values()) & after)
        given_up = {name: seat for name, seat in self._seats.items() if name not in locks}
        commands = [
            *(f"LISTEN {quote_identifier(name)}" for name in sorted(after - before)),
            *(f"UNLISTEN {quote_identifier(name)}" for name in sorted(before - after)),
            *(_LOCK.format(lock_of(name)) for name in sorted(locks - self._locks)),
            *(_UNLOCK.format(lock_of(name)) for name in sorted(self._locks - locks)),
            *(_STAND_UP.format(seat_of(*seat)) for seat in sorted(given_up.items())),
        ]
        if unseated := locks - self._locks - {self._any_channel}:
            keys = ", ".join(str(lock_of(name)) for name in sorted(unseated))
            commands.append(_SIT_DOWN.format(start=self._usual_seat, seats=SEATS, locks=keys))
        if commands:
            rows = self._session.script("; ".join(commands))
            self._note_seats(given_up, unseated, rows if unseated else [])
        told, self._awaited, self._locks = self._awaited, waiting, locks
        self._heard = wanted
        self._listener.now_heard(wanted)
        # Only now: who looks at the table from here on misses nothing.
        for subscriber, channels in wanted.items():
            if new := channels - kept[subscriber]:
                subscriber.resync(new)
            awaited = waiting.get(subscriber, frozenset()) & kept[subscriber]
            if awaited := awaited - told.get(subscriber, frozenset()):
                subscriber.awaited(awaited)

    def _note_seats(self, given_up: dict[str, int], asked: frozenset[str], rows: Rows) -> None:
        """Note which seats are ours now: `rows` of lock and seat, None where all were taken."""
        now = monotonic()
        former = {seat: until for seat, until in self._former_seats.items() if until > now}
        self._former_seats = former | dict.fromkeys(given_up.items(), now + SEAT_REMEMBERED)
        for name in given_up:
            del self._seats[name]
        names = {lock_of(name): name for name in asked}
        self._seats.update((names[int(key)], int(seat)) for key, seat in rows if seat is not None)

    def _has_seat(self, channel: str, seat: int) -> bool:
        """True if it is ours, or was a moment ago."""
        until = self._former_seats.get((channel, seat), -math.inf)
        return self._seats.get(channel) == seat or until > monotonic()

    def _locks_for(self, waiting: frozenset[str]) -> frozenset[str]:
        return waiting if len(waiting) <= MOST_LOCKS else frozenset([self._any_channel])

    def _dispatch(self) -> bool:
        """Tell the subscribers what was heard; True if there may be more by now."""
        for channel, payload in self._session.notifications():
            named = named_in(payload)
            ours = [self._has_seat(channel, seat) for seat in named or ()]
            if named is not None and not any(ours):
                continue
            hearers = [who for who, channels in self._heard.items() if channel in channels]
            for subscriber in hearers:
                if named is None:
                    subscriber.notified(channel, payload)
                else:
                    subscriber.named(channel, reserve=not ours[0])
            if named is not None and ours[0]:
                # Where nobody is left who hears it, everybody else is to.
                witnesses: list[Subscriber | None] = [*hearers] or [None]
                for who in witnesses:
                    self._due.setdefault((channel, who), monotonic() + SEEN_WITHIN)
        return self._tell_all_of_unseen()

    def _tell_all_of_unseen(self) -> bool:
        """Tell everybody of what those who were named have not seen; True if there was any.

        They may be busy in a task, have their fill, find more than they take, or have gone.
        """
        now, unseen = monotonic(), set()
        for (channel, subscriber), due in list(self._due.items()):
            if due <= now:
                del self._due[channel, subscriber]
                if subscriber is None or subscriber.unseen(channel):
                    unseen.add(channel)
        for channel in sorted(unseen):
            self._session.run((self._announce, (channel, PUBLISHED)))
        return bool(unseen)

    def _check_health(self) -> None:
        """Prove that the server answers and that the LISTENs are in force."""
        self._check_at = monotonic() + self._check_every
        names, locks, read_only, usage = self._session.run(self._check)[0][0]
        if usage > NOTIFY_QUEUE_FILLS:
            logger.warning(
                "listener.notify_queue usage=%.0f%%: when it is full nothing can be announced; "
                "a session that listens has not ended its transaction",
                usage * 100,
            )
        if read_only:
            # Another of the URL's hosts may have taken over; publishers notify there.
            raise DatabaseUnavailable("the server has become read-only")
        missing = frozenset().union(*self._heard.values()) - set(names.split())
        expected = len(self._locks) + len(self._seats)
        if missing or locks < expected:
            raise DatabaseUnavailable(
                f"{len(missing)} LISTENs and {expected - locks} locks are not in force any "
                "more: behind a pooler in transaction mode set the option notify to False"
            )
