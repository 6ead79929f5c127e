"""MessageStore: what can be done with messages, one method a statement.

Knows SQL and nothing of kombu: queues are names, messages are an envelope (ASCII
JSON) and a payload (bytes).
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from . import notices
from .claims import Ranges
from .database import Database
from .errors import PgnotifyError, StatementFailed
from .flight import Flight
from .messages import (
    ALL,
    PUBLISHED,
    RELEASED,
    SEATS,
    TOLD,
    Claimed,
    Fence,
    Outgoing,
    Routed,
    any_channel_of,
    channel_of,
    exchange_channel_of,
    lock_of,
)
from .session import Call
from .wire import Rows

logger = logging.getLogger(__name__)

#: Runs one call and returns its rows.
Run: TypeAlias = Callable[[Call], Rows]

#: Why a message went that had outlived its time (RabbitMQ's word).
EXPIRED = "expired"

#: Rows promoted or purged by one statement, so that each stays short.
_CHUNK = 1000

#: Messages at the head of a queue among which leases are looked for.
_HEAD = 10_000

#: Characters of an error kept as a reason.
_REASON_LENGTH = 200

#: Where an exact count ends: nobody can tell more apart, and counting takes time.
_COUNT_ALL = 2**62


def _routed(row: tuple[Any, ...]) -> tuple[Routed, list[str]]:
    """Read an answer of publish_routed: where the message went, and which queues to trim."""
    return Routed(json.loads(row[0]), row[2], row[3]), json.loads(row[1])


def _claimed(fetched: Rows) -> list[Claimed]:
    """Return claimed rows in delivery order: RETURNING has no order of its own."""
    rows = [Claimed(*row) for row in fetched]
    rows.sort(key=lambda row: (row.rank, row.task_id))
    return rows


class MessageStore:
    """The messages of one broker.

    Every method may raise what :meth:`Database.session` raises.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._options = database.options
        self._statements = database.statements
        self._any_lock = lock_of(any_channel_of(self._options.schema))
        self._lowest_first = self._options.priority_order == "redis"

    def publish(self, queue: str, message: Outgoing) -> int:
        """Write one message, commit it, then announce it; return its id.

        A message that is not persistent goes nowhere (0) if nobody has declared the queue.
        """
        call = (self._statements["publish"], (queue, *self._row(message), message.persistent))
        hints = self._announcements([queue], PUBLISHED, TOLD)
        rows = self._database.run(call, hints=hints)[0]
        task_id, max_length = rows[0] if rows else (0, None)
        if max_length is not None:
            self._trim([queue])
        return int(task_id)

    def publish_routed(self, exchange: str, routing_key: str, message: Outgoing) -> Routed:
        """Write one message into the queues that an exchange has for it, and tell live ones."""
        row = self._database.run(self._routing(exchange, routing_key, message))[0][0]
        routed, limited = _routed(row)
        self.announce(routed.queues, PUBLISHED, TOLD)
        self._trim(limited)
        return routed

    def publish_batch(self, items: Sequence[tuple[str, str, Outgoing]]) -> list[Routed | None]:
        """Write messages of `(exchange, routing key, message)` in one transaction, then announce.

        Those for the default exchange (no name: the key is the queue) that follow upon each
        other go in one statement.  Returns where the others went.
        """
        calls, places = [], []
        for direct, group in itertools.groupby(enumerate(items), key=lambda item: not item[1][0]):
            rows = list(group)
            if direct:
                calls.append(self._inserting([(key, message) for _, (_, key, message) in rows]))
                places.append(-1)
            else:
                calls += [self._routing(*item, number=place) for place, item in rows]
                places += [place for place, _ in rows]
        routed: list[Routed | None] = [None] * len(items)
        queues = {key for exchange, key, _ in items if not exchange}
        trimmed: set[str] = set()
        for place, answer in zip(places, self._database.run(*calls), strict=True):
            if place < 0:
                trimmed.update(queue for (queue,) in answer)
                continue
            where, limited = _routed(answer[0])
            routed[place] = where
            queues.update(where.queues)
            trimmed.update(limited)
        self.announce(sorted(queues), PUBLISHED)
        self._trim(sorted(trimmed))
        return routed

    def broadcast(self, broadcast_id: int) -> tuple[str, bytes] | None:
        """Read a big message for live queues; None if it is gone already."""
        rows = self._database.run((self._statements["broadcast"], (broadcast_id,)))[0]
        return (rows[0][0], rows[0][1]) if rows else None

    def claim(self, queue: str, ranges: Ranges, limit: int, worker: str) -> list[Claimed]:
        """Lease up to `limit` messages to `worker`, in delivery order."""
        return self._fetch(self.claiming(queue, ranges, limit, worker), None)

    def claiming(self, queue: str, ranges: Ranges, limit: int, worker: str) -> Call:
        """Return the call of :meth:`claim`; :meth:`start_with_acks` carries it out."""
        params = (queue, *ranges, limit, worker, self._options.visibility_timeout)
        return self._statements["claim"], params

    def take(self, queue: str, ranges: Ranges, limit: int, run: Run | None = None) -> list[Claimed]:
        """Remove and return up to `limit` messages, for consumers that do not acknowledge."""
        return self._fetch((self._statements["take"], (queue, *ranges, limit)), run)

    def run_with_acks(
        self, fences: Sequence[Fence], holder: str | None, call: Call
    ) -> tuple[set[int], Rows]:
        """Acknowledge `fences` and run `call`, in one transaction; return what both returned."""
        *acked, rows = self._database.run(*self._acks(fences, holder), call)
        return {row[0] for row in itertools.chain(*acked)}, rows

    def start_with_acks(
        self,
        fences: Sequence[Fence],
        holder: str | None,
        call: Call,
        landed: Callable[[], None],
    ) -> Flight:
        """Begin to acknowledge `fences` and to run a claim, in one transaction."""
        return self._database.start(*self._acks(fences, holder), call, landed=landed)

    def landed(self, flight: Flight) -> tuple[set[int], list[Claimed]]:
        """Return which were acknowledged, and what was claimed; waits for the answer."""
        *acked, rows = flight.rows()
        return {row[0] for row in itertools.chain(*acked)}, _claimed(rows)

    # In all that follows `holder` is the worker that the lease must be of, as a part of the
    # fence; None: whoever's.

    def acknowledge(self, fences: Sequence[Fence], holder: str | None = None) -> set[int]:
        """Delete messages; return the ids of those whose fence still held."""
        return self._settle("acknowledge", fences, holder)

    def renew(self, fences: Sequence[Fence], holder: str | None = None) -> set[int]:
        """Extend leases; return the ids of those whose fence still held."""
        return self._settle("renew", fences, holder, self._options.visibility_timeout)

    def still_held(self, fences: Sequence[Fence], holder: str | None = None) -> set[int]:
        """Return the ids of those that could not be renewed only because somebody locks them."""
        return self._settle("still_held", fences, holder) if fences else set()

    def release(
        self, fences: Sequence[Fence], queues: set[str], holder: str | None = None, *, started: bool
    ) -> set[int]:
        """Give leases back and announce `queues`; return the ids that were still ours.

        Arguments:
            started: the messages were in a consumer's hands, so the attempt counts.
        """
        attempts = 0 if started else 1
        return self._settle("release", fences, holder, attempts, announce=queues)

    def dead_letter(
        self, fences: Sequence[Fence], reason: str, holder: str | None = None
    ) -> set[int]:
        """Take messages out of circulation, keeping them with `reason`."""
        return self._bury_all(fences, holder, reason, True)

    def expire(self, fences: Sequence[Fence], holder: str | None = None) -> set[int]:
        """Take messages out of circulation that have outlived their time."""
        return self._bury_all(fences, holder, EXPIRED, False)

    def acknowledge_again(
        self, fences: Sequence[Fence], published: Sequence[float], worker: str
    ) -> set[int]:
        """Acknowledge what the server may have forgotten; return the ids that it had.

        Arguments:
            published: when each was published, see :class:`Claimed`.
        """
        if not fences:
            return set()
        order = sorted(zip(fences, published, strict=True))
        fences, published = [fence for fence, _ in order], [when for _, when in order]
        return self._settle("acknowledge_again", fences, worker, published)

    def disown(self, queue: str, worker: str, known: Sequence[int]) -> int:
        """Release what `worker` has leased without knowing; return how many."""
        params = (queue, worker, list(known), _HEAD)
        released = int(self._database.run((self._statements["disown"], params))[0][0][0])
        if released:
            self.announce([queue], RELEASED)
        return released

    def losses(self) -> int:
        """Return how many connections of this process were lost so far."""
        return self._database.losses()

    def sweep_messages(self) -> int:
        """Take some messages out of circulation that have outlived their time; return how many."""
        try:
            return len(self._bury((self._statements["sweep_messages"], (_CHUNK,))))
        except StatementFailed:
            rows = self._database.run((self._statements["expired_messages"], (_CHUNK,)))[0]
            return len(self._bury_all([Fence(*row) for row in rows], None, EXPIRED, False))

    def sweep_dead_letters(self) -> int:
        """Delete some dead letters that were kept long enough; return how many."""
        keep = self._options.dead_letter_retention
        if keep is None:
            return 0
        call = (self._statements["sweep_dead_letters"], (keep, _CHUNK))
        return int(self._database.run(call)[0][0][0])

    def promote(self, queue: str) -> int:
        """Make held messages whose time has come ready; return how many."""
        rows = self._database.run((self._statements["promote"], (queue, _CHUNK)))[0]
        promoted = int(rows[0][0])
        if promoted:
            # Their ids lie below what other consumers have passed.
            self.announce([queue], RELEASED)
        return promoted

    def next_look(self, queue: str) -> float | None:
        """Return in how many seconds something may turn up unannounced; None: nothing known."""
        seconds = self._database.run((self._statements["next_look"], (queue,)))[0][0][0]
        return None if seconds is None else float(seconds)

    def size(self, queue: str, stop_at: int = _COUNT_ALL) -> int:
        """Count the messages nobody holds, up to `stop_at`."""
        return int(self._database.run((self._statements["queue_size"], (queue, stop_at)))[0][0][0])

    def purge(self, queue: str, *, expired_only: bool = False) -> int:
        """Delete the messages nobody holds; return how many.

        Arguments:
            expired_only: only if nobody has used the queue for as long as it lasts.
        """
        total = 0
        while True:
            rows = self._database.run((self._statements["purge"], (queue, _CHUNK, expired_only)))[0]
            total += int(rows[0][0])
            if int(rows[0][0]) < _CHUNK:
                return total

    def _inserting(self, messages: Sequence[tuple[str, Outgoing]]) -> Call:
        """Return the call that writes messages of `(queue, message)`, in order."""
        rows = [message for _, message in messages]
        columns = (
            [queue for queue, _ in messages],
            [row.priority for row in rows],
            [row.available_at for row in rows],
            [row.ttl for row in rows],
            self._lowest_first,
            self._durability(any(row.persistent for row in rows)),
            [row.envelope for row in rows],
            [row.payload for row in rows],
            [row.persistent for row in rows],
        )
        return self._statements["publish_many"], columns

    def _routing(self, exchange: str, routing_key: str, message: Outgoing, number: int = 0) -> Call:
        """Return the call that writes a message to wherever an exchange has it go.

        Arguments:
            number: no other call of the transaction has it.
        """
        carried = notices.carry(message.envelope, message.payload)
        channel = exchange_channel_of(self._options.schema, exchange)
        params = (exchange, routing_key, *self._row(message), carried, channel, number)
        return self._statements["publish_routed"], params

    # What follows a commit must not fail: the caller would take it that nothing was written.

    def announce(self, queues: Sequence[str], what: str, most: int = ALL) -> None:
        """Tell the consumers of `queues`, of those who wait at most so many, what has happened."""
        if hints := self._announcements(queues, what, most):
            try:
                self._database.run(hints=hints)
            except PgnotifyError as exc:
                logger.warning("announce.failed polls will find it: %s", exc)

    def _trim(self, queues: Sequence[str]) -> None:
        for queue in queues:
            turn = (self._statements["trim_turn"], (queue, self._options.schema))
            try:
                self._bury(turn, (self._statements["trim"], (queue,)))
            except PgnotifyError as exc:
                logger.warning("trim.failed queue=%r the next message tries again: %s", queue, exc)

    def _bury_all(
        self, fences: Sequence[Fence], holder: str | None, reason: str, keep: bool
    ) -> set[int]:
        """Bury messages; one that cannot go where its queue sends it holds up no other."""
        try:
            return self._bury(self._settling("bury", fences, holder, reason, keep))
        except StatementFailed as exc:
            if len(fences) > 1:
                each = (self._bury_all([fence], holder, reason, keep) for fence in fences)
                return set().union(*each)
            logger.error(
                "message.dead_lettered task_id=%d: it cannot go where its queue sends it: %s",
                fences[0].task_id,
                exc,
            )
            reason = f"{reason}: {str(exc)[:_REASON_LENGTH]}"
            return self._settle("keep", fences, holder, reason)

    def _bury(self, *calls: Call) -> set[int]:
        """Run calls of which the last buries; return the ids, and announce where they went."""
        rows = self._database.run(*calls)[-1]
        moved = {queue: limited for _, queue, limited in rows if queue is not None}
        self.announce(sorted(moved), PUBLISHED)
        self._trim(sorted(queue for queue, limited in moved.items() if limited))
        return {task_id for task_id, _, _ in rows if task_id is not None}

    def _row(self, message: Outgoing) -> tuple[object, ...]:
        return (
            message.priority,
            message.available_at,
            message.ttl,
            self._lowest_first,
            self._durability(message.persistent),
            message.envelope,
            message.payload,
        )

    def _durability(self, persistent: bool) -> str:
        return self._options.synchronous_commit if persistent else "off"

    def _fetch(self, call: Call, run: Run | None) -> list[Claimed]:
        return _claimed(run(call) if run is not None else self._database.run(call)[0])

    def _acks(self, fences: Sequence[Fence], holder: str | None) -> list[Call]:
        return [self._settling("acknowledge", fences, holder)] if fences else []

    def _settle(
        self, name: str, fences: Sequence[Fence], *params: object, announce: set[str] | None = None
    ) -> set[int]:
        hints = self._announcements(sorted(announce or ()), RELEASED)
        call = self._settling(name, fences, *params)
        return {row[0] for row in self._database.run(call, hints=hints)[0]}

    def _settling(self, name: str, fences: Sequence[Fence], *params: object) -> Call:
        """Return a call about messages; they are locked in the order given, which is that of ids,
        so that two workers never wait for each other."""
        fences = sorted(fences)
        columns = ([f.task_id for f in fences], [f.delivery for f in fences])
        return self._statements[name], (*columns, *params)

    def _announcements(self, queues: Sequence[str], what: str, most: int = ALL) -> list[Call]:
        """After the commit, never inside: it would hold a lock of the cluster until flushed."""
        if not self._options.notify:
            return []
        channels = [channel_of(self._options.schema, queue) for queue in queues]
        if what != PUBLISHED:
            # Those who are busy must know, too: it lies below what they have passed.
            return [(self._statements["announce"], (channel, what)) for channel in channels]
        statement = self._statements["announce_published"]
        rest = (self._any_lock, most, random.randrange(SEATS), SEATS)
        return [(statement, (channel, what, lock_of(channel), *rest)) for channel in channels]
