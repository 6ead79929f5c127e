"""Dead letters: listed, requeued, deleted, and kept only as long as they are to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kombu_pgnotify import __main__ as command_line
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.dead_letters import DeadLetters
from kombu_pgnotify.messages import Fence, Outgoing
from kombu_pgnotify.topology import Queue

Sql = Callable[..., list[tuple[Any, ...]]]

EVERYTHING = ClaimCursor().next_ranges(0)
ENVELOPE = '{"headers": {"task": "proj.add"}}'


@pytest.fixture
def die(broker: Broker) -> Callable[..., None]:
    """A function that makes dead letters of messages with these payloads."""

    def run(queue: str, *payloads: bytes, envelope: str = ENVELOPE) -> None:
        for payload in payloads:
            broker.store.publish(queue, Outgoing(envelope, payload, priority=3))
        rows = broker.store.claim(queue, EVERYTHING, 100, broker.worker)
        fences = [Fence(row.task_id, row.delivery) for row in rows]
        assert len(broker.store.dead_letter(fences, "rejected")) == len(payloads)

    return run


@pytest.fixture
def letters(broker: Broker) -> DeadLetters:
    return DeadLetters(broker.database)


def payloads(broker: Broker, queue: str) -> list[bytes]:
    """Take all messages of a queue."""
    return [row.payload for row in broker.store.take(queue, EVERYTHING, 100)]


def test_the_list_says_what_why_and_who(
    die: Any, letters: DeadLetters, broker: Broker, sql: Sql
) -> None:
    die("a", b"1", b"2")
    die("b", b"3", envelope="no JSON")
    latest, *others = letters.find()
    assert (latest.queue, latest.task, latest.attempts) == ("b", "", 1)
    assert (latest.worker, latest.reason) == (broker.worker, "rejected")
    assert [other.task for other in others] == ["proj.add", "proj.add"]
    assert latest.dead_letter_id > others[0].dead_letter_id > others[1].dead_letter_id
    assert [letter.queue for letter in letters.find("a", limit=1)] == ["a"]
    assert sql("SELECT date_trunc('second', max(dead_at))::text FROM pgnotify.dead_letters") == [
        (latest.dead_at,)
    ]


def test_requeued_ones_are_new_messages_in_their_old_order(
    die: Any, letters: DeadLetters, broker: Broker, sql: Sql
) -> None:
    broker.housekeeper.declare(Queue.declared("a", {"x-message-ttl": 60_000}))
    die("a", b"1", b"2", b"3")
    first = letters.find()[-1].dead_letter_id
    assert letters.requeue(ids=[first, 10**9]) == 1
    assert letters.requeue("other") == 0
    assert letters.requeue("a") == 2
    assert letters.find() == []
    assert sql(
        "SELECT DISTINCT attempts, deliveries, priority, expires_at > now() FROM pgnotify.tasks"
    ) == [(0, 0, 3, True)]
    assert payloads(broker, "a") == [b"1", b"2", b"3"]


def test_requeueing_wakes_who_waits(die: Any, letters: DeadLetters, monkeypatch: Any) -> None:
    told: list[Any] = []
    monkeypatch.setattr(letters._store, "announce", lambda *what: told.append(what))
    die("a", b"1")
    die("b", b"2")
    assert letters.requeue() == 2
    assert [sorted(queues) for queues, _ in told] == [["a", "b"]]


def test_more_than_one_statement_takes(
    die: Any, letters: DeadLetters, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_pgnotify.dead_letters._CHUNK", 2)
    die("a", b"1", b"2", b"3", b"4", b"5")
    assert letters.requeue() == 5
    assert letters.find() == []
    assert payloads(broker, "a") == [b"1", b"2", b"3", b"4", b"5"]
    die("b", b"1", b"2", b"3")
    assert letters.delete("a") == 0
    assert letters.delete() == 3


def test_they_are_kept_as_long_as_they_are_to_be(make_broker: Any, sql: Sql) -> None:
    old = "INSERT INTO pgnotify.dead_letters (task_id, task_name, priority, published_at, attempts,"
    old += " reason, dead_at, envelope, payload) SELECT n, 'q', 0, now(), 1, 'rejected',"
    old += " now() - make_interval(hours => 10 - n), '{}', '' FROM generate_series(1, 9) AS n"
    keeps = make_broker()
    sql(old)
    keeps.housekeeper.sweep()
    assert len(DeadLetters(keeps.database).find()) == 9
    forgets = make_broker(dead_letter_retention=5.5 * 3600)
    forgets.housekeeper.sweep()
    left = [letter.dead_letter_id for letter in DeadLetters(keeps.database).find()]
    assert sorted(left) == [5, 6, 7, 8, 9]


def test_what_dies_anew_meanwhile_is_left_alone(
    die: Any, letters: DeadLetters, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may reject at once what is put back."""
    monkeypatch.setattr("kombu_pgnotify.dead_letters._CHUNK", 1)

    def reject(queues: list[str], _: str) -> None:
        rows = [r for queue in queues for r in broker.store.claim(queue, EVERYTHING, 9, "me")]
        broker.store.dead_letter([Fence(row.task_id, row.delivery) for row in rows], "rejected")

    monkeypatch.setattr(letters._store, "announce", reject)
    die("a", b"1", b"2")
    assert letters.requeue() == 2
    assert len(letters.find()) == 2


# -- the command


def test_the_command_lists_requeues_and_deletes(
    die: Any, broker: Broker, broker_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        code = command_line.main(["dead-letters", broker_url, *arguments])
        out, err = capsys.readouterr()
        return f"{code} {out}{err}"

    die("a", b"1", b"2")
    die("evil\x1b[2J\nqueue", b"3")
    listed = run()
    assert len(listed.splitlines()) == 3
    assert "\x1b" not in listed
    assert "queue a  proj.add  attempts 1" in listed
    assert f"last worker {broker.worker}  rejected" in listed
    assert run("--requeue") == "1 which ones? Name their IDs, or say --all\n"
    first = listed.splitlines()[-1].split()[0]
    assert run("--requeue", first) == "0 1 requeued.\n"
    assert payloads(broker, "a") == [b"1"]
    assert run("--delete", "--queue", "a", "--all") == "0 1 deleted.\n"
    assert run("--limit", "1").count("\n") == 1


@pytest.mark.parametrize("wrong", ["0", "-1", "x", str(2**64)])
@pytest.mark.parametrize("option", ["--limit", "--requeue", "--delete"])
def test_the_command_says_what_a_number_must_be(
    broker_url: str, option: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["dead-letters", broker_url, f"{option}={wrong}"])
    assert f"argument {option}: not a number from 1 to " in capsys.readouterr().err
