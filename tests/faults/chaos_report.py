"""The report: one line for each invariant, and what there is to know about a broken one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import Fault
from chaos_records import Execution, Records
from chaos_verdict import UNEXPLAINED, Judge, Verdict

#: Broken invariants are told of in so many examples.
EXAMPLES = 10


@dataclass
class Check:
    """One invariant: how many things break it, or which."""

    name: str
    found: Any
    meaning: str = ""

    @property
    def count(self) -> int:
        return self.found if isinstance(self.found, int) else len(self.found)


@dataclass
class Report:
    """What came out of a run."""

    folder: Path
    minutes: float
    seed: int
    lease: float
    version: str = ""
    faults: list[Fault] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    #: By kind of fault and worker: seconds, the slowest.
    recovery: dict[str, dict[str, float]] = field(default_factory=dict)
    stories: list[str] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(check.count for check in self.checks)

    def conclude(self, judge: Judge, records: Records, began: float) -> None:
        """Add what the records say."""
        verdict = self.verdict = judge.judge()
        self.checks = [
            Check("lost", verdict.lost, "accepted, and never started"),
            Check("unfinished", verdict.unfinished, "acks late, and nobody ran it to its end"),
            Check("unexplained repeats", verdict.unexplained, "ran again for no good reason"),
            Check("phantoms", verdict.phantoms, "ran, and nobody had sent it"),
            Check("complaints", self.complaints, "processes that ended wrongly, stuck rows"),
            *self.checks,
        ]
        for label in [*verdict.lost, *verdict.unfinished, *verdict.unexplained][:EXAMPLES]:
            self.stories += self._story(label, judge.runs.get(label, []), records, began)
        for fault in self.faults:
            slowest = self.recovery.setdefault(fault.kind, {})
            for name, seconds in judge.recovery(fault).items():
                if seconds is not None:
                    slowest[name] = max(slowest.get(name, 0.0), seconds)

    def _story(
        self, label: str, runs: list[Execution], records: Records, began: float
    ) -> list[str]:
        """Everything that is known about one task, with the faults around it."""
        task = records.tasks.get(label)
        lines = [f"{label}: {task}"]
        events: list[tuple[float, str]] = []
        for key, at in records.received.items():
            if records.labels[key] == label:
                events.append((at, f"received by {key[0]} as {key[1]}.{key[2]}"))
        for run in runs:
            where = f"{run.instance} (pid {run.pid}) as {run.row}.{run.delivery}"
            events.append((run.start, f"started by {where}, redelivered {run.redelivered}"))
            if run.key in records.acked:
                events.append((records.acked[run.key], f"acked by {where}"))
            if run.end is not None:
                events.append((run.end, f"ended by {where}"))
        first = min([at for at, _ in events], default=task.sent if task else began) - 5
        last = max([at for at, _ in events], default=first) + 5
        for fault in self.faults:
            if fault.ended >= first and fault.begun <= last:
                events.append((fault.begun, f"-- {fault.kind} {fault.instances} pid {fault.pid}"))
                events.append((fault.ended, f"-- {fault.kind} healed"))
        return [*lines, *(f"  {at - began:8.3f} s  {what}" for at, what in sorted(events))]

    def lines(self) -> list[str]:
        """The summary, for a tired operator."""
        server = f"PostgreSQL {self.version}, leases of {self.lease:g} s"
        lines = ["", f"chaos: {self.minutes:g} minutes, seed {self.seed}, {server}", ""]
        lines += [*self._task_lines(), "", *self._fault_lines(), ""]
        files = [f"{name} {before} to {after}" for name, (before, after) in self.files.items()]
        lines += [f"open files of the workers' parents: {', '.join(files)}", ""]
        for check in self.checks:
            state = "BROKEN" if check.count else "ok    "
            lines.append(f"{state} {check.count:4}  {check.name:28} {check.meaning}".rstrip())
        return lines + (["", *self._reasons()] if self.broken else [])

    def _task_lines(self) -> list[str]:
        verdict = self.verdict
        figures = [
            (verdict.accepted, "tasks accepted"),
            (verdict.executions, "executions"),
            (verdict.in_doubt, "tasks that were published more than once, or perhaps"),
            (
                verdict.unknown,
                f"of them refused in the end; {verdict.unknown_executed} of these ran",
            ),
            (len(verdict.acked_early), "acknowledged early, the worker killed before their start"),
            (sum(verdict.repeats.values()), "repeats"),
        ]
        figures += [(count, f"  {cause}") for cause, count in verdict.repeats.most_common()]
        return [f"{count:6}  {what}" for count, what in figures]

    def _fault_lines(self) -> list[str]:
        """Tell of each kind of fault, how often it struck, and how long its victims took."""
        lines = ["faults                      slowest recovery, to the next task received and run"]
        for kind, count in sorted(Counter(fault.kind for fault in self.faults).items()):
            workers = sorted(self.recovery.get(kind, {}).items(), key=lambda item: -item[1])
            slowest = f"{workers[0][1]:5.1f} s  {workers[0][0]}" if workers else ""
            lines.append(f"{count:6}  {kind:20}{slowest}".rstrip())
        return lines

    def _reasons(self) -> list[str]:
        lines = []
        for check in self.checks:
            if check.count and not isinstance(check.found, int):
                lines += [f"{check.name}: {item}" for item in list(check.found)[:EXAMPLES]]
        return [*lines, *self.stories, f"logs and records: {self.folder}"]

    def to_json(self) -> str:
        """The same for programs."""
        verdict = self.verdict
        counts = {name: value for name, value in vars(verdict).items() if isinstance(value, int)}
        return json.dumps(
            {
                "minutes": self.minutes,
                "seed": self.seed,
                "lease": self.lease,
                "postgresql": self.version,
                "broken": self.broken,
                "tasks": counts,
                "acked_early": verdict.acked_early,
                "faults": [vars(fault) for fault in self.faults],
                "repeats": dict(verdict.repeats),
                "unexplained": verdict.repeats[UNEXPLAINED],
                "recovery": self.recovery,
                "files": self.files,
                "checks": {check.name: check.found for check in self.checks},
                "stories": self.stories,
            },
            indent=2,
        )
