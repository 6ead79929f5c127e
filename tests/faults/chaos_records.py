"""What happened, one line a fact, in files that neither SIGKILL nor a crashed server can undo.

Each process appends to a file of its own, with one write a line; the kernel keeps what was
written when the process dies. Times are CLOCK_MONOTONIC's, one clock for all processes.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "CHAOS_RECORDS"  # the environment's names: where the files are …
ROLE = "CHAOS_ROLE"  # … and who writes: a worker's incarnation ("solo.3") or a producer


class Recorder:
    """Writes this process's facts; a forked child gets a file of its own."""

    def __init__(self) -> None:
        self._pid = self._fd = 0

    def note(self, event: str, label: str, **details: Any) -> None:
        """Write one fact: it is on record when this returns."""
        pid, role = os.getpid(), os.environ[ROLE]
        if self._pid != pid:
            path = Path(os.environ[FOLDER], f"{role}.{pid}.jsonl")
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._pid = pid
        fact = {"event": event, "label": label, "at": time.monotonic(), "role": role, "pid": pid}
        os.write(self._fd, (json.dumps(fact | details) + "\n").encode())


@dataclass
class Execution:
    """One run of a task by a worker.

    Attributes:
        row: the message's id in the table; `delivery` counts how often it was claimed.
        instance: the worker's incarnation.
        received: when Celery got it from the broker.
    """

    label: str
    row: int
    delivery: int
    instance: str
    pid: int
    received: float
    start: float
    end: float | None = None
    redelivered: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        """Names the delivery."""
        return self.instance, self.row, self.delivery


@dataclass
class Task:
    """One task, as its publisher and its workers saw it."""

    label: str
    late: bool
    sent: float
    accepted: float | None = None
    # Why somebody cannot say whether it was published, or how often.
    doubt: str = ""


class Records:
    """Reads the facts of all processes, as far as they have got."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._running: dict[tuple[str, int, int], Execution] = {}
        self.tasks: dict[str, Task] = {}
        #: (instance, row, delivery) -> when it was received.
        self.received: dict[tuple[str, int, int], float] = {}
        #: … and when it was acknowledged.
        self.acked: dict[tuple[str, int, int], float] = {}
        self.labels: dict[tuple[str, int, int], str] = {}
        self.executions: list[Execution] = []

    def poll(self) -> None:
        """Read what has been added; what is not yet a whole line waits for the next time."""
        facts: list[dict[str, Any]] = []
        for path in self._folder.glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
                facts += map(json.loads, whole.split(b"\n"))
        for fact in sorted(facts, key=lambda fact: fact["at"]):
            getattr(self, f"_{fact['event']}")(fact)

    # -- one method an event

    def _sending(self, fact: dict[str, Any]) -> None:
        task = Task(fact["label"], fact["late"], fact["at"])
        # Facts of different files may come late: keep what is known.
        self.tasks.setdefault(task.label, task)

    def _accepted(self, fact: dict[str, Any]) -> None:
        self.tasks[fact["label"]].accepted = fact["at"]

    def _doubtful(self, fact: dict[str, Any]) -> None:
        self.tasks[fact["label"]].doubt = fact["why"]

    def _received(self, fact: dict[str, Any]) -> None:
        key = (fact["role"], *_numbers(fact["tag"]))
        self.received.setdefault(key, fact["at"])
        self.labels[key] = fact["label"]

    def _acked(self, fact: dict[str, Any]) -> None:
        self.acked[(fact["role"], *_numbers(fact["tag"]))] = fact["at"]

    def _start(self, fact: dict[str, Any]) -> None:
        row, delivery = _numbers(fact["tag"])
        received = self.received.get((fact["role"], row, delivery), fact["at"])
        run = Execution(
            fact["label"], row, delivery, fact["role"], fact["pid"], received, fact["at"]
        )
        run.redelivered = fact["redelivered"]
        self.executions.append(run)
        self._running[fact["role"], fact["pid"], fact["run"]] = run

    def _end(self, fact: dict[str, Any]) -> None:
        run = self._running.pop((fact["role"], fact["pid"], fact["run"]), None)
        if run is not None:
            run.end = fact["at"]


def _numbers(tag: str) -> tuple[int, int]:
    row, _, delivery = tag.partition(".")
    return int(row), int(delivery)
