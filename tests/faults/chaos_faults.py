"""The faults: each strikes, lasts, heals and says when and whom it struck."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos_stage import OURS, Stage, Worker
from fix_proxy import Proxy

#: Characters kept of what a worker said at last.
COMPLAINT = 2000

#: Seconds between the keeper's rounds, at the most (keeper.py).
ROUND = 1.0


@dataclass
class Fault:
    """One fault.

    Attributes:
        victims, instances: the workers it struck, and their incarnations.
        pid: the process that was killed, if only one was.
        begun, ended: monotonic; ended when everything works again.
    """

    kind: str
    victims: list[str]
    instances: list[str]
    begun: float
    ended: float = 0.0
    pid: int = 0
    details: str = ""
    complaints: list[str] = field(default_factory=list)


def bearable(lease: float) -> float:
    """Return for how long a process that cannot renew its leases keeps them in any case.

    A lease is renewed when a third of it and at most a round have passed; and the renewal that
    failed is repeated within a round after the server is back.
    """
    return lease * 2 / 3 - 2 * min(ROUND, lease / 6)


class Faults:
    """Makes faults in the order that the seed gives, each kind as often as any.

    Arguments:
        pause: seconds between two, on average.
    """

    def __init__(self, stage: Stage, rng: random.Random, pause: float) -> None:
        self._stage, self._rng, self._pause = stage, rng, pause
        self._deck: list[Callable[[Fault], None]] = []
        self._kinds = [
            self.kill_worker,
            self.kill_parent,
            self.start_cut_off,
            self.kill_child,
            self.stop_warmly,
            self.stop_impatiently,
            self.stand_still,
            self.end_connections,
            self.end_all_connections,
            self.restart_server,
            self.crash_server,
            self.server_gone_shortly,
            self.server_gone_long,
            self.cut_network,
            self.freeze_shortly,
            self.freeze_long,
            self.slow_network,
        ]

    def strike(self) -> Fault:
        """Make the next fault and heal it."""
        if not self._deck:
            self._deck = self._rng.sample(self._kinds, len(self._kinds))
        make = self._deck.pop()
        fault = Fault(make.__name__.replace("_", " "), [], [], time.monotonic())
        try:
            make(fault)
        except AssertionError as error:
            # A worker that never got ready: say so, and see what becomes of the tasks.
            fault.complaints.append(str(error)[:COMPLAINT])
        fault.ended = time.monotonic()
        return fault

    def pause(self) -> float:
        """Return for how long to wait before the next fault."""
        return self._rng.uniform(0.6, 1.4) * self._pause

    # -- processes

    def kill_worker(self, fault: Fault) -> None:
        """SIGKILL a worker with its pool, as a machine that loses power."""
        worker = self._victim(fault)
        worker.process.kill()
        self._replace(worker)

    def kill_parent(self, fault: Fault) -> None:
        """SIGKILL only the parent of a pool of processes: the children are orphaned."""
        worker = self._victim(fault, pool="prefork")
        worker.process.signal(signal.SIGKILL)
        worker.process.wait()
        self._replace(worker)

    def start_cut_off(self, fault: Fault) -> None:
        """SIGKILL a worker, and have the next one find no server when it starts."""
        worker = self._victim(fault)
        worker.process.kill()
        worker.proxy.refuse()
        worker.start()
        self._last(fault, self._rng.uniform(3, 6))
        worker.proxy.accept()
        worker.wait_ready()

    def kill_child(self, fault: Fault) -> None:
        """SIGKILL one process of a pool."""
        worker = self._victim(fault, pool="prefork")
        if children := worker.children():
            fault.pid = self._rng.choice(children)
            os.kill(fault.pid, signal.SIGKILL)

    def stop_warmly(self, fault: Fault) -> None:
        """SIGTERM: the worker ends its tasks and gives the others back."""
        worker = self._victim(fault)
        if complaint := worker.stop():
            fault.complaints.append(complaint)
        self._replace(worker)

    def stop_impatiently(self, fault: Fault) -> None:
        """SIGTERM, and SIGKILL before it has ended: as who moves containers does."""
        worker = self._victim(fault)
        worker.process.signal(signal.SIGTERM)
        self._last(fault, self._rng.uniform(0.1, 2))
        fault.begun = time.monotonic()
        worker.process.kill()
        self._replace(worker)

    def stand_still(self, fault: Fault) -> None:
        """SIGSTOP a worker for longer than a lease."""
        worker = self._victim(fault)
        worker.signal_all(signal.SIGSTOP)
        self._last(fault, self._rng.uniform(1.3, 2.2) * self._stage.lease)
        worker.signal_all(signal.SIGCONT)

    # -- connections

    def end_connections(self, fault: Fault) -> None:
        """Have the server end about half of our connections."""
        self._everybody(fault)
        self._terminate(f"{OURS} AND random() < 0.5")

    def end_all_connections(self, fault: Fault) -> None:
        """Have the server end all of our connections."""
        self._everybody(fault)
        self._terminate(OURS)

    def restart_server(self, fault: Fault) -> None:
        """Restart the server as `pg_ctl restart -m fast` does."""
        self._everybody(fault)
        self._stage.server.restart("fast")

    def crash_server(self, fault: Fault) -> None:
        """Restart the server as `pg_ctl restart -m immediate` does: it recovers as from a crash."""
        self._everybody(fault)
        self._stage.server.restart("immediate")

    # -- the network

    def server_gone_shortly(self, fault: Fault) -> None:
        """Have nobody on the server's host, for no longer than leases bear."""
        self._vanish(fault, self._rng.uniform(0.3, 0.9) * bearable(self._stage.lease))

    def server_gone_long(self, fault: Fault) -> None:
        """Have nobody on the server's host for longer than a lease."""
        self._vanish(fault, self._rng.uniform(1.1, 2) * self._stage.lease)

    def cut_network(self, fault: Fault) -> None:
        """Reset the connections of somebody."""
        self._somebodys_network(fault).cut()

    def freeze_shortly(self, fault: Fault) -> None:
        """Swallow somebody's packets, for no longer than leases bear."""
        self._freeze(fault, self._rng.uniform(0.3, 0.9) * bearable(self._stage.lease))

    def freeze_long(self, fault: Fault) -> None:
        """Swallow somebody's packets for longer than a lease."""
        self._freeze(fault, self._rng.uniform(1.3, 2.5) * self._stage.lease)

    def slow_network(self, fault: Fault) -> None:
        """Delay somebody's packets."""
        proxy = self._somebodys_network(fault)
        proxy.delay(self._rng.uniform(0.05, 0.3))
        self._last(fault, self._rng.uniform(2, 5))
        proxy.delay(0)

    # -- what they share

    def _victim(self, fault: Fault, pool: str = "") -> Worker:
        workers = [worker for worker in self._stage.workers if pool in worker.name]
        worker = self._rng.choice(workers)
        fault.victims, fault.instances = [worker.name], [worker.instance]
        return worker

    def _everybody(self, fault: Fault) -> None:
        fault.victims = [worker.name for worker in self._stage.workers]
        fault.instances = [worker.instance for worker in self._stage.workers]

    def _somebodys_network(self, fault: Fault) -> Proxy:
        """Choose a worker or the producers."""
        proxy = self._rng.choice(self._stage.proxies)
        hit = [worker for worker in self._stage.workers if worker.proxy is proxy]
        fault.victims = [worker.name for worker in hit] or ["producers"]
        fault.instances = [worker.instance for worker in hit]
        return proxy

    def _freeze(self, fault: Fault, seconds: float) -> None:
        proxy = self._somebodys_network(fault)
        proxy.freeze()
        self._last(fault, seconds)
        proxy.thaw()

    def _vanish(self, fault: Fault, seconds: float) -> None:
        """Reset all connections and refuse new ones."""
        self._everybody(fault)
        for proxy in self._stage.proxies:
            proxy.refuse()
            proxy.cut()
        self._last(fault, seconds)
        for proxy in self._stage.proxies:
            proxy.accept()

    def _last(self, fault: Fault, seconds: float) -> None:
        fault.details = f"for {seconds:.1f} s"
        time.sleep(seconds)

    def _replace(self, worker: Worker) -> None:
        worker.start()
        worker.wait_ready()

    def _terminate(self, condition: str) -> None:
        self._stage.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {condition}")
