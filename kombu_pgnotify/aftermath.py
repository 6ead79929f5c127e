"""Aftermath: what a lost connection leaves in doubt, cleared up once the server is back.

Two things can be wrong then.  A claim may have been carried out although its answer never
came: those messages are ours, and nobody here knows.  And acknowledgements do not wait for
the disk (synchronous_commit is off for them), so a server that has crashed may have
forgotten the last of them: it would have those messages delivered again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from .leases import Lease
from .store import MessageStore

logger = logging.getLogger(__name__)

#: Seconds of acknowledgements that are remembered, counted back from the latest: PostgreSQL
#: writes what has not waited for the disk within three times wal_writer_delay (0.6 s).
REMEMBERED = 1.5


class Aftermath:
    """What is in doubt for one process and broker; used under the keeper's lock.

    Arguments:
        store: where the messages are.
        worker: the holder of this process's leases.
    """

    def __init__(self, store: MessageStore, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._acknowledged: deque[tuple[float, Sequence[Lease]]] = deque()
        self._claimed_from: set[str] = set()
        #: What the last round trip with acknowledgements, if any, has acknowledged.
        self.latest: Sequence[Lease] = ()
        self._losses = 0

    def acknowledged(self, leases: Sequence[Lease], settled: set[int]) -> set[int]:
        """Remember for a moment what was acknowledged.

        Returns the ids of those that were not among the `settled` only because the server had
        forgotten the claim too: nobody has them, and they are done.
        """
        self.latest = leases
        if not leases:
            return set()
        self._acknowledged.append((monotonic(), leases))
        # The server has just answered; if it had crashed before, that was cleared up first.
        self._forget_written()
        return self._again([lease for lease in leases if lease.fence.task_id not in settled])

    def claim_sent(self, queue: str) -> None:
        """Should the answer never come, there may be messages of ours that we do not know."""
        self._claimed_from.add(queue)

    def claim_answered(self, queue: str) -> None:
        """It has come, and what was claimed is known."""
        self._claimed_from.discard(queue)

    @property
    def unanswered(self) -> bool:
        """True if a claim was not answered, or is under way."""
        return bool(self._claimed_from)

    @property
    def pending(self) -> bool:
        """True if a claim was not answered, or an acknowledgement may not be on disk yet."""
        return bool(self._claimed_from or self._acknowledged)

    def clear_up(self, known: Callable[[], Iterable[int]]) -> None:
        """Acknowledge again, and release what we hold without knowing; no claim is under way.

        Arguments:
            known: returns the ids of the messages that this process knows to hold.

        Raises:
            PgnotifyError: the server is still away; it stays in doubt.
        """
        if not self.pending:
            return
        losses = self._store.losses()
        if self._losses == losses:
            self._forget_written()
        else:
            if again := self._again([lease for _, some in self._acknowledged for lease in some]):
                logger.warning("ack.repeated the server had forgotten count=%d", len(again))
            self._losses = losses
        for queue in sorted(self._claimed_from):
            if released := self._store.disown(queue, self._worker, sorted(known())):
                logger.warning("claim.unanswered queue=%r released=%d", queue, released)
            self._claimed_from.discard(queue)

    def _again(self, leases: Sequence[Lease]) -> set[int]:
        fences, published = [lease.fence for lease in leases], [lease.published for lease in leases]
        return self._store.acknowledge_again(fences, published, self._worker)

    def _forget_written(self) -> None:
        """Forget what the server has had the time to write, and has not crashed since."""
        while self._acknowledged and self._acknowledged[0][0] < monotonic() - REMEMBERED:
            self._acknowledged.popleft()
