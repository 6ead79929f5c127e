"""Lease keeper: what this process holds, renewed while it lasts and settled in batches."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic

from .aftermath import Aftermath
from .claiming import Claim, Claims
from .errors import PgnotifyError
from .leases import Lease, Outbox, Outcome, Settlement, log_lost
from .messages import Claimed, Fence
from .session import Call
from .settling import Kinds, Teller, report_missed
from .store import MessageStore
from .waker import Inbox
from .wire import Rows

logger = logging.getLogger(__name__)

#: A lease is renewed when this share of it has passed: short tasks never are, and two
#: renewals may fail before the lease is lost.
RENEW_AFTER = 1 / 3

#: Seconds between the keeper's rounds while anything is held, at the most.
ROUND = 1.0

#: Rounds without anything held after which the thread ends.
IDLE_ROUNDS = 4

#: Seconds that the thread waits for the lock at the most.  Who has it may have been interrupted
#: by a signal handler that sleeps (Celery's soft shutdown): renewals cannot wait for that.
LOCK_PATIENCE = 0.1

#: Seconds that an acknowledgement waits for others in a loop that takes messages one by one and
#: has more of them: should the next one take long, the thread sends it.
ACK_PATIENCE = 0.02

#: Leases settled by one statement.
_CHUNK = 1000

#: Seconds between two warnings that the database is still away.
_WARN_EVERY = 30.0


class LeaseKeeper:
    """The leases of one process and broker.

    A daemon thread renews them, so that a task may run for hours while the consumer's
    loop is blocked; it also carries out what could not be settled at once.  It starts
    with the first lease and ends by itself when nothing is held.

    Arguments:
        store: where the messages are.
        worker: the holder of this process's leases.
        visibility_timeout: seconds a lease lasts.
    """

    def __init__(self, store: MessageStore, worker: str, visibility_timeout: float) -> None:
        self._store = store
        self._worker = worker
        self._aftermath = Aftermath(store, worker)
        self._teller = Teller(store, worker, self._aftermath)
        self._visibility_timeout = visibility_timeout
        self._renew_after = visibility_timeout * RENEW_AFTER
        self._round = min(ROUND, visibility_timeout / 6)
        self._pid = os.getpid()
        self._leases: dict[Fence, Lease] = {}
        self._outbox = Outbox()
        self._claims = Claims(store, self._aftermath, self._leases, self._outbox, self)
        self._inbox: Inbox[Lease | None] = Inbox()
        # Whether the thread is to settle now, or within ACK_PATIENCE.
        self._hurried = False
        self._impatient = False
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        # Reentrant: a signal handler may strike between taking it and saying so.
        self._flush_lock = threading.RLock()
        self._flushing: int | None = None
        self._warned_at = float("-inf")

    def claim(self, name: str, call: Call, asked_at: float) -> tuple[list[Claimed], list[Lease]]:
        """:meth:`start_claim` and :meth:`collect` at once."""
        return self.collect(self.start_claim(name, call, asked_at, at_once=True))

    def start_claim(
        self,
        queue_name: str,
        call: Call,
        asked_at: float,
        wanted: Callable[[], bool] = lambda: True,
        landed: Callable[[], None] = lambda: None,
        at_once: bool = False,
    ) -> Claim:
        """Send a claim, with the acknowledgements noted so far.

        The thread sees to it that what it brings is renewed, and given back if nobody is left to
        collect it.

        Arguments:
            at_once: it is collected before anything else is done: a poll needs no thread.
            wanted: returns False once nobody will collect it.
            landed: called when somebody else than :meth:`collect` has read the answer.

        Raises:
            PgnotifyError: the server cannot be had.
        """
        with self._locked():
            self._claims.note_all()
            self._aftermath.clear_up(self._known)
            acks = self._outbox.take_acks()
            self._aftermath.claim_sent(queue_name)
            try:
                fences = [item.lease.fence for item in acks]
                flight = self._store.start_with_acks(fences, self._worker, call, landed)
                claim = self._claims.add(Claim(queue_name, asked_at, acks, flight, wanted))
            except BaseException:
                self._outbox.put_back(acks)
                raise
        if not at_once:
            self.look_after()
        return claim

    def look_after(self) -> None:
        """Have the thread see to the claims that nobody may come back for."""
        with self._thread_lock:
            self._start()

    def collect(self, claim: Claim) -> tuple[list[Claimed], list[Lease]]:
        """Return what a claim has brought, waiting for it, under leases that we hold.

        What we have, or had, already is among it, so that the caller sees how much there was, but
        under a lease that we do not hold (:meth:`holds`): not to be delivered.

        Raises:
            PgnotifyError: what was leased all the same is released when the server is back.
        """
        claim.flight.expect()
        try:
            with self._locked():
                self._claims.note_all()
                self._claims.discard(claim)
            if claim.error is not None:
                raise claim.error
        except BaseException:
            claim.abandoned = True  # who was interrupted, or had no answer, does not come back
            self.look_after()
            self.hurry()
            raise
        return claim.rows, claim.leases

    def hold(self, queue_name: str, rows: Iterable[Claimed], leased_at: float) -> list[Lease]:
        """Take responsibility for rows just claimed (asked for at monotonic `leased_at`)."""
        leases = [Lease(row, queue_name, leased_at) for row in rows]
        self._leases.update((lease.fence, lease) for lease in leases)
        if leases:
            self.look_after()
        return leases

    def holds(self, lease: Lease) -> bool:
        """True if the lease is still ours: not lost, and not run out while we were stopped."""
        known = self._leases.get(lease.fence) is lease
        return known and monotonic() - lease.renewed_at < self._visibility_timeout

    def settle(self, lease: Lease, outcome: Outcome, reason: str = "") -> None:
        """Note how a delivery ended; :meth:`flush` or the thread's next round tells the server.

        Takes no lock and does no I/O.
        """
        if outcome is Outcome.RELEASED and lease.tried:
            outcome = Outcome.REQUEUED
        if self._leases.get(lease.fence) is lease:
            # In this order, so that the thread never sees nothing held in between.
            self._outbox.append(Settlement(lease, outcome, reason, monotonic()))
            self._leases.pop(lease.fence, None)
        else:
            logger.warning(
                "settle.ignored task_id=%d outcome=%s: the lease was lost, or is the parent's",
                lease.fence.task_id,
                outcome.value,
            )

    def hurry(self) -> None:
        """Ask the thread to settle now; takes no lock and does no I/O."""
        self._hurried = True
        self._inbox.put(None)

    def settle_soon(self) -> None:
        """Ask the thread to settle within ACK_PATIENCE what nobody has; as :meth:`hurry`."""
        if not self._impatient:
            self._impatient = True
            self._inbox.put(None)

    def forsaken(self, lease: Lease) -> None:
        """The message died in nobody's hands: give it back.  Safe in a weakref callback."""
        if os.getpid() == self._pid:
            self._inbox.put(lease)

    def flush(self) -> None:
        """Settle everything noted so far, one statement for each kind of outcome.

        Threads that come together share a round trip: whoever holds the lock settles for
        all.  Called from a signal handler that interrupted a flush, it leaves the work
        to the interrupted one.

        Raises:
            PgnotifyError: the rest stays noted, and the thread tries again.
        """
        if self._flushing == threading.get_ident():
            return
        with self._locked():
            self._claims.note_all()
            if self._outbox or self._aftermath.unanswered:
                self._aftermath.clear_up(self._known)
            while self._outbox:
                self._settle_batch()

    def run_with_acks(self, call: Call) -> Rows:
        """Run `call` in one transaction with the acknowledgements noted so far.

        Raises:
            PgnotifyError: the acknowledgements stay noted.
        """
        with self._locked():
            self._claims.note_all()
            self._aftermath.clear_up(self._known)
            items = self._outbox.take_acks()
            try:
                fences = [item.lease.fence for item in items]
                settled, rows = self._store.run_with_acks(fences, self._worker, call)
                settled |= self._aftermath.acknowledged([item.lease for item in items], settled)
            except BaseException:
                self._outbox.put_back(items)
                raise
        report_missed(items, settled)
        return rows

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Take the lock, and say so to signal handlers that interrupt this thread."""
        with self._flush_lock:
            before, self._flushing = self._flushing, threading.get_ident()
            try:
                yield
            finally:
                self._flushing = before

    @property
    def noted(self) -> bool:
        """True if something waits for somebody to settle it."""
        return bool(self._outbox)

    @property
    def pending(self) -> bool:
        """True if something waits to be settled or is just being settled."""
        # In this order: a failed settlement is noted again before it says that it has ended.
        return self._flushing is not None or bool(self._claims) or bool(self._outbox)

    @property
    def held(self) -> int:
        """How many leases this process holds."""
        return len(self._leases)

    def release_all(self) -> None:
        """Give everything back; for the end of the process."""
        with self._locked():
            self._claims.note_all()
        for lease in list(self._leases.values()):
            self.settle(lease, Outcome.RELEASED)
        self.flush()

    def _known(self) -> set[int]:
        """Return the ids of all that this process holds."""
        # In this order: what is settled meanwhile moves from the first to the second.
        held = [*list(self._leases), *(item.lease.fence for item in list(self._outbox))]
        return {fence.task_id for fence in held}

    def _settle_batch(self) -> None:
        kinds: Kinds = {}
        for item in self._outbox.take(_CHUNK):
            kinds.setdefault((item.outcome, item.reason), []).append(item)
        try:
            self._teller.tell_all(kinds)
        finally:
            self._outbox.put_back(item for rest in kinds.values() for item in rest)

    def _start(self) -> None:
        """Start the thread if it is not running; the caller holds the lock."""
        if self._thread is None:
            self._inbox.open()
            self._thread = threading.Thread(target=self._keep, name="pgnotify-keeper", daemon=True)
            self._thread.start()

    def _keep(self) -> None:
        idle = 0
        while True:
            try:
                self._listen_inside()
                self._renew_due(monotonic())
                if self._claims or self._aftermath.pending:
                    self._unless_locked(self._clear_up)
                self._settle_overdue()
            except PgnotifyError as exc:
                self._impatient = False
                self._warn(exc)
            except IndexError:
                # Somebody else has flushed what was seen first in the outbox.
                pass
            except Exception:
                # Every lease of the process depends on this thread.
                self._impatient = False
                logger.exception("keeper.failed")
            idle = 0 if self._leases or self._outbox or self._claims else idle + 1
            if idle > IDLE_ROUNDS and self._end():
                return

    def _end(self) -> bool:
        """Let go of the thread unless something came up meanwhile."""
        with self._thread_lock:
            # The outbox twice: a flush at work has emptied it and may fill it again, before it
            # says that it has ended.
            busy = self._outbox or self._leases or self._claims or self._flushing is not None
            if busy or self._outbox or not self._inbox.empty():
                return False
            self._thread = None
            self._inbox.close()
            return True

    def _listen_inside(self) -> None:
        """Wait for this process's own messages, at most a round."""
        forsaken = 0
        try:
            wait = ACK_PATIENCE if self._impatient or self._hurried else self._round
            lease = self._inbox.get(wait)
            while True:
                if lease is not None and self._leases.get(lease.fence) is lease:
                    forsaken += 1
                    self.settle(lease, Outcome.RELEASED)
                lease = self._inbox.get(0)
        except queue.Empty:
            pass
        if forsaken:
            logger.info("lease.forsaken released=%d", forsaken)
        if self._hurried or forsaken:
            self._unless_locked(self._flush_soon)

    def _clear_up(self) -> bool:
        """True unless a claim is unanswered: it may wait for a lock, and renewals must not."""
        with self._locked():
            self._claims.note_all(answered_only=True)
            if self._claims.under_way:
                return False
            if self._leases or self._outbox or self._aftermath.unanswered:
                self._aftermath.clear_up(self._known)
            return True

    def _flush_soon(self) -> None:
        self._hurried = False
        self._hurried = not self._clear_up()
        if not self._hurried:
            self.flush()

    def _settle_overdue(self) -> None:
        """Settle what no loop has come to settle."""
        patience = ACK_PATIENCE if self._impatient else self._round / 2
        if self._outbox and monotonic() - self._outbox[0].since >= patience:
            self._unless_locked(self._flush_soon)
        if self._impatient:
            # In this order: who notes something now sees that he must ask, or is seen here.
            self._impatient = False
            if self._outbox:
                self._impatient = True

    def _unless_locked(self, work: Callable[[], object]) -> None:
        """Do work that needs the lock; if somebody keeps it, the next round tries again."""
        if self._flush_lock.acquire(timeout=min(LOCK_PATIENCE, self._round / 4)):
            try:
                work()
            finally:
                self._flush_lock.release()

    def _renew_due(self, now: float) -> None:
        due = [le for le in list(self._leases.values()) if now - le.renewed_at >= self._renew_after]
        for lease in self._teller.renew(due):
            self._leases.pop(lease.fence, None)
            log_lost(lease, "somebody else may run it too")

    def _warn(self, exc: PgnotifyError) -> None:
        now = monotonic()
        if now - self._warned_at >= _WARN_EVERY:
            self._warned_at = now
            logger.warning(
                "keeper.unavailable held=%d unsettled=%d: %s", self.held, len(self._outbox), exc
            )
