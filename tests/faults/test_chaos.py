"""Proof that the verdict of the chaos (`tox -e chaos`) would notice what must not happen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORDS = {
    "killed": "its worker was killed",
    "child": "its pool process was killed",
    "stood still": "its worker stood still for longer than a lease",
    "cut off": "its worker could not reach the server for longer than a lease bears",
    "crash": "the server crashed within 1.5 s after its claim or ack",
    "published": "it was published twice: an attempt was in doubt",
    "nothing": "unexplained",
}


Judge = Callable[..., Any]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A function that judges facts of `(event, label, at, role, more)` by faults."""
    monkeypatch.syspath_prepend(str(HERE))
    import chaos_verdict
    from chaos_faults import Fault
    from chaos_records import Records

    def judge(facts: list[tuple[Any, ...]], *faults: tuple[Any, ...]) -> Any:
        lines = []
        for event, label, at, role, *more in facts:
            fact = {"event": event, "label": label, "at": at, "role": role, "pid": 1}
            fact |= {"late": True, "run": 1, "redelivered": False}
            lines.append(json.dumps(fact | dict(*more)) + "\n")
        (tmp_path / "facts.jsonl").write_text("".join(lines))
        records = Records(tmp_path)
        records.poll()
        made = [
            Fault(kind, [who], [who], begun, ended, pid) for kind, who, begun, ended, pid in faults
        ]
        return chaos_verdict.Judge(records, made, 4.0, {"one": 1, "two": 1}).judge()

    return judge


def published(label: str = "task", **more: Any) -> list[tuple[Any, ...]]:
    return [("sending", label, 0.0, "producer", more), ("accepted", label, 0.1, "producer")]


def executed(
    role: str, start: float, end: float | None, tag: str = "7.1", label: str = "task"
) -> list[tuple[Any, ...]]:
    facts: list[tuple[Any, ...]] = [
        ("received", label, start - 0.1, role, {"tag": tag}),
        ("start", label, start, role, {"tag": tag}),
    ]
    if end is not None:
        facts += [("end", label, end, role), ("acked", label, end, role, {"tag": tag})]
    return facts


def test_a_task_that_never_started_is_lost(judge: Judge) -> None:
    verdict = judge(published("one") + published("two") + executed("one", 1, 2, label="one"))
    assert (verdict.accepted, verdict.lost, verdict.unfinished) == (2, ["two"], [])


def test_a_late_task_that_never_ended_is_unfinished(judge: Judge) -> None:
    facts = published() + executed("one", 1, None)
    assert judge(facts, ("kill worker", "one", 1.5, 3.0, 0)).unfinished == ["task"]


def test_a_refused_task_is_not_lost_and_one_of_nobody_is_a_phantom(judge: Judge) -> None:
    facts = [("sending", "refused", 0.0, "producer"), *executed("one", 1, 2, label="strange")]
    verdict = judge(facts)
    assert (verdict.lost, verdict.unknown, verdict.phantoms) == ([], 1, ["strange"])


def test_an_early_task_whose_worker_was_killed_before_its_first_line(judge: Judge) -> None:
    facts = [*published(late=False), ("received", "task", 1.0, "one", {"tag": "7.1"})]
    verdict = judge(facts, ("kill worker", "one", 1.1, 3.0, 0))
    assert (verdict.lost, verdict.acked_early) == ([], ["task"])
    assert judge(facts, ("kill worker", "two", 1.1, 3.0, 0)).lost == ["task"]


@pytest.mark.parametrize(
    ("ended", "fault", "cause"),
    [
        (None, ("kill worker", "one", 2.0, 4.0, 0), "killed"),
        (3.0, ("kill worker", "one", 3.2, 4.0, 0), "killed"),
        (3.0, ("kill worker", "one", 5.0, 6.0, 0), "nothing"),
        (3.0, ("kill worker", "two", 2.0, 4.0, 0), "nothing"),
        (None, ("kill child", "one", 2.0, 2.0, 1), "child"),
        (None, ("kill child", "one", 2.0, 2.0, 99), "nothing"),
        (9.0, ("stand still", "one", 2.0, 8.0, 0), "stood still"),
        (3.0, ("stand still", "one", 4.0, 8.5, 0), "nothing"),
        (12.0, ("stand still", "one", 10.0, 17.0, 0), "nothing"),
        (9.0, ("freeze long", "one", 2.0, 8.0, 0), "cut off"),
        (9.0, ("freeze shortly", "one", 2.0, 3.0, 0), "nothing"),
        (9.0, ("end connections", "one", 2.0, 2.1, 0), "nothing"),
        (9.0, ("cut network", "one", 2.0, 2.0, 0), "nothing"),
        (9.0, ("restart server", "one", 2.0, 2.2, 0), "nothing"),
        (9.0, ("crash server", "one", 2.0, 2.2, 0), "crash"),
        (2.0, ("crash server", "one", 3.0, 3.2, 0), "crash"),
        (9.0, ("crash server", "one", 5.0, 5.2, 0), "nothing"),
        (2.0, ("crash server", "one", 8.0, 8.2, 0), "nothing"),
    ],
)
def test_what_explains_a_repeat(
    judge: Judge, ended: float | None, fault: tuple[Any, ...], cause: str
) -> None:
    facts = published() + executed("one", 1, ended) + executed("two", 9, 10, "7.2")
    assert judge(facts, fault).repeats == {WORDS[cause]: 1}


def test_another_row_is_explained_by_a_doubtful_publish_only(judge: Judge) -> None:
    facts = published() + executed("one", 1, 2) + executed("two", 3, 4, "8.1")
    assert judge(facts).repeats == {WORDS["nothing"]: 1}
    facts.append(("doubtful", "task", 0.05, "producer", {"why": "connection lost"}))
    assert judge(facts).repeats == {WORDS["published"]: 1}
