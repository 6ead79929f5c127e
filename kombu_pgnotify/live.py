"""Live queues: what exchanges tell a consumer directly, without a row.

Control commands and events are for consumers that are there now.  Such a consumer's own
queue (exclusive, auto-delete, not durable) goes live once LISTEN on its exchanges is in
force: from then on exchanges notify it and write no rows.  In this order, so that nothing
is missed: LISTEN, then going live, then taking the rows from before.  A publisher that
looked before it was live has written a row, and says so in its notice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Set
from enum import Enum
from time import monotonic
from typing import NamedTuple

from .messages import Claimed, channel_of, exchange_channel_of
from .notices import Garbage, Notice, parse
from .store import MessageStore
from .topology import Topology

logger = logging.getLogger(__name__)

#: Messages that wait in memory for a consumer that is busy; the oldest go first.
MAILBOX = 10_000


class State(Enum):
    """How far a queue has come."""

    #: Nothing is known yet, or its bindings have changed.
    NEW = "new"
    #: Its exchanges' channels are asked for.
    LISTENING = "listening"
    LIVE = "live"
    #: It is none that may go live.
    ROWS = "rows"


class _Waiting(NamedTuple):
    notice: Notice
    until: float  # monotonic


class LiveQueue:
    """One queue's way to hear its exchanges directly.

    Used by the consuming thread; :meth:`hear` by the listener's too.

    Arguments:
        queue: its name.
        schema: names the channels.
    """

    def __init__(self, queue: str, schema: str) -> None:
        self.queue = queue
        self.state = State.NEW
        #: The listener was lost: exchanges must know before anything else.
        self.deaf = False
        #: The channels to LISTEN on, besides the queue's own.
        self.channels: frozenset[str] = frozenset()
        #: The queue's own channel.
        self.channel = channel_of(schema, queue)
        self._schema = schema
        self._version = -1
        self._keys: dict[str, set[str]] = {}
        self._message_ttl = float("inf")
        self._heard: deque[tuple[str, str, float]] = deque(maxlen=MAILBOX)
        self._waiting: deque[_Waiting] = deque(maxlen=MAILBOX)

    def hear(self, channel: str, payload: str) -> None:
        """Something was told on one of our channels; called by the listener's thread."""
        self._heard.append((channel, payload, monotonic()))

    def learn(self, topology: Topology) -> bool:
        """Find out what to listen to; True if :attr:`channels` has changed."""
        bindings = topology.bindings_of(self.queue)
        # A direct exchange tells one queue at a time: a row costs no more.
        if not any(binding.exchange_type != "direct" for binding in bindings):
            self.state = State.ROWS
            return False
        before = self.channels
        self._version, self._keys = bindings[0].version, {}
        for binding in bindings:
            channel = exchange_channel_of(self._schema, binding.exchange)
            self._keys.setdefault(channel, set()).add(binding.routing_key)
            if binding.message_ttl is not None:
                self._message_ttl = binding.message_ttl
        self.channels = frozenset(self._keys)
        self.state = State.LISTENING
        return self.channels != before

    def go_live(self, topology: Topology, in_force: Set[str]) -> bool:
        """Have the exchanges tell us directly from now on, if we hear them all; True if so.

        Arguments:
            in_force: the channels that we LISTEN on.
        """
        if self.state is not State.LISTENING or not self.channels <= in_force:
            return False
        live = topology.go_live(self.queue, self._version)
        # Else it was bound or deleted meanwhile: learn anew.
        self.state = State.LIVE if live else State.NEW
        return live

    def go_back(self, topology: Topology) -> None:
        """We hear nothing for the moment: let the queue get rows until it is live again."""
        if self.state is State.LIVE:
            topology.end_live(self.queue)
        self.deaf = False
        self.forget()

    def forget(self) -> None:
        """The bindings have changed: the queue gets rows until it is live again."""
        self.state = State.NEW

    def next(self, store: MessageStore) -> Claimed | None:
        """Return the next message that was told to us, if any."""
        self._sort()
        while self._waiting:
            notice, until = self._waiting[0]
            if monotonic() >= until:
                self._waiting.popleft()
                continue
            # While the server is away it stays the first one.
            message = notice.message or store.broadcast(notice.broadcast_id)
            self._waiting.popleft()
            if message is not None:
                return Claimed(0, 0, 1, 0, *message)
            logger.warning("broadcast.gone queue=%r id=%d", self.queue, notice.broadcast_id)
        return None

    @property
    def has_mail(self) -> bool:
        """True if :meth:`next` may return something."""
        return bool(self._waiting or self._heard)

    def _sort(self) -> None:
        """Keep of what was heard what is for this queue."""
        while self._heard:
            channel, payload, heard_at = self._heard.popleft()
            try:
                notice = parse(payload)
            except Garbage as exc:
                logger.warning("notice.garbage queue=%r: %s", self.queue, exc)
                continue
            ours = self._keys.get(channel, set())
            if ours.isdisjoint(notice.keys) or self.queue in notice.excepted:
                continue
            ttl = self._message_ttl if notice.ttl is None else min(self._message_ttl, notice.ttl)
            self._waiting.append(_Waiting(notice, heard_at + ttl))


class LiveQueues:
    """The queues of one consumer's connection that may hear their exchanges directly.

    Used by the consuming thread; :meth:`hear`, :meth:`rebound` and :meth:`deafened` by the
    listener's too.

    Arguments:
        topology, store: of this process's broker.
        schema: names the channels.
        listen: has the listener listen on :attr:`channels` too.
        heard: returns the channels that are listened on now.
    """

    def __init__(
        self,
        topology: Topology,
        store: MessageStore,
        schema: str,
        listen: Callable[[], None],
        heard: Callable[[], frozenset[str]],
    ) -> None:
        self._topology = topology
        self._store = store
        self._schema = schema
        self._listen = listen
        self._heard = heard
        self._queues: dict[str, LiveQueue] = {}
        self._deaf = False
        self._rebound: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, queue: str) -> None:
        """A consumer of `queue` takes what it is told."""
        self._queues.setdefault(queue, LiveQueue(queue, self._schema))

    def remove(self, queue: str) -> None:
        """Nobody consumes `queue` any more; takes no lock and does no I/O."""
        self._queues.pop(queue, None)

    @property
    def channels(self) -> set[str]:
        """The channels to listen on, besides the queues' own."""
        return {name for live in list(self._queues.values()) for name in live.channels}

    def hear(self, channel: str, payload: str) -> bool:
        """Take what an exchange tells; False if it is none of ours that tells it."""
        told = [live for live in list(self._queues.values()) if channel in live.channels]
        for live in told:
            live.hear(channel, payload)
        return bool(told)

    def rebound(self, channel: str) -> None:
        """The queue of that channel was bound to something more."""
        self._rebound.add(channel)

    def deafened(self) -> None:
        """The listener is lost: exchanges must know before anything else."""
        self._deaf = True

    def tend(self) -> list[str]:
        """Bring each queue one step further; return those that went live."""
        if self._deaf:
            self._deaf = False
            for live in list(self._queues.values()):
                live.deaf = True
        went_live = []
        for queue, live in list(self._queues.items()):
            if live.deaf:
                live.go_back(self._topology)
            if live.channel in self._rebound:
                self._rebound.discard(live.channel)
                live.forget()
            if live.state is State.NEW and live.learn(self._topology):
                self._listen()
            if live.go_live(self._topology, self._heard()):
                went_live.append(queue)
        return went_live

    def with_mail(self) -> list[str]:
        """Return the queues for which :meth:`next` may return something."""
        return [queue for queue, live in list(self._queues.items()) if live.has_mail]

    def next(self, queue: str) -> Claimed | None:
        """Return the next message that was told to `queue`, if any."""
        live = self._queues.get(queue)
        return None if live is None else live.next(self._store)
