"""MessageStore: what can be done with messages, one method a statement.

Knows SQL and nothing of kombu: queues are names, messages are an envelope (ASCII
JSON) and a payload (bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from .claims import Ranges
from .database import Database
from .session import Call, Rows

#: Runs one call and returns its rows.
Run: TypeAlias = Callable[[Call], Rows]

#: What an announcement says (the NOTIFY payload): a row was published …
PUBLISHED = "published"

#: … or rows came back below what consumers have already passed: look from the start.
RELEASED = "released"

#: Rows promoted or purged by one statement, so that each stays short.
_CHUNK = 1000

#: Where an exact count ends: nobody can tell more apart, and counting takes time.
_COUNT_ALL = 2**62


class Claimed(NamedTuple):
    """A message as :meth:`MessageStore.claim` returns it.

    `delivery` is the fence: with `task_id` it names this delivery and no other.
    `attempts` counts deliveries, this one included, without graceful releases.
    """

    task_id: int
    delivery: int
    attempts: int
    rank: int
    envelope: str
    payload: bytes


class Fence(NamedTuple):
    """Names one delivery of one message."""

    task_id: int
    delivery: int


def channel_of(schema: str, queue: str) -> str:
    """Return the NOTIFY channel of `queue`; the schema's own function computes the same."""
    digest = hashlib.sha224(f"{schema}.{queue}".encode("utf-8", "surrogatepass")).hexdigest()
    return "pgnotify_" + digest[:40]


class MessageStore:
    """The messages of one broker.

    Every method may raise what :meth:`Database.session` raises.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._options = database.options
        self._statements = database.statements

    def publish(
        self,
        queue: str,
        envelope: str,
        payload: bytes,
        *,
        priority: int = 0,
        available_at: str | None = None,
    ) -> int:
        """Write one message, commit it, then announce it; return its id.

        Arguments:
            priority: 0 to 255, higher first.
            available_at: ISO time with offset; the message is held until then.
        """
        row = (queue, priority, available_at, envelope, payload, self._options.synchronous_commit)
        hints = self._announcements([queue], PUBLISHED)
        return int(self._database.run((self._statements["publish"], row), hints=hints)[0][0][0])

    def claim(
        self, queue: str, ranges: Ranges, limit: int, worker: str, run: Run | None = None
    ) -> list[Claimed]:
        """Lease up to `limit` messages to `worker`, in delivery order.

        Arguments:
            run: carries out the call, with others in its round trip.
        """
        params = (queue, *ranges, limit, worker, self._options.visibility_timeout)
        return self._fetch((self._statements["claim"], params), run)

    def take(self, queue: str, ranges: Ranges, limit: int, run: Run | None = None) -> list[Claimed]:
        """Remove and return up to `limit` messages, for consumers that do not acknowledge."""
        return self._fetch((self._statements["take"], (queue, *ranges, limit)), run)

    def run_with_acks(self, fences: Sequence[Fence], call: Call) -> tuple[set[int], Rows]:
        """Acknowledge `fences` and run `call`, in one transaction; return what both returned."""
        if not fences:
            return set(), self._database.run(call)[0]
        acked, rows = self._database.run(self._settling("acknowledge", fences), call)
        return {row[0] for row in acked}, rows

    def acknowledge(self, fences: Sequence[Fence]) -> set[int]:
        """Delete messages; return the ids of those whose fence still held."""
        return self._settle("acknowledge", fences)

    def renew(self, fences: Sequence[Fence]) -> set[int]:
        """Extend leases; return the ids of those whose fence still held."""
        return self._settle("renew", fences, self._options.visibility_timeout)

    def release(self, fences: Sequence[Fence], queues: set[str], *, started: bool) -> set[int]:
        """Give leases back and announce `queues`; return the ids that were still ours.

        Arguments:
            started: the messages were in a consumer's hands, so the attempt counts.
        """
        return self._settle("release", fences, 0 if started else 1, announce=queues)

    def dead_letter(self, fences: Sequence[Fence], reason: str) -> set[int]:
        """Take messages out of circulation, keeping them with `reason`."""
        return self._settle("dead_letter", fences, reason)

    def promote(self, queue: str) -> int:
        """Make held messages whose time has come ready; return how many."""
        rows = self._database.run((self._statements["promote"], (queue, _CHUNK)))[0]
        promoted = int(rows[0][0])
        if promoted and (hints := self._announcements([queue], RELEASED)):
            # Their ids lie below what other consumers have passed.
            self._database.run(hints=hints)
        return promoted

    def next_look(self, queue: str) -> float | None:
        """Return in how many seconds something may turn up unannounced; None: nothing known."""
        seconds = self._database.run((self._statements["next_look"], (queue,)))[0][0][0]
        return None if seconds is None else float(seconds)

    def size(self, queue: str, stop_at: int = _COUNT_ALL) -> int:
        """Count the messages nobody holds, up to `stop_at`."""
        return int(self._database.run((self._statements["queue_size"], (queue, stop_at)))[0][0][0])

    def purge(self, queue: str) -> int:
        """Delete the messages nobody holds; return how many."""
        total = 0
        while True:
            rows = self._database.run((self._statements["purge"], (queue, _CHUNK)))[0]
            total += int(rows[0][0])
            if int(rows[0][0]) < _CHUNK:
                return total

    def _fetch(self, call: Call, run: Run | None) -> list[Claimed]:
        fetched = run(call) if run is not None else self._database.run(call)[0]
        rows = [Claimed(*row) for row in fetched]
        # RETURNING has no order of its own.
        rows.sort(key=lambda row: (row.rank, row.task_id))
        return rows

    def _settle(
        self, name: str, fences: Sequence[Fence], *params: object, announce: set[str] | None = None
    ) -> set[int]:
        hints = self._announcements(sorted(announce or ()), RELEASED)
        call = self._settling(name, fences, *params)
        return {row[0] for row in self._database.run(call, hints=hints)[0]}

    def _settling(self, name: str, fences: Sequence[Fence], *params: object) -> Call:
        columns = ([f.task_id for f in fences], [f.delivery for f in fences])
        return self._statements[name], (*columns, *params)

    def _announcements(self, queues: Sequence[str], what: str) -> list[Call]:
        """Announce after the commit, never inside: a commit that notifies holds a lock of the
        whole cluster until its WAL is flushed."""
        if not self._options.notify:
            return []
        schema = self._options.schema
        return [
            (self._statements["announce"], (channel_of(schema, queue), what)) for queue in queues
        ]
