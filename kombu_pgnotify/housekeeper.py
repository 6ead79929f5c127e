"""Housekeeper: keeps queues that are in use, and clears away what nobody uses any more."""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
from collections import Counter
from time import monotonic
from typing import Literal, TypeAlias

from .errors import PgnotifyError, StatementFailed
from .store import MessageStore
from .topology import Queue, Topology, Touched
from .waker import Inbox

logger = logging.getLogger(__name__)

#: Seconds between two rounds; shorter where a queue in use lasts less than three of them.
ROUND = 5.0

#: … but not less than this, in seconds.
SHORTEST_ROUND = 0.2

#: Seconds between two sweeps by whoever comes first; who is alone comes every other round.
SWEEP_EVERY = 5.0

#: Seconds that a big message for live queues is kept for its readers.
BROADCAST_LASTS = 60.0

#: Rounds without anything in use after which the thread ends.
IDLE_ROUNDS = 3

#: Declarations of queues, and of exchanges, remembered, the latest.
REMEMBERED = 10_000

#: Queues cleared away in one sweep.
_QUEUES_AT_A_TIME = 100

#: Seconds between two warnings that the database is away.
_WARN_EVERY = 30.0


class Declaration:
    """What this process knows of a queue it has declared: enough to declare it again."""

    __slots__ = ("binding_version", "bindings", "name", "queue")

    def __init__(self, queue: Queue, name: str) -> None:
        self.queue = queue
        #: Names the declaration, see :meth:`Topology.abandon`.
        self.name = name
        self.bindings: set[tuple[str, str]] = set()
        #: Of its row, when all of them were last seen there; None: not yet.
        self.binding_version: int | None = None


#: What happened to a queue: it was looked at, or has one consumer less, who came upon that
#: declaration of it.
_Event: TypeAlias = tuple[str, Literal["used", "left"], Declaration | None]


class Housekeeper:
    """Looks after the queues of one process and broker, and takes its turn in sweeping for all.

    A daemon thread, since consumers' loops may be blocked for hours: it puts off the expiry of
    queues in use and declares them anew if they have been lost.  It starts with the first
    consumer and ends by itself after the last one.

    Arguments:
        topology, store: what to keep in order.
        worker: names this process.
    """

    def __init__(self, topology: Topology, store: MessageStore, worker: str) -> None:
        self._topology = topology
        self._store = store
        self._worker = worker
        self._pid = os.getpid()
        self._declarations: dict[str, Declaration] = {}
        self._exchanges: dict[str, tuple[str, bool]] = {}
        self._count = 0
        self._in_use: Counter[str] = Counter()
        self._inbox: Inbox[_Event | None] = Inbox()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._round = ROUND
        self._sweep_at = monotonic() + SWEEP_EVERY * random.random()
        self._warned_at = float("-inf")
        self._closing = False

    # -- what channels tell

    @property
    def consuming(self) -> bool:
        """True while this process has a consumer."""
        return bool(self._in_use)

    def declare(self, declared: Queue) -> None:
        """Declare a queue, and remember how if it may go by itself."""
        with self._lock:
            self._count += 1
            name = f"{self._worker}:{self._count}"
        declaration = Declaration(declared, name)
        self._topology.declare_queue(declared, name)
        if declared.passing:
            known = self._declarations.get(declared.name)
            if known is not None and known.queue == declared:
                declaration.bindings = known.bindings
            self._declarations[declared.name] = declaration
            while len(self._declarations) > REMEMBERED:
                self._declarations.pop(next(iter(self._declarations)), None)

    def exchange_declared(self, name: str, exchange_type: str, *, durable: bool) -> None:
        """Remember an exchange, should it have to be declared again for a queue in use."""
        self._exchanges[name] = exchange_type, durable
        while len(self._exchanges) > REMEMBERED:
            self._exchanges.pop(next(iter(self._exchanges)), None)

    def bound(self, queue_name: str, exchange: str, routing_key: str) -> None:
        """Remember a binding."""
        declaration = self._declarations.get(queue_name)
        if declaration is not None:
            declaration.bindings.add((exchange, routing_key))

    def unbound(self, queue_name: str, exchange: str, routing_key: str) -> None:
        """Forget a binding."""
        declaration = self._declarations.get(queue_name)
        if declaration is not None:
            declaration.bindings.discard((exchange, routing_key))

    def deleted(self, queue_name: str) -> None:
        """Forget a queue that was deleted on purpose."""
        self._declarations.pop(queue_name, None)

    def use(self, queue_name: str) -> Declaration | None:
        """One more consumer uses a queue; return the declaration it goes by, for :meth:`left`."""
        with self._lock:
            self._in_use[queue_name] += 1
        self._start()
        return self._declarations.get(queue_name)

    def left(self, queue_name: str, declaration: Declaration | None) -> None:
        """One consumer less uses a queue; takes no lock and does no I/O."""
        if os.getpid() == self._pid:
            self._inbox.put((queue_name, "left", declaration))

    def used(self, queue_name: str) -> None:
        """A queue was looked at: that puts its expiry off once."""
        if queue_name in self._declarations:
            self._inbox.put((queue_name, "used", None))
            self._start()

    def close(self, timeout: float) -> None:
        """Leave all queues and wait up to `timeout` seconds for the thread to end."""
        self._closing = True
        self._inbox.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    # -- the thread

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._inbox.open()
                self._thread = threading.Thread(
                    target=self._run, name="pgnotify-housekeeper", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        idle = 0
        round_at = monotonic()
        while True:
            try:
                self._take_in(round_at)
                if monotonic() >= round_at:
                    round_at = monotonic() + self._round
                    self._do_round()
                    idle = 0 if self._in_use else idle + 1
            except PgnotifyError as exc:
                self._warn(exc)
            except Exception:
                # The control queues of the whole process depend on this thread.
                logger.exception("housekeeper.failed")
            if (self._closing or idle > IDLE_ROUNDS) and self._end():
                return

    def _end(self) -> bool:
        """Let go of the thread unless something came up meanwhile."""
        with self._lock:
            if not self._inbox.empty() or (self._in_use and not self._closing):
                return False
            self._thread = None
            self._inbox.close()
            return True

    def _take_in(self, until: float) -> None:
        """Do what follows from what consumers tell us, until `until` (monotonic) or the end."""
        used: set[str] = set()
        while not self._closing or not self._inbox.empty():
            try:
                event = self._inbox.get(until - monotonic())
            except queue.Empty:
                break
            if event is None:
                continue
            name, what, declaration = event
            if what == "used":
                used.add(name)
            else:
                self._leave(name, declaration)
        if used:
            self._topology.touch(sorted(used))

    def _leave(self, name: str, declaration: Declaration | None) -> None:
        with self._lock:
            self._in_use[name] -= 1
            if self._in_use[name] > 0:
                return
            del self._in_use[name]
        if (
            declaration is not None
            and declaration.queue.exclusive
            and declaration.queue.auto_delete
        ):
            if self._declarations.get(name) is declaration:
                self._declarations.pop(name, None)
            self._topology.abandon(name, declaration.name)

    def _do_round(self) -> None:
        with self._lock:
            names = sorted(self._in_use)
        if names:
            lasting = self._topology.touch(names)
            soonest = min([ROUND, *(touched.lasts / 3 for touched in lasting.values())])
            self._round = max(SHORTEST_ROUND, soonest)
            for name in names:
                declaration = self._declarations.get(name)
                if declaration is not None and _is_lost(declaration, lasting.get(name)):
                    self._declare_again(declaration)
        if monotonic() >= self._sweep_at:
            self._sweep_at = monotonic() + SWEEP_EVERY * random.uniform(1, 1.5)
            if self._topology.claim_chore(SWEEP_EVERY):
                self.sweep()

    def _declare_again(self, declaration: Declaration) -> None:
        """The queue has expired while we could not reach the server, or somebody deleted rows."""
        name = declaration.queue.name
        logger.warning("queue.lost queue=%r it is declared again", name)
        self._topology.declare_queue(declaration.queue, declaration.name)
        for exchange, routing_key in sorted(declaration.bindings):
            _, there = self._topology.bind(name, exchange, routing_key)
            if not there and (known := self._exchanges.get(exchange)) is not None:
                kind, durable = known
                self._topology.declare_exchange(exchange, kind, durable=durable)
                self._topology.bind(name, exchange, routing_key)
        declaration.binding_version = None
        # It is not live any more, and its consumer must learn that.
        self._topology.announce_bound(name)

    def sweep(self) -> None:
        """Clear away expired queues and messages, and dead letters that were kept long enough."""
        for step in (self._sweep_queues, self._sweep_messages, self._sweep_kept):
            try:
                step()
            except StatementFailed as exc:
                # A row that the server will not let go must not keep the others.
                logger.error("sweep.failed %s: %s", step.__name__.lstrip("_"), exc)

    def _sweep_queues(self) -> None:
        for name in self._topology.expired_queues(_QUEUES_AT_A_TIME):
            logger.info("queue.expired queue=%r", name)
            self._store.purge(name, expired_only=True)
            self._topology.sweep_queue(name)

    def _sweep_messages(self) -> None:
        while self._store.sweep_messages():
            pass

    def _sweep_kept(self) -> None:
        self._topology.sweep_broadcasts(BROADCAST_LASTS)
        while self._store.sweep_dead_letters():
            pass

    def _warn(self, exc: PgnotifyError) -> None:
        now = monotonic()
        if now - self._warned_at >= _WARN_EVERY:
            self._warned_at = now
            logger.warning("housekeeper.unavailable: %s", exc)


def _is_lost(declaration: Declaration, touched: Touched | None) -> bool:
    """True if a queue in use is gone, or bindings of it that nobody has removed by the rules."""
    if touched is None:
        return True
    if touched.bindings >= len(declaration.bindings):
        declaration.binding_version = touched.version
        return False
    return declaration.binding_version in (None, touched.version)
