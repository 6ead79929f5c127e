"""Broker: everything one process holds of one broker, and what a fork means for it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import uuid

from .database import Database
from .errors import PgnotifyError
from .housekeeper import Housekeeper
from .keeper import LeaseKeeper
from .listener import Listener
from .options import Options
from .store import MessageStore
from .topology import Topology

logger = logging.getLogger(__name__)

#: Seconds the process's end waits for each of our threads.
_GOODBYE = 1.0


class Broker:
    """Database, store, topology and the threads of this process for one set of options.

    All kombu Connections of a process that mean the same broker share one: that is why
    an idle worker needs two connections and no more.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pid = os.getpid()
        #: Shown as the holder of leases.
        self.worker = f"{socket.gethostname()}:{self.pid}:{uuid.uuid4().hex[:8]}"
        #: How often a consumer has found the server away.
        self.losses = 0
        #: The consumers that bear at this moment that the server is away.
        self.interrupted: set[object] = set()
        self.database = Database(options)
        self.store = MessageStore(self.database)
        self.keeper = LeaseKeeper(self.store, self.worker, options.visibility_timeout)
        self.listener = Listener(self.database)
        self.topology = Topology(self.database)
        self.housekeeper = Housekeeper(self.topology, self.store, self.worker)

    def close(self) -> None:
        """Give back what is held and close every connection; for the end of the process."""
        self.housekeeper.close(_GOODBYE)
        self.listener.close(_GOODBYE)
        try:
            # Also waits for what the keeper's thread is just settling.
            self.keeper.release_all()
        except PgnotifyError as exc:
            logger.warning("broker.close leases expire by themselves: %s", exc)
        self.database.close()


#: The brokers of this process …
_brokers: dict[Options, Broker] = {}
_lock = threading.Lock()

#: … and those of its parents, kept for ever so that nothing of them is finalised here.
_inherited: list[Broker] = []


def for_options(options: Options) -> Broker:
    """Return this process's broker for `options`."""
    with _lock:
        broker = _brokers.get(options)
        if broker is None:
            broker = _brokers[options] = Broker(options)
        return broker


def _forget_after_fork() -> None:
    """In a forked child: use, close and release nothing of the parent's."""
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_brokers.values())
    _brokers.clear()


def _close_all() -> None:
    for broker in list(_brokers.values()):
        broker.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_all)
