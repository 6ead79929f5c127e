"""Messages that kill their worker end as dead letters; those that cannot be buried stop nobody."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from fix_cluster import Cluster
from helpers import wait_until
from kombu import Connection, Exchange, Queue

from kombu_pgnotify.__main__ import main

Sql = Callable[..., list[tuple[Any, ...]]]

APP = "tests.faults.poison_app"
DEAD = "SELECT reason, attempts, worker_id, task_name FROM pgnotify.dead_letters"
LONG = os.urandom(3000).hex()  # longer than an index row may be, and does not compress


def poison(cluster: Cluster, task: str, label: str) -> str:
    """Publish a task that kills; return its id."""
    return str(cluster.tasks.app.send_task(f"{APP}.{task}", (label,)).id)


def test_a_task_that_kills_its_process_is_tried_so_often_and_no_more(cluster: Cluster) -> None:
    cluster.use(max_attempts=2)
    worker = cluster.worker("prefork", app=APP, concurrency=1)
    cluster.tasks.record_late.delay("before")
    task_id = poison(cluster, "kill_process", "poison")
    cluster.tasks.record_late.delay("after")
    cluster.wait_happened("done", {"before", "after"})
    ((reason, attempts, holder, queue),) = wait_until(lambda: cluster.sql(DEAD), 60)
    assert (reason, attempts, queue) == ("attempts used up", 2, "celery")
    assert holder.startswith(f"{socket.gethostname()}:{worker.pid}:")
    assert cluster.happened() == {"before": 1, "after": 1, "poison": 2}
    cluster.wait_queued(0, 0)
    ((envelope, payload),) = cluster.sql("SELECT envelope, payload FROM pgnotify.dead_letters")
    assert json.loads(envelope)["headers"]["id"] == task_id
    assert json.loads(payload)[0] == ["poison"]
    assert worker.returncode is None
    assert "message.dead_lettered" in worker.log()


def test_a_task_that_kills_its_worker_is_tried_so_often_and_no_more(cluster: Cluster) -> None:
    cluster.use(max_attempts=2, visibility_timeout=2)
    # Nothing is prefetched that would be held to have killed the worker too.
    alone = {"worker_prefetch_multiplier": 1}
    poison(cluster, "kill_worker", "poison")
    labels = {f"good-{n}" for n in range(5)}
    for label in labels:
        cluster.tasks.record_late.delay(label)
    for tries in (1, 2):
        cluster.worker("solo", app=APP, wait=False, concurrency=1, config=alone).wait(60)
        assert cluster.happened("started") == {"poison": tries}
    last = cluster.worker("solo", app=APP, concurrency=1, config=alone)
    ((reason, attempts, holder, _),) = wait_until(lambda: cluster.sql(DEAD), 60)
    assert (reason, attempts) == ("attempts used up", 2)
    assert holder.startswith(f"{socket.gethostname()}:")
    cluster.wait_happened("done", labels)
    # The queues of the others' control commands and events are still there.
    wait_until(lambda: not cluster.sql("SELECT FROM pgnotify.tasks WHERE task_name = 'celery'"))
    assert cluster.happened() == {"poison": 2, **dict.fromkeys(labels, 1)}
    assert last.returncode is None


def test_dead_letters_are_listed_sent_again_and_thrown_away(
    cluster: Cluster, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = cluster.worker("solo")
    for label in ("again", "away"):
        cluster.tasks.reject.delay(label, False)
    wait_until(lambda: len(cluster.sql(DEAD)) == 2)
    bodies = cluster.sql("SELECT dead_letter_id, payload FROM pgnotify.dead_letters")
    ids = {json.loads(payload)[0][0]: str(number) for number, payload in bodies}

    def command(*words: str) -> str:
        capsys.readouterr()
        assert main(["dead-letters", database, *words]) == 0
        return capsys.readouterr().out

    lines = command().splitlines()
    assert len(lines) == 2
    for line in lines:
        for word in ("tests.celery.app.reject", "queue celery", "rejected", "attempts 1"):
            assert word in line
        assert f"last worker {socket.gethostname()}:{worker.pid}:" in line
    assert command("--requeue", ids["again"]) == "1 requeued.\n"
    # The worker is told of it; it runs once more, and is rejected once more.
    wait_until(lambda: cluster.happened("rejected")["again"] == 2)
    wait_until(lambda: len(cluster.sql(DEAD)) == 2)
    assert command("--delete", ids["away"]) == "1 deleted.\n"
    assert command("--queue", "another", "--delete", "--all") == "0 deleted.\n"
    assert command("--queue", "celery", "--delete", "--all") == "1 deleted.\n"
    assert cluster.happened("rejected") == {"again": 2, "away": 1}
    cluster.wait_queued(0, 0)
    assert worker.returncode is None


def test_dead_letters_stay_until_somebody_deletes_them(
    connect: Callable[..., Connection], sql: Sql
) -> None:
    connection = connect()
    channel = connection.default_channel
    connection.Producer().publish("x", routing_key="box")
    channel.basic_get("box").reject()
    sql("UPDATE pgnotify.dead_letters SET dead_at = '-infinity', published_at = '-infinity'")
    channel.queue_delete("box")
    connection.transport.broker.housekeeper.sweep()
    assert len(sql(DEAD)) == 1


def test_an_unreadable_row_keeps_every_byte_as_a_dead_letter(
    connect: Callable[..., Connection], sql: Sql
) -> None:
    channel = connect().default_channel
    rows = [
        ("no JSON \N{PILE OF POO}", b"\0\xff"),
        ("[]", b""),
        ('{"properties": 1}', bytes(range(256))),
    ]
    for envelope, payload in rows:
        sql(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES ('box', %s, %s)",
            envelope,
            payload,
        )
    for _ in rows:
        assert channel.basic_get("box") is None
    kept = sql("SELECT envelope, payload FROM pgnotify.dead_letters ORDER BY task_id")
    assert kept == rows
    assert {row[:2] for row in sql(DEAD)} == {("unreadable", 1)}


# -- what cannot go where its queue sends it

UNCOUNTABLE = """
UPDATE pgnotify.tasks SET exchange_name = '', deaths = '[
    {"count": 1.5, "queue": "sick", "exchange": "", "reason": "rejected"},
    {"count": 1.5, "queue": "sick", "exchange": "", "reason": "expired"}]'
WHERE task_name = 'sick'
"""
#: Somebody's own idea of what may be in a queue.
REFUSAL = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE check_violation USING MESSAGE = 'not in odd'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON pgnotify.tasks
    FOR EACH ROW WHEN (NEW.task_name = 'odd') EXECUTE FUNCTION refuse();
UPDATE pgnotify.queues SET dead_letter_routing_key = 'odd' WHERE queue_name = 'sick'
"""
STUCK = {
    "a routing key too long for the name of a queue": [],
    "a trigger that refuses it where it is to go": [REFUSAL],
    "deaths that cannot be counted": [UNCOUNTABLE],
    "a binding that is no pattern": [
        "UPDATE pgnotify.queues SET dead_letter_exchange = 'odd' WHERE queue_name = 'sick'",
        "UPDATE pgnotify.bindings SET pattern = '(((' WHERE exchange_name = 'odd'",
    ],
}


@pytest.fixture
def with_neighbour(
    connect: Callable[..., Connection], sql: Sql
) -> Callable[[str, Any], Connection]:
    """A function that publishes a message that cannot be buried, and one that can."""

    def run(cause: str, expiration: float | None) -> Connection:
        connection = connect(visibility_timeout=600)
        channel = connection.default_channel
        Queue("odd", Exchange("odd", "topic"), "a.b")(channel).declare()
        sick = {"x-dead-letter-exchange": ""}
        Queue("sick", Exchange("news", "topic"), "#", queue_arguments=sick)(channel).declare()
        well = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave"}
        Queue("well", queue_arguments=well)(channel).declare()
        producer = connection.Producer()
        producer.publish("sick", exchange="news", routing_key=LONG, expiration=expiration)
        producer.publish("well", routing_key="well", expiration=expiration)
        for statement in STUCK[cause]:
            # That the server refuses such a row is as good.
            with suppress(psycopg.DataError, psycopg.IntegrityError):
                sql(statement)
        return connection

    return run


@pytest.mark.parametrize("cause", STUCK)
def test_a_rejected_message_that_cannot_be_buried_holds_up_no_other(
    cause: str, with_neighbour: Callable[[str, Any], Connection], sql: Sql
) -> None:
    connection = with_neighbour(cause, None)
    channel = connection.default_channel
    messages = [channel.basic_get(queue) for queue in ("sick", "well")]
    for message in messages:
        message.reject()
    wait_until(lambda: sql("SELECT task_name FROM pgnotify.tasks") == [("grave",)])
    assert not connection.transport.broker.keeper.noted
    kept = [(reason.partition(":")[0], queue) for reason, _, _, queue in sql(DEAD)]
    assert kept == ([("rejected", "sick")] if STUCK[cause] == [REFUSAL] else [])


@pytest.mark.parametrize("cause", STUCK)
def test_an_expired_message_that_cannot_be_buried_holds_up_no_other(
    cause: str, with_neighbour: Callable[[str, Any], Connection], sql: Sql
) -> None:
    connection = with_neighbour(cause, 0.01)
    wait_until(lambda: sql("SELECT bool_and(expires_at < now()) FROM pgnotify.tasks") == [(True,)])
    connection.transport.broker.housekeeper.sweep()
    assert sql("SELECT task_name FROM pgnotify.tasks") == [("grave",)]
    kept = [(reason.partition(":")[0], queue) for reason, _, _, queue in sql(DEAD)]
    assert kept == ([("expired", "sick")] if STUCK[cause] == [REFUSAL] else [])


def test_a_dead_letter_names_the_worker_that_had_it_and_not_the_one_that_buried_it(
    cluster: Cluster,
) -> None:
    cluster.use(max_attempts=1, visibility_timeout=1)
    poison(cluster, "kill_worker", "poison")
    first = cluster.worker("solo", app=APP, wait=False)
    first.wait(60)
    cluster.worker("solo", app=APP)
    ((_, attempts, holder, _),) = wait_until(lambda: cluster.sql(DEAD), 60)
    assert holder.split(":")[1] == str(first.pid)
    assert attempts == 1
