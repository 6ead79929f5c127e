"""Settling: tells the server how deliveries have ended, and which have not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TypeAlias

from .aftermath import Aftermath
from .errors import PgnotifyError, StatementFailed
from .leases import Lease, Outcome, Settlement
from .store import MessageStore

logger = logging.getLogger(__name__)

#: Deliveries that ended in the same way, for the same reason.
Kinds: TypeAlias = dict[tuple[Outcome, str], list[Settlement]]

#: Leases renewed by one statement.
_CHUNK = 1000


class Teller:
    """Carries out settlements, one statement for each kind, and renewals.

    Arguments:
        store: where the messages are.
        worker: the holder of this process's leases.
        aftermath: remembers what was acknowledged.
    """

    def __init__(self, store: MessageStore, worker: str, aftermath: Aftermath) -> None:
        self._store = store
        self._worker = worker
        self._aftermath = aftermath

    def tell_all(self, kinds: Kinds) -> None:
        """Settle, and take out of `kinds` what is settled.

        Raises:
            PgnotifyError: something is left; one kind that cannot be settled does not hold up
                the others.
        """
        failure: PgnotifyError | None = None
        for kind in list(kinds):
            try:
                self._tell(*kind, kinds[kind])
                del kinds[kind]
            except StatementFailed:
                self._tell_each(kinds[kind])
                del kinds[kind]
            except PgnotifyError as exc:
                failure = failure or exc
        if failure is not None:
            raise failure

    def renew(self, leases: Sequence[Lease]) -> Iterator[Lease]:
        """Renew `leases` and give those that are lost.

        Raises:
            PgnotifyError: not all were tried.
        """
        for start in range(0, len(leases), _CHUNK):
            chunk = leases[start : start + _CHUNK]
            asked_at = monotonic()
            renewed = self._store.renew([lease.fence for lease in chunk], self._worker)
            missed = [lease.fence for lease in chunk if lease.fence.task_id not in renewed]
            locked = self._store.still_held(missed, self._worker)
            for lease in chunk:
                if lease.fence.task_id in renewed:
                    lease.renewed_at = asked_at
                elif lease.fence.task_id not in locked:
                    yield lease

    def _tell(self, outcome: Outcome, reason: str, items: list[Settlement]) -> None:
        fences = [item.lease.fence for item in items]
        queues = {item.lease.queue for item in items}
        if outcome is Outcome.ACKNOWLEDGED:
            settled = self._store.acknowledge(fences, self._worker)
            settled |= self._aftermath.acknowledged([item.lease for item in items], settled)
        elif outcome is Outcome.DEAD_LETTERED:
            settled = self._store.dead_letter(fences, reason, self._worker)
        elif outcome is Outcome.EXPIRED:
            settled = self._store.expire(fences, self._worker)
        else:
            started = outcome is Outcome.REQUEUED
            settled = self._store.release(fences, queues, self._worker, started=started)
        report_missed(items, settled)

    def _tell_each(self, items: list[Settlement]) -> None:
        """One message that the server refuses to settle does not hold up the others."""
        while items:
            item = items[0]
            try:
                self._tell(item.outcome, item.reason, [item])
            except StatementFailed as exc:
                logger.error(
                    "settle.refused task_id=%d queue=%r it comes back when its lease ends: %s",
                    item.lease.fence.task_id,
                    item.lease.queue,
                    exc,
                )
            # Only now: if the server is lost meanwhile, it and the rest are still to be told.
            items.pop(0)


def report_missed(items: list[Settlement], settled: set[int]) -> None:
    """Report what could not be settled, since somebody else has it by now."""
    for item in items:
        if item.lease.fence.task_id not in settled:
            item.log_missed()
