"""Dead letters: what was taken out of circulation and kept, for people to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from .database import Database
from .messages import PUBLISHED
from .store import MessageStore

#: Dead letters moved or deleted by one statement.
_CHUNK = 1000


class DeadLetter(NamedTuple):
    """One message that was rejected, could not be read, or was delivered too often.

    Attributes:
        dead_letter_id: names it.
        queue: where it was.
        attempts: deliveries that were begun.
        worker: who had it last; empty: nobody.
        reason: why it is here.
        published_at, dead_at: when, as the server writes times.
        envelope: the message without its body, JSON.
    """

    dead_letter_id: int
    queue: str
    attempts: int
    worker: str
    reason: str
    published_at: str
    dead_at: str
    envelope: str

    @property
    def task(self) -> str:
        """The name of the Celery task; empty if it is none."""
        try:
            name = json.loads(self.envelope)["headers"]["task"]
        except (LookupError, TypeError, ValueError, RecursionError):
            return ""
        return name if isinstance(name, str) else ""


class DeadLetters:
    """The dead letters of one broker.

    In all methods `queue` is the queue they were in (None: any) and `ids` are theirs (None: any).
    Every method may raise what :meth:`Database.session` raises.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._store = MessageStore(database)
        self._statements = database.statements

    def find(self, queue: str | None = None, limit: int = 100) -> list[DeadLetter]:
        """Return up to `limit` of them, the latest first."""
        rows = self._database.run((self._statements["dead_letters"], (queue, limit)))[0]
        return [DeadLetter(*row) for row in rows]

    def requeue(self, queue: str | None = None, ids: Sequence[int] | None = None) -> int:
        """Put them back to the end of their queues, as new messages; return how many."""
        return self._clear(queue, ids, requeue=True)

    def delete(self, queue: str | None = None, ids: Sequence[int] | None = None) -> int:
        """Delete them; return how many."""
        return self._clear(queue, ids, requeue=False)

    def _clear(self, queue: str | None, ids: Sequence[int] | None, *, requeue: bool) -> int:
        # A worker that rejects them at once must not keep us busy.
        newest = self._database.run((self._statements["newest_dead_letter"], ()))[0][0][0]
        params = (queue, None if ids is None else [*ids], newest, _CHUNK, requeue)
        total = 0
        while True:
            rows = self._database.run((self._statements["clear_dead_letters"], params))[0]
            if requeue:
                self._store.announce([name for name, _ in rows], PUBLISHED)
            cleared = sum(int(count) for _, count in rows)
            total += cleared
            if cleared < _CHUNK:
                return total
