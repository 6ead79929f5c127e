"""Claim cursor: where in a queue the next claim starts looking.

The head of a busy queue is full of rows that are claimed already, and under an old
snapshot of their dead versions too.  A consumer therefore remembers, per rank, up to
which id it has seen the head claimed, and starts there.  This is an optimisation and
must never lose a row: rows commit out of id order, and released, expired and promoted
rows lie below.  So the cursor goes back to the start

- when a bounded claim came back short, before the queue may count as empty;
- when it is told that rows came back (:meth:`ClaimCursor.look_from_start`);
- at least once a second under load.

Looks from the start are limited by what they cost: after one that took `t`, the next
comes not before 50 t, so that they never take more than about 2 % of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

#: Parallel lists: after (rank, id), up to and including this last rank.
Ranges = tuple[list[int], list[int], list[int]]

#: How far below the largest claimed id a bound stays: rows commit out of order by about
#: as many ids as there are publishers at work.
SLACK = 256

#: Seconds between looks from the start under load.
LOOK_FROM_START_EVERY = 1.0

#: A look from the start is followed by this many times its own duration without another.
COST_SHARE = 50

#: A look from the start quicker than this (seconds) is simply repeated: no bounds needed.
CHEAP = 0.002

#: Before the first rank, after the last one (ranks are 0..255 in a smallint).
BEFORE_ALL, AFTER_ALL = -1, 32767


class Outlook(Enum):
    """What a claim's result says about the queue."""

    #: The claim was filled: there is probably more.
    MORE = "more"
    #: A bounded claim came back short: look from the start before believing it.
    UNSURE = "unsure"
    #: A claim from the start came back short.
    EMPTY = "empty"


class ClaimCursor:
    """Remembers the bounds of one queue for one consumer.  Times are monotonic seconds."""

    def __init__(self) -> None:
        self._bounds: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        self._from_start = True
        self._started_at = float("-inf")
        self._cost = 0.0

    def look_from_start(self) -> None:
        """Rows may have come back below the bounds."""
        self._from_start = True

    def due_from_start(self) -> float:
        """Return the earliest time of the next look from the start, if one is wanted."""
        return self._started_at + COST_SHARE * self._cost

    def next_ranges(self, now: float) -> Ranges:
        """Return the ranges the next claim walks, highest priority first."""
        if self._bounds and self._may_start_over(now):
            self._earlier, self._bounds = self._bounds, {}
        if not self._bounds:
            # Here and not with the answer: what comes back meanwhile needs another look.
            self._from_start = False
        ranks = sorted(self._bounds)
        # Between two known ranks lie unknown ones: each range reaches up to the next bound.
        after_rank = [BEFORE_ALL, *ranks]
        after_id = [0, *(self._bounds[rank] for rank in ranks)]
        last_rank = [*(rank - 1 for rank in ranks), AFTER_ALL]
        return after_rank, after_id, last_rank

    def claimed(
        self, rows: Iterable[tuple[int, int]], asked: int, started: float, now: float
    ) -> Outlook:
        """Learn from a claim that :meth:`next_ranges` at time `started` was for.

        Arguments:
            rows: (rank, task id) of each claimed row.
            asked: how many the claim asked for.
            started: when the ranges were made.
            now: when the rows had arrived.
        """
        whole = not self._bounds
        if whole:
            self._started_at, self._cost = now, now - started
        count = 0
        for rank, task_id in rows:
            count += 1
            bound = task_id - SLACK
            if bound > self._bounds.get(rank, 0):
                self._bounds[rank] = bound
        if count >= asked:
            return Outlook.MORE
        if whole:
            self._settle_down()
            return Outlook.EMPTY
        self._from_start = True
        return Outlook.UNSURE

    def _settle_down(self) -> None:
        """Everything has been seen: bounds are worth having only where looking was costly."""
        if self._cost < CHEAP:
            self._bounds = {}
        else:
            ranks = self._bounds.keys() | self._earlier.keys()
            self._bounds = {
                rank: max(self._bounds.get(rank, 0), self._earlier.get(rank, 0)) for rank in ranks
            }
        self._earlier = {}

    def _may_start_over(self, now: float) -> bool:
        """True if a look from the start is wanted and not too soon."""
        wait = COST_SHARE * self._cost
        if not self._from_start:
            wait = max(wait, LOOK_FROM_START_EVERY)
        return now >= self._started_at + wait
