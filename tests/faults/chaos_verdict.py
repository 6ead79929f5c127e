"""The verdict: what was lost, what ran twice, and what explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chaos_faults import Fault, bearable
from chaos_records import Execution, Records

#: Claims, renewals and acks are committed asynchronously: a server that crashes forgets those of
#: the last moments (three times wal_writer_delay, 0.6 s; more on a machine with much to do).
FORGOTTEN = 1.5

#: Seconds until an ack is on its way, at the most: half a round of the keeper.
ACK_DELAY = 0.5

#: Causes of repeats, in words.
KILLED = "its worker was killed"
CHILD_KILLED = "its pool process was killed"
STOOD_STILL = "its worker stood still for longer than a lease"
CUT_OFF = "its worker could not reach the server for longer than a lease bears"
CRASH = f"the server crashed within {FORGOTTEN:g} s after its claim or ack"
DOUBTFUL_PUBLISH = "it was published twice: an attempt was in doubt"
UNEXPLAINED = "unexplained"

_KILLS = {"kill worker", "kill parent", "start cut off", "stop impatiently"}
_OUTAGES = {
    "freeze long",
    "freeze shortly",
    "restart server",
    "crash server",
    "server gone long",
    "server gone shortly",
}


@dataclass
class Verdict:
    """What became of the tasks.

    Attributes:
        lost: accepted, and no worker has started it …
        acked_early: … but its worker, which acknowledges before, was killed before the first line.
        unfinished: acknowledged late, and nobody has carried it to its end.
        unknown: somebody tried to publish it.
        phantoms: executed, and nobody has sent it.
        repeats: by cause.
    """

    accepted: int = 0
    in_doubt: int = 0
    unknown: int = 0
    unknown_executed: int = 0
    executions: int = 0
    lost: list[str] = field(default_factory=list)
    acked_early: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    phantoms: list[str] = field(default_factory=list)
    repeats: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


class Judge:
    """Judges the records of one run by its faults.

    Arguments:
        lease: seconds.
        slots: how many tasks each worker runs at once.
    """

    def __init__(
        self, records: Records, faults: Sequence[Fault], lease: float, slots: dict[str, int]
    ) -> None:
        self._records, self._faults = records, faults
        self._lease, self._bearable = lease, bearable(lease)
        self._slots = slots
        self.runs: dict[str, list[Execution]] = {}
        for run in sorted(records.executions, key=lambda run: run.start):
            self.runs.setdefault(run.label, []).append(run)

    def judge(self) -> Verdict:
        """Judge every task."""
        verdict = Verdict(executions=len(self._records.executions))
        for label, task in self._records.tasks.items():
            runs = self.runs.get(label, [])
            verdict.in_doubt += bool(task.doubt)
            if task.accepted is None:
                verdict.unknown += 1
                verdict.unknown_executed += bool(runs)
            else:
                verdict.accepted += 1
                if not runs:
                    gone = not task.late and self._acked_early(label)
                    (verdict.acked_early if gone else verdict.lost).append(label)
            if runs and task.late and all(run.end is None for run in runs):
                verdict.unfinished.append(label)
        verdict.phantoms = sorted(self.runs.keys() - self._records.tasks.keys())
        for label, runs in self.runs.items():
            for position in range(1, len(runs)):
                cause = self._cause(label, runs, position)
                verdict.repeats[cause] += 1
                if cause == UNEXPLAINED:
                    verdict.unexplained.append(label)
        return verdict

    def recovery(self, fault: Fault) -> dict[str, float | None]:
        """Return how long each worker it struck took to run something again (None: it never did).

        Time in which all its slots were taken, or another fault had it, does not count.
        """
        names = [name for name in fault.victims if name in self._slots]
        return {name: self._recovery_of(name, fault.ended) for name in names}

    # -- losses

    def _acked_early(self, label: str) -> bool:
        """True if a worker that had received the task was killed before it could begin."""
        return any(
            any(fault.begun >= received for fault in self._hitting(key[0], _KILLS | {"kill child"}))
            for key, received in self._records.received.items()
            if self._records.labels[key] == label
        )

    # -- repeats

    def _cause(self, label: str, runs: list[Execution], position: int) -> str:
        again, earlier = runs[position], runs[:position]
        same_row = [run for run in earlier if run.row == again.row]
        if not same_row:
            task = self._records.tasks.get(label)
            return DOUBTFUL_PUBLISH if task is not None and task.doubt else UNEXPLAINED
        for before in reversed(same_row):
            for cause in self._causes(before, again):
                return cause
        return UNEXPLAINED

    def _causes(self, before: Execution, again: Execution) -> Iterator[str]:
        """What explains that the same message ran again, the hardest cause first.

        It must have happened before it ran again, and while one of them had the lease.
        """
        if self._was_killed(before, again):
            yield KILLED
        if self._was_child_killed(before):
            yield CHILD_KILLED
        # Also where the later one had it first, lost its lease in standstill and began at last.
        for run in (before, again):
            if self._missed_renewals(run, {"stand still"}, again.start):
                yield STOOD_STILL
            if self._missed_renewals(run, _OUTAGES, again.start):
                yield CUT_OFF
            if self._was_forgotten(run, again.start):
                yield CRASH

    def _acked(self, run: Execution) -> float:
        """When it was acknowledged: never, if its worker was killed before."""
        return self._records.acked.get(run.key, float("inf"))

    def _was_killed(self, before: Execution, again: Execution) -> bool:
        """True if its worker was killed while it ran, or before its ack can have been written."""
        acked = self._acked(before)
        return any(
            before.received <= fault.begun <= again.start
            and fault.begun <= acked + ACK_DELAY + self._outage_after(before.instance, acked)
            for fault in self._hitting(before.instance, _KILLS)
        )

    def _outage_after(self, instance: str, acked: float) -> float:
        """For how long a worker could not write an ack."""
        outages = [f for f in self._hitting(instance, _OUTAGES) if f.ended >= acked]
        return sum(f.ended - max(f.begun, acked) for f in outages if f.begun <= acked + ACK_DELAY)

    def _was_child_killed(self, run: Execution) -> bool:
        """True if its pool process was killed while it ran, or before it can have said so."""
        faults = [f for f in self._hitting(run.instance, {"kill child"}) if f.pid == run.pid]
        end = float("inf") if run.end is None else run.end + ACK_DELAY
        return any(run.received <= fault.begun <= end for fault in faults)

    def _missed_renewals(self, run: Execution, kinds: set[str], until: float) -> bool:
        """True if its worker was hindered for too long between its claim and its ack."""
        acked = min(self._acked(run) + ACK_DELAY, until)
        return any(
            fault.begun <= acked
            and fault.ended >= run.received
            and fault.ended - fault.begun > self._bearable
            for fault in self._hitting(run.instance, kinds)
        )

    def _was_forgotten(self, run: Execution, until: float) -> bool:
        """True if the server crashed just after the claim or the ack."""
        acked = self._acked(run)
        for fault in self._faults:
            if fault.kind == "crash server" and fault.begun <= until:
                since = fault.begun - FORGOTTEN
                if since <= run.received <= fault.begun + ACK_DELAY:
                    return True
                if since - ACK_DELAY <= acked <= fault.begun:
                    return True
        return False

    def _hitting(self, instance: str, kinds: set[str]) -> list[Fault]:
        return [f for f in self._faults if f.kind in kinds and instance in f.instances]

    # -- recovery

    def _recovery_of(self, name: str, since: float) -> float | None:
        """Count from the fault's end to the start of a task that was received after it."""
        own = [run for run in self._records.executions if run.instance.split(".")[0] == name]
        fresh = [run for run in own if run.received >= since]
        if not fresh:
            return None
        first = min(fresh, key=lambda run: run.start)
        mates = [run for run in own if run.instance == first.instance]
        idle = idle_time(mates, self._slots[name], since, first.start)
        later = [f for f in self._faults if name in f.victims and since < f.begun < first.start]
        return max(0.0, idle - sum(min(f.ended, first.start) - f.begun for f in later))


def idle_time(runs: Sequence[Execution], slots: int, since: float, until: float) -> float:
    """Add up the time in which a worker had a free slot."""
    changes = [(since, 0), (until, 0)]
    for run in runs:
        start, end = max(run.start, since), min(until if run.end is None else run.end, until)
        if start < end:
            changes += [(start, 1), (end, -1)]
    idle, running, before = 0.0, 0, since
    for at, change in sorted(changes):
        if running < slots:
            idle += at - before
        running, before = running + change, at
    return idle
