"""One run: faults strike while producers publish, and in the end everything is checked."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from chaos_faults import Fault, Faults
from chaos_records import FOLDER, ROLE, Records
from chaos_report import Check, Report
from chaos_stage import Stage, Worker, our_threads, wait_for
from chaos_verdict import Judge, idle_time
from kombu import pools

#: Seconds in which every worker must run a probe, those aside in which it has no free slot.
DEAF_AFTER = 10.0
PROBE_TIMEOUT = 60.0  # seconds in all
DRAIN_TIMEOUT = 120.0  # seconds until the last task has run
EXPIRY_TIMEOUT = 40.0  # seconds until the queues of killed workers are gone: 10, and a sweep
GOODBYE_TIMEOUT = 20.0  # seconds until connections and threads are gone
#: File descriptors that a worker may have more at the end: connections come and go.
MORE_FILES = 12
#: Seconds that the run may take beyond its minutes, before it is cut off.
OVERTIME = 400.0


class Run:
    """One run.

    Arguments:
        args: the command line's.
        say: prints a line.
    """

    def __init__(self, args: argparse.Namespace, seed: int, say: Callable[[str], None]) -> None:
        self._seconds, self._say = args.minutes * 60, say
        self._stage = Stage(args.lease, args.rate, seed)
        self._faults = Faults(self._stage, random.Random(seed), args.pause)
        self._records = Records(self._stage.folder / "records")
        self._report = Report(self._stage.folder, args.minutes, seed, args.lease)
        self._began = time.monotonic()

    def run(self) -> Report:
        """Run, and return what came out of it; never takes much longer than it should."""
        watchdog = threading.Timer(self._seconds + OVERTIME, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        with self._stage:
            self._say(f"logs and records: {self._stage.folder}")
            self._stage.start()
            self._report.version = self._stage.server.embedded.version
            baseline = self._settled_topology()
            self._say("all workers are ready")
            self._stage.start_producers()
            self._strike_until(time.monotonic() + self._seconds)
            self._report.complaints += self._stage.stop_producers()
            self._say("producers have stopped, the last fault is healed")
            self._probe()
            self._drain()
            self._ping()
            self._compare_topology(baseline)
            self._stop_workers()
            self._check_remains()
        watchdog.cancel()
        self._judge()
        return self._report

    def _settled_topology(self) -> Counter[str]:
        """What the workers declare; a green one says that it is ready before it has done so."""
        boxes = len(self._stage.workers)

        def settled() -> bool:
            names = self._stage.topology()
            declared = sum(1 for name in names if re.fullmatch(r"queue .*@.*\.pidbox", name))
            return declared == boxes and not any("reply" in name for name in names)

        if not wait_for(settled, EXPIRY_TIMEOUT):
            self._report.complaints.append("the workers' queues are not all there")
        return self._stage.topology()

    def _strike_until(self, deadline: float) -> None:
        time.sleep(self._faults.pause())
        while time.monotonic() < deadline:
            fault = self._faults.strike()
            self._report.faults.append(fault)
            self._report.complaints += fault.complaints
            self._tell(fault)
            self._look_after_workers()
            time.sleep(self._faults.pause())

    def _tell(self, fault: Fault) -> None:
        victims = "all" if len(fault.victims) > 1 else fault.victims[0]
        lasted = f"{fault.ended - fault.begun:4.1f} s"
        since = fault.begun - self._began
        self._say(f"{since:6.1f} s  {fault.kind:20} {victims:10} healed after {lasted}")

    def _look_after_workers(self) -> None:
        """Replace a worker that has ended without having been told to."""
        for worker in self._stage.workers:
            if worker.process.returncode is not None:
                self._report.complaints.append(
                    f"{worker.instance} ended by itself with {worker.process.returncode}"
                )
                worker.start()
                worker.wait_ready()

    # -- the end

    def _probe(self) -> None:
        """Send each worker a task of its own and see who does not hear it."""
        prepare(self._stage)
        import chaos_app

        now = time.monotonic()
        for worker in self._stage.workers:
            label = f"probe-{worker.name}"
            if not chaos_app.publish(chaos_app.late, label, **chaos_app.directly_to(worker.name)):
                self._report.complaints.append(f"{label} could not be published")

        def deaf() -> list[Worker]:
            self._records.poll()
            heard = {run.label for run in self._records.executions}
            return [w for w in self._stage.workers if f"probe-{w.name}" not in heard]

        def decided() -> bool:
            waiting = [(w, self._idle(w, now)) for w in deaf()]
            return all(idle > DEAF_AFTER for _, idle in waiting)

        wait_for(decided, PROBE_TIMEOUT)
        names = [f"{w.instance} ({self._idle(w, now):.1f} s idle)" for w in deaf()]
        self._check("deaf workers", names, f"did not run a probe within {DEAF_AFTER:g} s")

    def _ping(self) -> None:
        """See who does not answer to remote control (`celery inspect ping`)."""
        import chaos_app

        names = {f"{worker.name}@{chaos_app.HOST}": worker for worker in self._stage.workers}

        def all_answered() -> bool:
            for reply in chaos_app.app.control.ping([*names], timeout=1.0, limit=len(names)):
                for name in reply:
                    names.pop(name, None)
            return not names

        wait_for(all_answered, DEAF_AFTER)
        silent = [worker.instance for worker in names.values()]
        self._check("workers without control", silent, "did not answer a ping")

    def _idle(self, worker: Worker, since: float) -> float:
        runs = [run for run in self._records.executions if run.instance == worker.instance]
        return idle_time(runs, worker.slots, since, time.monotonic())

    def _drain(self) -> None:
        drained = wait_for(lambda: not self._stage.messages()[0], DRAIN_TIMEOUT)
        if not drained:
            rows = self._stage.sql(
                "SELECT task_name, task_id, attempts, lease_worker_id, lease_expiration,"
                " available_at FROM pgnotify.tasks ORDER BY task_id LIMIT 20"
            )
            self._report.complaints += [f"still in the table: {row}" for row in rows]

    def _compare_topology(self, baseline: Counter[str]) -> None:
        """What killed workers have left behind goes by itself; what all use stays."""
        wait_for(lambda: self._stage.topology() == baseline, EXPIRY_TIMEOUT)
        now = self._stage.topology()
        changed = [f"too many: {name}" for name in (now - baseline).elements()]
        changed += [f"gone: {name}" for name in (baseline - now).elements()]
        self._check("queues and bindings changed", changed, "against the start")

    def _stop_workers(self) -> None:
        for worker in self._stage.workers:
            self._report.files[worker.instance] = (worker.files_at_start, worker.open_files())
        grown = [
            f"{instance}: {before} to {after}"
            for instance, (before, after) in self._report.files.items()
            if after > before + MORE_FILES
        ]
        self._check("workers with too many files", grown, f"{MORE_FILES} more than at the start")
        complaints = [worker.stop() for worker in self._stage.workers]
        self._report.complaints += [complaint for complaint in complaints if complaint]

    def _check_remains(self) -> None:
        """Nothing of ours may be left: messages, connections, processes, threads."""
        # Celery's close leaves open what kombu keeps for the next publish.
        pools.reset()
        wait_for(lambda: not self._stage.connections(), GOODBYE_TIMEOUT)
        wait_for(lambda: not our_threads(), GOODBYE_TIMEOUT)
        total, leased, dead = self._stage.messages()
        self._check("messages left", total, "in the table of tasks")
        self._check("leases left", leased)
        self._check("dead letters", dead)
        self._check("connections left", self._stage.connections(), "on the server")
        self._check("threads left", our_threads(), "in the harness")
        processes = [f"{process.pid} {process.name()}" for process in self._stage.processes()]
        self._check("processes left", processes, "of workers and producers")

    def _judge(self) -> None:
        """Read all records anew, in order, and judge."""
        records = Records(self._stage.folder / "records")
        records.poll()
        slots = {worker.name: worker.slots for worker in self._stage.workers}
        judge = Judge(records, self._report.faults, self._report.lease, slots)
        self._report.conclude(judge, records, self._began)

    def _check(self, name: str, found: Any, meaning: str = "") -> None:
        self._report.checks.append(Check(name, found, meaning))

    def _give_up(self) -> None:
        """The last resort: nothing of this may hang."""
        sys.stderr.write(f"chaos: not done after {self._seconds + OVERTIME:g} s, giving up\n")
        faulthandler.dump_traceback(file=sys.stderr)
        self._stage.end_processes()
        self._stage.server.embedded.stop("immediate")
        os._exit(3)


def prepare(stage: Stage) -> None:
    """Let this process publish: the application reads its environment when it is imported."""
    mine = stage.environment("harness", None)
    for name in ("CELERY_BROKER_URL", "CHAOS_OPTIONS", FOLDER, ROLE):
        os.environ[name] = mine[name]
