"""Claiming: a claim under way, and which of what it brings was this process's before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .aftermath import Aftermath
from .errors import DatabaseUnavailable, PgnotifyError
from .flight import Flight
from .leases import Lease, Outbox, Outcome, Settlement, log_lost
from .messages import Claimed, Fence
from .settling import report_missed
from .store import MessageStore

logger = logging.getLogger(__name__)


class Claim:
    """One claim, from when it is sent until its consumer has collected what it has brought.

    Used under the keeper's lock, but for :meth:`answered` and :meth:`fileno`.

    Arguments:
        queue: what it claims from.
        asked_at: monotonic time.
        acks: the acknowledgements that travel along.
        flight: the transaction.
        wanted: returns False once nobody will collect it.
    """

    def __init__(
        self,
        queue: str,
        asked_at: float,
        acks: list[Settlement],
        flight: Flight,
        wanted: Callable[[], bool],
    ) -> None:
        self.queue = queue
        self.asked_at = asked_at
        self.acks = acks
        self.flight = flight
        self._wanted = wanted
        #: Its consumer was interrupted, and will not collect it.
        self.abandoned = False
        #: The keeper has taken note of the answer, or of the error.
        self.noted = False
        self.rows: list[Claimed] = []
        self.leases: list[Lease] = []
        self.error: PgnotifyError | None = None

    @property
    def has_landed(self) -> bool:
        """True once somebody has read the answer."""
        return self.flight.has_landed

    def wanted(self) -> bool:
        """True if somebody will collect it."""
        return not self.abandoned and self._wanted()

    def answered(self) -> bool:
        """True if to collect it takes no waiting."""
        return self.flight.answered()

    @property
    def patience(self) -> float:
        """How many seconds the answer may still take."""
        return self.flight.patience

    def fileno(self) -> int:
        """The socket that becomes readable with the answer, unless another thread reads it."""
        return self.flight.fileno()


class Keeper(Protocol):
    """Who holds what claims bring."""

    def hold(self, queue_name: str, rows: Iterable[Claimed], leased_at: float) -> list[Lease]: ...

    def settle(self, lease: Lease, outcome: Outcome, reason: str = "") -> None: ...


class Claims:
    """Those that nobody has collected yet; used under the keeper's lock.

    Arguments:
        store: where the messages are.
        aftermath: remembers what was acknowledged.
        leases: what the process holds.
        outbox: what the server is to be told of.
        keeper: to hold what is new.
    """

    def __init__(
        self,
        store: MessageStore,
        aftermath: Aftermath,
        leases: dict[Fence, Lease],
        outbox: Outbox,
        keeper: Keeper,
    ) -> None:
        self._store = store
        self._aftermath = aftermath
        self._leases = leases
        self._outbox = outbox
        self._keeper = keeper
        self._all: list[Claim] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def under_way(self) -> bool:
        """True if the answer to one has not been taken note of."""
        return any(not claim.noted for claim in self._all)

    def add(self, claim: Claim) -> Claim:
        """It has been sent."""
        self._all.append(claim)
        return claim

    def discard(self, claim: Claim) -> None:
        """It has been collected."""
        if claim in self._all:
            self._all.remove(claim)

    def note_all(self, *, answered_only: bool = False) -> None:
        """Wait for the claims under way, hold what they bring, give back what nobody wants.

        Arguments:
            answered_only: do not wait.
        """
        for claim in list(self._all):
            if not claim.noted:
                if answered_only and not claim.answered():
                    continue
                self._note(claim)
            if not claim.leases:
                # Nothing to look after until it is collected.
                self._all.remove(claim)
            elif not claim.wanted():
                self._all.remove(claim)
                for lease in claim.leases:
                    if self._leases.get(lease.fence) is lease:
                        self._keeper.settle(lease, Outcome.RELEASED)
                claim.rows, claim.leases = [], []

    def _note(self, claim: Claim) -> None:
        """Take note of a claim's answer, and of that to the acknowledgements with it."""
        # Under the lock, so that what is leased and what is known never differ for others.
        try:
            settled, rows = self._store.landed(claim.flight)
            leases = [item.lease for item in claim.acks]
            settled |= self._aftermath.acknowledged(leases, settled)
            claim.rows, claim.leases = rows, self._hold_new(claim, rows)
        except PgnotifyError as exc:
            claim.error = exc
            self._outbox.put_back(claim.acks)
        except BaseException:
            claim.error = DatabaseUnavailable("a claim was interrupted")
            self._outbox.put_back(claim.acks)
            raise
        else:
            self._aftermath.claim_answered(claim.queue)
            report_missed(claim.acks, settled)
        finally:
            claim.noted = True

    def _hold_new(self, claim: Claim, rows: list[Claimed]) -> list[Lease]:
        """Hold what we have not had before; return a lease for each row."""
        asked_at = claim.asked_at
        latest = self._aftermath.latest
        had = _had_before(rows, asked_at, self._leases, self._outbox, latest)
        new = [row for row in rows if row.task_id not in had]
        ours = iter(self._keeper.hold(claim.queue, new, asked_at))
        return [
            Lease(row, claim.queue, asked_at) if row.task_id in had else next(ours) for row in rows
        ]


def _had_before(
    rows: list[Claimed],
    asked_at: float,
    leases: dict[Fence, Lease],
    outbox: Outbox,
    latest: Sequence[Lease],
) -> set[int]:
    """Return the ids of those deliveries that were ours already, since these are theirs.

    A claim does not wait for the disk: a server that has crashed may have forgotten it, and
    gives us the same delivery once more.  A later one would have another number.

    Arguments:
        rows: what was claimed at `asked_at` (monotonic).
        leases: what this process holds; loses what the server has lost.
        outbox: what it is about to settle; likewise.
        latest: what the last round trip has acknowledged.
    """
    known = {lease.fence: lease for lease in latest}
    for row in rows:
        if (lease := leases.get(Fence(row.task_id, row.delivery))) is not None:
            known[lease.fence] = lease
    # In this order: what is settled meanwhile moves from there to here.
    noted = list(outbox)
    known.update((item.lease.fence, item.lease) for item in noted)
    had = set()
    for row in rows:
        if (lease := known.get(Fence(row.task_id, row.delivery))) is None:
            continue
        if lease.published == row.published:
            lease.renewed_at = asked_at
            had.add(row.task_id)
            continue
        # Another message under the same number: that one is gone, and must not settle this.
        leases.pop(lease.fence, None)
        for item in (item for item in noted if item.lease is lease):
            outbox.remove(item)
        log_lost(lease, "the server has lost it, and given its number to another message")
    if had:
        logger.warning("claim.repeated the server had forgotten count=%d", len(had))
    return had
